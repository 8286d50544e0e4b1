"""Check the notes on differences from lm-eval, and the further options of its command."""

import json

import pytest

from holdfast.evaluate.harness.choose import harness
from holdfast.evaluate.types.suite import TaskEntry
from holdfast.testing.local_client import LocalClient

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's and its dependencies' own

DRAWING = """
import random

def process_docs(docs):
    return docs.map(lambda doc: {"drawn": random.random()})

def process_results(doc, results):
    return {"length": random.random()}
"""


def ran(world, folder, name, include=(), chat_template=False, **options):
    made = harness("lm-eval", include_paths=[str(world.tasks), *map(str, include)])
    entry = TaskEntry(
        name=name, options={"bootstrap_iters": 0, **options}, chat_template=chat_template
    )
    made.prepare([entry])
    client = LocalClient(world.engine(), world.facts, made, entry)
    return made.run(entry, client, folder)


def test_nothing_is_noted_of_what_is_bit_for_bit(world, tmp_path):
    assert ran(world, tmp_path, "t_own").notes == []


def test_sampled_answers_are_noted(world, tmp_path):
    sampled = {"temperature": 0.7, "do_sample": True}
    (note,) = ran(world, tmp_path, "t_own", gen_kwargs=sampled).notes
    assert note.startswith("t_own samples its answers")


def test_process_wide_random_numbers_are_drawn_in_lm_evals_order(world, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "drawing.py").write_text(DRAWING)
    text = (world.tasks / "t_own.yaml").read_text().replace("task: t_own", "task: t_drawing")
    text = text.replace("!function utils.process_results", "!function drawing.process_results")
    (own / "t_drawing.yaml").write_text(text)
    first, second = (ran(world, tmp_path, "t_drawing", [own]) for _ in range(2))
    assert first.results["results"] == second.results["results"], "each metric drew in one order"


def test_two_continuations_of_one_input_are_noted(world, tmp_path):
    from holdfast.evaluate.harness.lm_eval.metrics import Exchange
    from holdfast.evaluate.types.requests import Request, pack_tokens

    class Two:
        def requests_of(self, instance):
            return [instance.asked]

    class Asked:
        request_type, repeats = "loglikelihood", 1

        def __init__(self, prompt, continuation):
            self.asked = Request(
                kind="loglikelihood",
                prompt=pack_tokens(prompt),
                continuation=pack_tokens(continuation),
            )

    exchange = Exchange(None, Two(), None)
    exchange._requests(Asked([1, 2], [3]))
    exchange._requests(Asked([1, 2], [4]))
    assert not exchange.splits_one_input, "two choices of one length are told apart"
    exchange._requests(Asked([1], [2, 3]))
    assert exchange.splits_one_input


@pytest.mark.parametrize("name", ["t_group", "t_choice.yaml"])
def test_documents_of_a_group_or_of_a_file_are_chosen(world, tmp_path, name):
    entry = str(world.tasks / name) if name.endswith(".yaml") else name
    result = ran(world, tmp_path, entry, samples=[1, 4])
    logged = tmp_path / result.samples_file
    files = sorted(logged.glob("*.jsonl")) if logged.is_dir() else [logged]
    assert len(files) == (3 if name == "t_group" else 1)
    for file in files:
        numbers = {json.loads(line)["doc_id"] for line in file.read_text().splitlines()}
        assert numbers == {1, 4}


def test_predictions_alone_and_chosen_documents(world, tmp_path):
    result = ran(world, tmp_path, "t_own", predict_only=True, samples=[1, 4])
    assert result.results["results"]["t_own"]["bypass,none"] == 999
    lines = (tmp_path / result.samples_file).read_text().splitlines()
    assert sorted(json.loads(line)["doc_id"] for line in lines) == [1, 4]
