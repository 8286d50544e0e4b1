"""Test `holdfast eval` without a model: stops, kills, resumes and wrong use."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from end_to_end_world import TIMEOUT_S, answers, end, entry, leftovers, task_entry, wait_until
from gated_engine import Gate, finished_keys

from evaluation.fault_injected_evaluation import expected_results, write_model
from holdfast.cli.main import cli
from holdfast.core.errors import BadUse, HoldfastError, NotFound

pytestmark = pytest.mark.usefixtures("nothing_is_left")
SIMULATED = ("--model", "none", "--engine", "simulated")
SLOW = ("--engine-option", "step_base_s=0.05")


@pytest.fixture
def suite(tmp_path):
    def make(*entries: str) -> str:
        path = tmp_path / "life.toml"
        path.write_text("\n".join(['name = "life"', *entries]))
        return str(path)

    return make


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def states(world, home) -> dict[str, str]:
    """Return the states by evaluation, as `holdfast eval ls` shows them."""
    listed = json.loads(world.look("ls", "--json", home=home))["evaluations"]
    return {one["id"]: one["state"] for one in listed}


def test_what_the_commands_say_of_an_evaluation_from_its_start_to_its_end(light, suite, home):
    out, err = light.run(
        "run",
        "--suite",
        suite(entry("a", missing=True)),
        *SIMULATED,
        "--id",
        "x",
        code=2,
        home=home,
    )
    assert out == ""
    assert err.splitlines()[-1] == "holdfast: There is no task 'a'. Near it: synthetic."
    assert states(light, home) == {}
    assert list((home / "evaluations").iterdir()) == []
    # The id is free again.
    out, err = light.run(
        "run", "--suite", suite(entry("a"), entry("b")), *SIMULATED, *SLOW, "--id", "x", home=home
    )
    assert "|a    |" in out
    assert "lower bound" in out
    assert "Page: " in out
    assert "1 of 1 engine ready" in err
    assert states(light, home) == {"x": "done"}
    said = light.look("why", "x", home=home)
    assert "Lower bounds of every schedule" in said
    # An id is one evaluation's; what ended is not run again.
    _, err = light.run(
        "run", "--suite", suite(entry("a"), entry("b")), *SIMULATED, "--id", "x", code=2, home=home
    )
    assert err.strip().endswith("Go on with it: holdfast eval resume x, or choose another --id.")
    again, _ = light.run("resume", "x", home=home)
    assert "took" in again
    # A command may die when all tasks have ended.
    root = home / "evaluations" / "x"
    before = json.loads((root / "results.json").read_text())
    (root / "results.json").unlink()
    for path in (root / "state" / "models").glob("*.ended"):
        path.unlink()
    after = light.json("resume", "x", home=home)
    assert (after["state"], after["results"]["results"]) == ("done", before["results"]["results"])


def test_a_copy_of_a_model_is_read_again_and_its_answers_are_known(light, suite, tmp_path, home):
    gate, path = Gate(tmp_path, kind="simulated"), suite(entry("a"))
    gate.open()
    model = write_model(tmp_path / "model")
    first = light.json("run", "--suite", path, "--model", model, *gate.flags, home=home)
    model = shutil.copytree(model, tmp_path / "copy")
    again = light.json("run", "--suite", path, "--model", model, *gate.flags, home=home)
    assert first["requests"] == again["reused"] == 10
    assert (again["requests"], again["digest"]) == (0, first["digest"])
    assert again["remote_bytes"] == first["remote_bytes"] > 0
    assert again["results"]["results"] == first["results"]["results"]
    assert "digest" in light.look("compare", first["id"], again["id"], home=home)


@pytest.mark.slow
def test_ctrl_c_then_resume_and_a_command_that_is_killed(light, suite, home):
    folder = home / "evaluations" / "x"
    process = light.start(
        "run",
        "--suite",
        suite(entry("a", samples=320, tokens=60)),
        *SIMULATED,
        *SLOW,
        "--id",
        "x",
        "--linger-s",
        5,
        home=home,
    )
    try:
        wait_until(lambda: answers(folder) > 0, process)
        _, err = light.run("resume", "x", code=2, home=home)
        assert "x is running. Wait for it, or stop the command that runs it." in err
        assert states(light, home) == {"x": "running"}
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        end(process)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "It was stopped. Go on with: holdfast eval resume x" in err
    assert states(light, home) == {"x": "stopped"}

    before = answers(folder)
    process = light.start("resume", "x", home=home)
    try:
        wait_until(lambda: answers(folder) > before, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
    finally:
        end(process)
    assert states(light, home) == {"x": "stopped"}
    said = light.look("show", "x", home=home)
    assert "x: stopped" in said
    assert "holdfast eval resume x" in said
    evaluation = light.json("resume", "x", home=home)
    assert evaluation["state"] == "done"
    assert evaluation["reused"] > 0


def commit(folder: Path, step: int) -> Path:
    """Commit a checkpoint as transformers' Trainer does, with the training state last."""
    path = write_model(folder / f"checkpoint-{step}", size_bytes=4096 * step)
    (path / "trainer_state.json").touch()
    return path


