import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from inspect_world import (
    FailingClient,
    JudgeServer,
    ModelClient,
    TextClient,
    make_model,
    write_tasks,
)

from deferred import Deferred, needs
from holdfast.core.errors import BadUse, NotFound
from holdfast.evaluate.harness.choose import harness
from holdfast.evaluate.harness.inspect import Inspect
from holdfast.evaluate.harness.lm_eval.results import merge
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.suite import TaskEntry
from holdfast.testing import FakeClock

inspect_ai = Deferred("inspect_ai")

# Inspect's own: of tenacity, and of anyio's streams, which it leaves to the garbage collector.
pytestmark = [
    needs("inspect_ai", "inspect-ai is not installed (pip install 'holdfast[inspect]')"),
    pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning"),
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def client(model_folder):
    return ModelClient(model_folder)


@pytest.fixture(scope="module")
def tasks_file(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def judge():
    server = JudgeServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch, tmp_path):
    """Keep a task process's settings away from the next test."""
    import inspect_ai  # noqa: F401 - imported before the settings of one test are there
    from transformers.utils import chat_template_utils

    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("INSPECT_TRACE_FILE", str(tmp_path / "trace.log"))
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setattr(chat_template_utils, "datetime", chat_template_utils.datetime)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def stock(monkeypatch, model_folder, tmp_path):
    """Run a task by inspect's own Hugging Face provider, one sample a batch."""
    from inspect_ai.model import get_model
    from inspect_ai.model._providers import hf

    async def at_once(given):  # its thread would wait for two seconds for others
        item = hf._QueueItem(input=given, future=Future(), key=0)
        hf._generate_batch([item])
        return item.future.result()

    monkeypatch.setattr(hf, "batched_generate", at_once)
    model = get_model(
        "hf/tiny", model_path=str(model_folder), device="cpu", do_sample=False, memoize=False
    )

    def run(task: str, **options):
        [log] = inspect_ai.eval(
            task, model=model, display="none", log_dir=str(tmp_path / "stock"), **options
        )
        assert log.status == "success", log.error
        return log

    return run


def run(client, name: Path | str, folder: Path, **fields):
    entry = TaskEntry(name=str(name), harness="inspect", **fields)
    made = Inspect()
    made.prepare([entry])
    folder.mkdir(exist_ok=True)
    result = made.run(entry, client, folder)
    return result, folder / result.samples_file


def said(log) -> dict:
    """Return, by sample, its messages and its scores."""
    return {
        (sample.id, sample.epoch): (
            [(message.role, message.text) for message in sample.messages],
            {
                name: (str(score.value), score.answer, score.explanation)
                for name, score in sample.scores.items()
            },
        )
        for sample in log.samples
    }


def scores_of(log) -> list:
    return [
        (score.name, {n: str(m.value) for n, m in score.metrics.items()})
        for score in log.results.scores
    ]


@pytest.mark.parametrize(
    ("task", "options", "limit"),
    [
        ("sums", {}, None),
        ("sums", {"shots": True}, 2),
        ("colours", {}, 0.5),
        ("turns", {}, None),
        ("graded", {}, None),
    ],
)
def test_scores_and_transcripts_are_those_of_stock_inspect(
    client, tasks_file, stock, tmp_path, task, options, limit
):
    name = f"{tasks_file}@{task}"
    count = 3 if limit == 0.5 else limit
    wanted = stock(name, task_args=options, limit=count)
    result, log_file = run(client, name, tmp_path / "ours", options=options, limit=limit)
    log = inspect_ai.log.read_eval_log(str(log_file))
    assert said(log) == said(wanted)
    assert scores_of(log) == scores_of(wanted)
    [row] = result.results["results"].values()
    for score in wanted.results.scores:
        measured = row[f"accuracy,{score.name}"], row[f"accuracy_stderr,{score.name}"]
        assert str(measured) == str(
            (score.metrics["accuracy"].value, score.metrics["stderr"].value)
        )


def test_a_second_run_asks_the_same_to_the_bit_also_in_another_year(client, tasks_file, tmp_path):
    asked = []
    for attempt in range(2):
        client.asked = []
        made = Inspect(clock=FakeClock(1_700_000_000.0 + attempt * 365 * 86_400))
        entry = TaskEntry(name=f"{tasks_file}@sampled", harness="inspect")
        (tmp_path / "e").mkdir(exist_ok=True)
        result = made.run(entry, client, tmp_path / "e")
        asked.append(sorted((request.prompt, request.sampling.repeat) for request in client.asked))
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == 8, "two samples, two epochs, two turns: each is a draw of its own"
    [kept] = (tmp_path / "e" / "inspect").rglob("*.eval")
    assert str(kept) == str(tmp_path / "e" / result.samples_file), (
        "the log of the attempt before is still there"
    )


def test_greedy_epochs_are_one_question_and_all_samples_wait_at_a_time(
    model_folder, tasks_file, tmp_path
):
    client = ModelClient(model_folder)
    run(client, f"{tasks_file}@turns", tmp_path / "e")
    assert {request.sampling.repeat for request in client.asked} == {0}
    assert len(client.asked) == 12
    assert len({request.prompt for request in client.asked}) == 6
    assert client.most_open == 6


def test_what_the_suite_says_of_generation_reaches_the_request(client, tasks_file, tmp_path):
    client.asked = []
    options = {"generate": {"temperature": 0.5, "top_k": 7}, "epochs": 3}
    run(
        client,
        f"{tasks_file}@sums",
        tmp_path / "e",
        options=options,
        limit=1,
        system_instruction="red red",
    )
    assert {
        (r.sampling.temperature, r.sampling.top_k, r.sampling.max_new_tokens) for r in client.asked
    } == {(0.5, 7, 6)}
    assert sorted(request.sampling.repeat for request in client.asked) == [0, 1 << 20, 2 << 20]
    assert client.asked[0].sampling.until == ("RM", "Y\t", "gre")


def test_a_prompt_that_leaves_no_room_is_not_asked_and_one_that_leaves_little_asks_for_that(
    model_folder, tasks_file, tmp_path
):
    short = ModelClient(model_folder, max_length=1)
    _, log_file = run(short, f"{tasks_file}@sums", tmp_path / "a", limit=1)
    [sample] = inspect_ai.log.read_eval_log(str(log_file)).samples
    assert (sample.output.stop_reason, short.asked) == ("model_length", [])
    prompt_tokens = sample.output.usage.input_tokens
    tight = ModelClient(model_folder, max_length=prompt_tokens + 2)
    run(tight, f"{tasks_file}@sums", tmp_path / "b", limit=1)
    assert [request.sampling.max_new_tokens for request in tight.asked] == [2]


def test_an_engine_that_takes_text_gets_the_messages_and_the_answer_ends_before_a_stop(
    tasks_file, tmp_path
):
    client = TextClient()
    result, log_file = run(client, f"{tasks_file}@sums", tmp_path / "e", options={"shots": True})
    assert client.asked[0].kind == "chat"
    assert client.asked[0].text.startswith(
        '[{"role":"system","content":"what is the sum of one one ? two"},'
    )
    [first, *_] = inspect_ai.log.read_eval_log(str(log_file)).samples
    assert first.output.completion == "two red "
    assert result.results["results"]["sums"]["accuracy,includes"] == 1.0


def test_a_judge_grades_where_there_is_one(tasks_file, tmp_path, monkeypatch, judge):
    monkeypatch.setenv("OPENAI_BASE_URL", judge.url)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    client = TextClient()
    result, _ = run(client, f"{tasks_file}@graded", tmp_path / "e", options={"judge": "wise"})
    assert result.results["results"]["graded"]["accuracy,model_graded_qa"] == 1.0
    assert len(client.asked) == 2
    assert {asked["model"] for asked in judge.asked} == {"wise"}


def test_the_rows_stand_in_lm_evals_table(client, tasks_file, tmp_path):
    from lm_eval.utils import make_table

    result, _ = run(client, f"{tasks_file}@turns", tmp_path / "e")
    table = make_table(merge([result.results], model_name="m"))
    assert "|turns|" in table.replace(" ", "")
    assert "includes" in table
    assert result.results["n-samples"] == {"turns": {"original": 3, "effective": 3}}
    versioned, _ = run(client, f"{tasks_file}@sums", tmp_path / "e", limit=1)
    assert versioned.results["versions"] == {"sums": 3}
    assert versioned.results["n-samples"] == {"sums": {"original": 5, "effective": 1}}


def test_a_task_that_is_not_there_is_refused_with_the_nearest(tasks_file):
    made = harness("inspect", include_paths=[str(tasks_file.parent)])

    def prepare(name, **fields):
        made.prepare([TaskEntry(name=name, harness="inspect", **fields)])

    with pytest.raises(NotFound, match=r"no inspect task 'sum'. Did you mean 'sums'"):
        prepare("made.py@sum")
    with pytest.raises(NotFound, match=r"There is no file mode.py"):
        prepare("mode.py@sums")
    prepare("made.py@colours")
    with pytest.raises(
        NotFound, match=r"There is no inspect task 'colour'. Did you mean 'colours'"
    ):
        prepare("colour")
    with pytest.raises(
        BadUse, match=r"'made.py@sums' takes no argument 'shts'. Did you mean 'shots'"
    ):
        prepare("made.py@sums", options={"shts": True})
    with pytest.raises(BadUse, match="cannot be loaded: ValueError: no such dataset"):
        prepare("made.py@broken")
    with pytest.raises(BadUse, match="Leave num_fewshot out"):
        prepare("made.py@sums", num_fewshot=2)
    with pytest.raises(BadUse, match="epochs a number"):
        prepare("made.py@sums", options={"epochs": "many"})


def test_a_task_that_needs_a_container_is_refused(client, tasks_file, tmp_path):
    for task, kind in (("contained", "docker"), ("some_contained", "k8s")):
        with pytest.raises(BadUse, match=rf"{task}' needs a sandbox \({kind}\)"):
            Inspect().prepare([TaskEntry(name=f"{tasks_file}@{task}", harness="inspect")])


def test_what_fails_in_a_sample_fails_the_task_with_inspects_words(tasks_file, tmp_path):
    with pytest.raises(
        EvaluationError, match=r"sums' failed: .*The engine gave up on this request"
    ):
        run(FailingClient(), f"{tasks_file}@sums", tmp_path / "e")
    with pytest.raises(EvaluationError, match="gives the model tools"):
        run(TextClient(), f"{tasks_file}@with_bash", tmp_path / "f")


def test_finding_tasks_starts_no_thread_that_a_fork_would_lose(tasks_file):
    before = set(threading.enumerate())
    Inspect().prepare([TaskEntry(name=f"{tasks_file}@sums", harness="inspect")])
    assert set(threading.enumerate()) <= before
