"""Test the contract with `vllm serve`, against a stand-in in a process of its own."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.choose import make_engine
from holdfast.evaluate.types.engine import EngineSpec, SwapRefused
from holdfast.evaluate.types.requests import Request, Sampling, pack_tokens

STAND_IN = Path(__file__).with_name("openai_stand_in.py")


@pytest.fixture
def folders(tmp_path):
    made = {}
    for name in ("one", "two", "other"):
        made[name] = tmp_path / name
        made[name].mkdir()
        (made[name] / "model.safetensors").write_bytes(name.encode())
        config = {"vocab_size": 500, "hidden_size": 8 if name == "other" else 4}
        (made[name] / "config.json").write_text(json.dumps(config))
    return made


@pytest.fixture
def vllm():
    made = []

    def make(**options):
        spec = EngineSpec(
            kind="vllm", options={"command": f"{sys.executable} {STAND_IN}"} | options, max_batch=8
        )
        made.append(make_engine(spec))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def score(engine):
    request = Request(
        kind="loglikelihood", prompt=pack_tokens([1, 2]), continuation=pack_tokens([3, 4])
    )
    engine.submit([(0, request)])
    found = []
    while not found:
        found = engine.step()
    return found[0].answer.logprob


def test_it_starts_answers_swaps_and_ends_with_its_processes(vllm, folders):
    engine = vllm()
    engine.load(folders["one"])
    assert engine.max_length() == 64
    assert "0.0.stand-in" in engine.numerics()
    first, canary = score(engine), engine.canary()
    assert len(canary) == 8
    engine.swap(folders["two"])
    fresh = vllm()
    fresh.load(folders["two"])
    assert engine.canary() == fresh.canary() != canary
    assert score(engine) == score(fresh) != first
    engine.swap(folders["one"])
    assert engine.canary() == canary
    generate = Request(
        kind="generate", prompt=pack_tokens([1]), sampling=Sampling(max_new_tokens=9)
    )
    engine.submit([(3, generate)])
    found = []
    while not found:
        found = engine.step()
    assert found[0].answer.tokens
    processes = psutil.Process(engine._server.pid).children(recursive=True)
    home = engine._home
    assert processes
    engine.close()
    assert not [
        one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    ]
    assert not home.exists()


def test_another_model_or_a_failing_reload_is_refused(vllm, folders):
    engine = vllm()
    engine.load(folders["one"])
    canary = engine.canary()
    with pytest.raises(SwapRefused, match=r"config\.json"):
        engine.swap(folders["other"])
    assert engine.canary() == canary
    engine = vllm(arguments="--no-reload")
    engine.load(folders["one"])
    with pytest.raises(SwapRefused, match="404"):
        engine.swap(folders["two"])


def test_a_server_that_does_not_start_is_said_with_what_it_printed(vllm, folders):
    with pytest.raises(BadUse, match=r"ended with 3[\s\S]*architecture is not supported"):
        vllm(arguments="--fail").load(folders["one"])
    with pytest.raises(BadUse, match="no program 'no-such-vllm'"):
        vllm(command="no-such-vllm").load(folders["one"])


def test_exact_mode_asks_vllm_for_batch_invariance(vllm, folders, monkeypatch):
    told = {}

    def start(command, log, *, environment):
        told.update(environment)
        raise InterruptedError

    monkeypatch.setattr("holdfast.evaluate.engines.vllm.start_on_leash", start)
    with pytest.raises(InterruptedError):
        vllm().load(folders["one"])
    assert told["VLLM_BATCH_INVARIANT"] == "1"
    assert told["VLLM_SERVER_DEV_MODE"] == "1"
