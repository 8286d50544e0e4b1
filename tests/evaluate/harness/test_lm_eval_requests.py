"""Check the requests to engines: lm-eval's exact tokens, or text for engines that take text."""

import json

import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.harness.lm_eval.options import options_of
from holdfast.evaluate.types.harness import AnsweredSample, ModelFacts
from holdfast.evaluate.types.requests import Answer, Sampling, unpack_tokens
from holdfast.evaluate.types.suite import TaskEntry

pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's and its dependencies' own


def instance(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("task", 0, 1))


@pytest.fixture(scope="module")
def lm(world):
    from holdfast.evaluate.harness.lm_eval.model import EngineLM

    return EngineLM(world.facts, {}, 5)


def test_a_prompt_that_is_too_long_is_cut_from_the_left_and_its_continuation_never(lm):
    long = "the cat runs " * 60
    (request,) = lm.requests_of(instance("loglikelihood", long, " a green house"))
    prompt, continuation = unpack_tokens(request.prompt), unpack_tokens(request.continuation)
    assert len(prompt) + len(continuation) == lm.max_length + 1 == 65
    whole = lm.tokenizer.encode(long.rstrip() + "  a green house")
    assert [*prompt, *continuation] == whole[-65:]
    assert request.max_new_tokens() == 0


def test_a_text_longer_than_the_model_is_asked_window_by_window(lm):
    requests = lm.requests_of(instance("loglikelihood_rolling", "the cat runs " * 60))
    scored = [token for request in requests for token in unpack_tokens(request.continuation)]
    assert len(requests) > 2
    assert scored == lm.tokenizer.encode("the cat runs " * 60)
    answers = [Answer(logprob=-0.1 * number) for number in range(len(requests))]
    expected = sum(answer.logprob for answer in answers)
    assert lm.response(instance("loglikelihood_rolling", "unread"), answers) == expected


def test_a_generation_leaves_room_for_its_reply_and_names_its_end(lm):
    kwargs = {"until": ["\n"], "max_gen_toks": 10, "do_sample": False, "top_p": 0.9}
    (request,) = lm.requests_of(instance("generate_until", "the cat runs " * 60, kwargs))
    assert len(unpack_tokens(request.prompt)) == 64 - 10
    assert request.sampling == Sampling(max_new_tokens=10, until=("\n", "</s>"))
    assert kwargs["until"] == ["\n"]


def test_a_reply_is_decoded_and_cut_by_lm_evals_own_code(lm):
    tokens = lm.tokenizer.encode(" green house\n small tree")
    from holdfast.evaluate.types.requests import pack_tokens

    reply = Answer(tokens=pack_tokens([*tokens, lm.eot_token_id]))
    cut, whole = ({"until": until, "max_gen_toks": 9} for until in (["\n"], []))
    assert lm.response(instance("generate_until", "", cut), [reply]) == " green house"
    assert (
        lm.response(instance("generate_until", "", whole), [reply]) == " green house\n small tree"
    )


