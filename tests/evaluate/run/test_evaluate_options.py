import json
import re
from pathlib import Path

import msgspec
import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.run.options import EvaluateOptions, JudgeLimits, options_of
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.suite import Suite, TaskEntry

JUDGE = {"url": "http://judge/v1"}
SUITE = Suite(
    name="s",
    entries=(
        TaskEntry(name="a", limit=5.0, chat_template=True),
        TaskEntry(name="b", num_fewshot=3),
    ),
    include_paths=("/one",),
)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, "nodes is 0. Give a number of at least 1."),
        ({"on": "kubernetes"}, "on is 'kubernetes'. Allowed: local, slurm, ray."),
        ({"engine": EngineSpec(mode="fast")}, "engine.mode is 'fast'. Allowed: exact, free."),
        (
            {"engine": EngineSpec(kind="tgi")},
            "engine.kind is 'tgi'. Allowed: hf, vllm, openai, simulated, or module:Class",
        ),
        (
            {"engine": EngineSpec(kind="openai")},
            "engine.url is ''. Give the server's address with its version",
        ),
        (
            {"engine": EngineSpec(url="http://x/v1")},
            "hf has no server. Leave --url out, or --engine openai.",
        ),
        (
            {"engine": EngineSpec(kind="vllm", options={"patience": 9})},
            "The engine vllm has no option 'patience'. Did you mean 'patience_s'? It has api_key_env",
        ),
        (
            {"engine": EngineSpec(kind="openai", url="http://x/v1", options={"max_num_seqs": 64})},
            "The engine openai has no option 'max_num_seqs'. It has api_key_env, patience_s, timeout_s, tokenizer.",
        ),
        (
            {"engine": EngineSpec(options={"eager": True})},
            "The engine hf has no option 'eager'. The engine has no options: leave it",
        ),
        (
            {"engine": EngineSpec(kind="openai", url="http://x/v1", options={"timeout_s": "10m"})},
            "The engine's option timeout_s is '10m'. Give a number of seconds above 0.",
        ),
        (
            {"engine": EngineSpec(kind="vllm", options={"start_limit_s": True})},
            "The engine's option start_limit_s is True. Give a number of seconds above 0.",
        ),
        (
            {"engine": EngineSpec(tensor_parallel=0)},
            "engine.tensor_parallel is 0. Give a number of at least 1.",
        ),
        (
            {"sbatch_options": ("--partition=p",)},
            "sbatch_options are given, but on is 'local'. Give --on slurm",
        ),
        ({"name_map": Path("m")}, "name_map is given without hf_config. Give --hf-config DIR"),
        ({"limit": 0.0}, "limit is 0. Give a number above 0."),
        ({"limit": 2.5}, "limit is 2.5. Give whole samples, or a share below 1."),
        ({"limit": float("nan")}, "limit is nan."),
        ({"num_fewshot": -1}, "num_fewshot is -1."),
        ({"max_read_mib_s": -1.0}, "max_read_mib_s is -1."),
        ({"linger_s": float("inf")}, "linger_s is inf."),
        ({"silent_s": 0.0}, "silent_s is 0. Give a number above 0."),
        ({"evaluation_id": "../x"}, "'../x' is not an evaluation's id"),
    ],
)
def test_what_is_not_allowed_is_said_before_any_work(given, message):
    with pytest.raises(BadUse, match=re.escape(message)):
        EvaluateOptions(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "judge:80"}, "judge.url is 'judge:80'. Give the server's address"),
        ({"concurrency": 0}, "judge.concurrency is 0. Give a number of at least 1."),
        ({"requests_per_minute": 0.0}, "judge.requests_per_minute is 0. Give a number above 0."),
        ({"input_price": -1.0}, "judge.input_price is -1."),
        ({"cost_limit": 5.0}, "judge.cost_limit is 5, but its tokens have no price."),
    ],
)
def test_a_judge_without_sense_is_refused(given, message):
    with pytest.raises(BadUse, match=re.escape(message)):
        JudgeLimits(**{**JUDGE, **given})


def test_the_defaults_and_an_engine_of_ones_own_are_allowed():
    assert EvaluateOptions().engine == EngineSpec()
    mine = EngineSpec(kind="mine.engine:Mine", options={"of_its_own": "x"})
    assert EvaluateOptions(engine=mine, nodes=4, limit=0.5).nodes == 4


def test_engines_have_the_options_that_they_read():
    told = {"api_key_env": "KEY", "patience_s": 9, "timeout_s": 0.5}
    server = {**told, "tokenizer": "/t"}
    own = {**told, "arguments": "--swap-space 4", "command": "vllm", "start_limit_s": 60}
    assert (
        EvaluateOptions(
            engine=EngineSpec(kind="openai", url="http://x/v1", options=server)
        ).engine.options
        == server
    )
    assert EvaluateOptions(engine=EngineSpec(kind="vllm", options=own)).engine.options == own


def test_flags_override_the_suite_and_silence_does_not():
    unsafe = msgspec.structs.replace(SUITE, confirm_unsafe_code=True)
    assert [EvaluateOptions().applied_to(suite) for suite in (SUITE, unsafe)] == [SUITE, unsafe]
    changed = EvaluateOptions(
        limit=0.1, chat_template=False, include_paths=("/one", "/two"), confirm_unsafe_code=True
    ).applied_to(SUITE)
    assert [entry.limit for entry in changed.entries] == [0.1, 0.1]
    assert [entry.num_fewshot for entry in changed.entries] == [None, 3]
    assert [entry.chat_template for entry in changed.entries] == [False, False]
    assert (changed.include_paths, changed.confirm_unsafe_code) == (("/one", "/two"), True)


def test_options_come_back_from_their_json():
    options = EvaluateOptions(
        home=Path("/home"),
        engine=EngineSpec(kind="vllm", options={"start_limit_s": 64}),
        judge=JudgeLimits(**JUDGE, tokens_per_minute=10.0),
        hf_config=Path("/c"),
        include_paths=("/t",),
    )
    assert options_of(json.loads(json.dumps(options.to_json()))) == options
    with pytest.raises(msgspec.ValidationError, match="nodes is 0"):
        options_of({"nodes": 0})