@pytest.mark.slow
def test_a_stream_evaluates_what_comes_and_passes_over_what_is_stale(light, suite, tmp_path, home):
    gate, folder = Gate(tmp_path, kind="simulated"), tmp_path / "checkpoints"
    commit(folder, 1)
    gate.let(3)
    words = [
        "watch",
        folder,
        "--once",
        "--drop-stale",
        "--suite",
        suite(entry("a"), entry("b")),
        "--json",
        *gate.flags,
    ]
    process = light.start(*words, home=home)
    try:
        wait_until(lambda: len(finished_keys(gate.record)) >= 3, process)
        commit(folder, 2)
        wait_until(lambda: [*home.glob("evaluations/*-step-2")], process)
        commit(folder, 3)
        wait_until(
            lambda: not [*home.glob("evaluations/*-step-2")], process
        )  # while the first is still under way
        gate.open()
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        end(process)
    assert process.returncode == 0, err
    said = [json.loads(line) for line in out.splitlines()]
    assert [one["step"] for one in said] == [1, 3]
    for one in said:
        assert one["results"]["results"] == expected_results([task_entry("a"), task_entry("b")])
    assert states(light, home) == {one["id"]: "done" for one in said}


def test_a_task_that_raises_leaves_the_others_their_scores(light, suite, home):
    path = suite(entry("a"), entry("b"), entry("c", raises=True))
    out, _ = light.run("run", "--suite", path, *SIMULATED, "--id", "x", code=4, home=home)
    assert "c: no scores: ValueError: this task's metric raises" in out
    assert "Try the failed tasks again: holdfast eval resume x" in out
    assert "|a    |" in out


def invoked(home, *words) -> HoldfastError | str:
    """Run a command in this process; return its error, or click's own sentence."""
    result = CliRunner(env={"HOLDFAST_HOME": str(home)}).invoke(
        cli, ["eval", *map(str, words)], standalone_mode=False
    )
    error = result.exception
    assert error is not None, result.output
    assert isinstance(error, HoldfastError) or hasattr(error, "format_message"), repr(error)
    return error if isinstance(error, HoldfastError) else error.format_message()


@pytest.mark.slow
def test_wrong_words_are_refused_before_anything_is_there(light, tmp_path, home):
    model, tasks = light.folder / "llama", ["--suite", "gsm8k"]
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    nothing, pickled = tmp_path / "nothing", tmp_path / "pickled"
    nothing.mkdir()
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    wrong_key, wrong_path = tmp_path / "key.toml", tmp_path / "path.toml"
    wrong_key.write_text('fewshots = 3\ntasks = ["a"]\n')
    wrong_path.write_text('include_paths = ["nowhere"]\ntasks = ["a"]\n')
    simulated = [*tasks, *SIMULATED]
    cases = [
        (
            ["run", *tasks, "--model", "/nowhere"],
            "There is no model /nowhere. Give its folder or URL, or fetch it",
        ),
        (["run", *tasks, "--model", nothing], "neither config.json"),
        (["run", *tasks, "--model", pickled], "holds its weights pickled (pytorch_model.bin)"),
        (
            ["run", "--suite", wrong_key, *SIMULATED],
            "there is no key 'fewshots'. Did you mean 'num_fewshot'?",
        ),
        (["run", "--suite", wrong_path, *SIMULATED], "it must be a list of folders that exist"),
        (["run", "--suite", tmp_path / "none.toml", *SIMULATED], "There is no suite"),
        (
            ["run", "--suite", "a", "--include-path", "/nowhere", *SIMULATED],
            "'/nowhere' does not exist",
        ),
        (["run", *simulated, "--nodes", 0], "nodes is 0. Give a number of at least 1."),
        (["run", *simulated, "--id", "../x"], "is not an evaluation's id"),
        (
            ["run", *tasks, "--model", "m", "--engine", "foo"],
            "engine.kind is 'foo'. Allowed: hf, vllm",
        ),
        (
            ["run", *tasks, "--model", "m", "--engine", "openai"],
            "engine.url is ''. Give the server's address",
        ),
        (["run", *simulated, "--judge-concurrency", 3], "Give --judge-url URL too."),
        (
            ["run", *simulated, "--on", "ray", "--nodes", 2],
            "Set RAY_ADDRESS to a cluster, or request one node.",
        ),
        (["resume", "nope"], "There is no evaluation 'nope'"),
        (["rescore", "nope"], "There is no evaluation 'nope'"),
        (["why", "nope"], "There is no evaluation 'nope'"),
        (["show", "nope"], "There is no evaluation 'nope'"),
        (["watch", tmp_path / "no", *tasks], "There is no folder"),
        (
            ["watch", tmp_path, *tasks, "--engine", "simulated"],
            "takes no weights, so it cannot follow",
        ),
        (["compare"], "Give ids, or --suite or --run."),
    ]
    for words, said in cases:
        error = invoked(home, *words)
        assert said in str(error), words
        if isinstance(error, HoldfastError):
            assert error.exit_code == 2, words
            assert isinstance(error, BadUse | NotFound)
    evaluations = home / "evaluations"
    assert not evaluations.exists() or list(evaluations.iterdir()) == []
    assert leftovers(tmp_path) == []


def test_a_home_that_cannot_be_written_is_refused(light, tmp_path):
    (tmp_path / "file").write_text("")
    error = invoked(tmp_path / "file", "run", "--suite", "a", *SIMULATED)
    assert "is a file; give a folder." in str(error)