def test_what_lm_eval_says_of_sampling_arrives():
    from holdfast.evaluate.harness.lm_eval.model import sampling

    greedy = Sampling(max_new_tokens=4)
    assert sampling({}, 4, [], 9) == greedy
    assert sampling({"do_sample": False, "temperature": 0.0, "top_k": 5}, 4, [], 9) == greedy
    sampled = sampling(
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "num_beams": 2}, 4, [], 9
    )
    assert sampled == Sampling(
        max_new_tokens=4, temperature=0.7, top_p=0.9, seed=9, extra={"num_beams": 2}
    )
    explicit = sampling({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, 4, [], 9)
    assert explicit.extra == {"top_k": 0, "top_p": 1.0}
    with pytest.raises(BadUse, match="temperature above 0"):
        sampling({"do_sample": True}, 4, [], 9)
    with pytest.raises(BadUse, match="argument bad_words_ids is"):
        sampling({"bad_words_ids": [[1]]}, 4, [], 9)
    with pytest.raises(BadUse, match="-3 tokens are to be generated"):
        sampling({}, -3, [], 9)


class Server:
    """Act as an `EngineClient` of a server that takes text."""

    facts = ModelFacts(model=0, name="served", tokenizer="", max_length=0, takes_text=True)

    def __init__(self) -> None:
        self.requests: list = []

    def ask(self, samples):
        self.requests += [request for sample in samples for request in sample.requests]
        said = Answer(logprob=-2.0, text=" green\n house")
        return [
            AnsweredSample(sample=one.sample, answers=[said] * len(one.requests)) for one in samples
        ]


@pytest.fixture(scope="module")
def lm_eval_harness(world):
    from holdfast.evaluate.harness.lm_eval.harness import LmEval

    made = LmEval(include_paths=[str(world.tasks)])
    made.prepare([TaskEntry(name="t_choice")])
    return made


def test_an_engine_that_takes_text_is_given_text(world, lm_eval_harness, tmp_path):
    documents = [json.loads(line) for line in (world.tasks / "test.jsonl").open()]
    server = Server()
    lm_eval_harness.run(
        TaskEntry(name="t_choice", options={"bootstrap_iters": 0}), server, tmp_path
    )
    asked = [(request.text, request.continuation_text) for request in server.requests]
    assert asked == [(row["text"], " " + choice) for row in documents for choice in row["choices"]]

    server = Server()
    result = lm_eval_harness.run(
        TaskEntry(name="t_generate", options={"bootstrap_iters": 0}), server, tmp_path
    )
    assert [(request.kind, request.text) for request in server.requests] == [
        ("generate", row["text"]) for row in documents
    ]
    assert server.requests[0].sampling == Sampling(max_new_tokens=8, until=("\n", " cat"))
    (line, *_) = (tmp_path / result.samples_file).read_text().splitlines()
    assert json.loads(line)["filtered_resps"] == [" green"]


def test_a_chat_server_is_given_the_messages(world, lm_eval_harness, tmp_path):
    server = Server()
    entry = TaskEntry(
        name="t_generate",
        chat_template=True,
        system_instruction="Be brief.",
        options={"bootstrap_iters": 0},
    )
    lm_eval_harness.run(entry, server, tmp_path)
    assert {request.kind for request in server.requests} == {"chat"}
    messages = json.loads(server.requests[0].text)
    assert [message["role"] for message in messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (TaskEntry(name="t_rolling"), "needs tokens"),
        (
            TaskEntry(name="t_choice", chat_template=True),
            "log-probabilities, which a chat server does not return",
        ),
    ],
)
def test_what_text_cannot_answer_is_refused(entry, sentence, lm_eval_harness, tmp_path):
    with pytest.raises(BadUse, match=sentence):
        lm_eval_harness.run(entry, Server(), tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gen_kwarg": 1}, "'gen_kwarg'. Did you mean 'gen_kwargs'"),
        ({"bootstrap_iters": "many"}, "bootstrap_iters = 'many': it must be a whole number"),
        ({"random_seed": True}, "random_seed = True: it must be a whole number"),
        ({"model_args": {"dtype": "float16"}}, "the model argument 'dtype'"),
    ],
)
def test_an_option_that_lm_eval_does_not_have_is_refused(options, sentence):
    with pytest.raises(BadUse, match=sentence):
        options_of(TaskEntry(name="t", options=options))


@pytest.mark.parametrize(
    ("samples", "limit", "says"),
    [([0], 3.0, "Give one of them"), (["a"], None, "numbers"), ([-1], None, "numbers")],
)
def test_samples_are_numbers_and_stand_alone(samples, limit, says):
    with pytest.raises(BadUse, match=says):
        options_of(TaskEntry(name="t", limit=limit, options={"samples": samples}))


def test_data_that_is_not_here_is_said_in_a_sentence(world, tmp_path):
    from holdfast.evaluate.harness.lm_eval.harness import LmEval
    from holdfast.evaluate.types.errors import EvaluationError

    (tmp_path / "far.yaml").write_text(
        "task: far\ndataset_path: nobody/nothing-at-all\ntest_split: test\noutput_type: "
        "generate_until\n"
        'doc_to_text: "{{a}}"\ndoc_to_target: "{{a}}"\n'
    )
    made = LmEval(include_paths=[str(tmp_path)])
    made.prepare([TaskEntry(name="far")])
    with pytest.raises(
        EvaluationError, match="'far' needs data that is not on this machine, and HF_"
    ):
        made.run(TaskEntry(name="far"), Server(), tmp_path)
