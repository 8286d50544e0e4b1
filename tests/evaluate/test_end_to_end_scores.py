"""Compare `holdfast eval` with stock lm-eval on all kinds of tasks: the same bits in every mode."""

import json
import os
import signal

import pytest
from end_to_end_world import (
    REQUESTS,
    TIMEOUT_S,
    answers,
    check_close,
    check_equal,
    check_nothing_was_redone,
    end,
    wait_until,
)
from gated_engine import Gate, finished_keys

from holdfast.profile import Recording

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]  # real engines, real harness


def results_of(home):
    return json.loads((home / "evaluations" / "one" / "results.json").read_text())


def _cells(row):
    return [cell.strip() for cell in row.split("|")]


def test_engines_on_two_nodes_are_stopped_in_the_middle_and_one_goes_on(e2e, stock, tmp_path):
    home, gate = tmp_path / "home", Gate(tmp_path)
    gate.let(0)
    process = e2e.start(
        "run", "--suite", e2e.suite(confirmed=False), "--confirm-unsafe-code", "--model", e2e.model(), "--threads", 1,
        "--nodes", 2, "--id", "one", "-o", tmp_path / "out", *gate.flags,
        home=home,
    )  # fmt: skip
    folder = home / "evaluations" / "one"
    try:
        wait_until(lambda: len(gate.asked()) == 2, process)
        gate.let(40)
        wait_until(lambda: answers(folder) >= 40, process)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        end(process)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    assert "holdfast eval resume one" in err
    [listed] = json.loads(e2e.look("ls", "--json", home=home))["evaluations"]
    assert listed["state"] == "stopped"
    assert len(finished_keys(gate.record)) < REQUESTS

    gate.open()
    out, err = e2e.run("resume", "one", "--nodes", 1, home=home)
    check_equal(results_of(home), stock)
    check_nothing_was_redone(folder)
    assert results_of(home)["results"]["results"]["t_code"]["pass@1,code"] == 0.5, (
        "it ran, in the sandbox"
    )
    assert "took" in out
    assert "lower bound" in out
    assert "1 of 1 engine ready" in err

    profiled = Recording.read(folder / "profile")
    assert {"load", "preprocess", "prefill", "decode", "metric"} == {
        span.phase for span in profiled.spans
    }
    assert profiled.ranks == [0, 1], "the two nodes"
    assert profiled.of("host_memory_used")

    # lm-eval's own table function reads the written files.
    from lm_eval.utils import make_table

    [written] = (tmp_path / "out").rglob("results_*.json")
    read = json.loads(written.read_text())
    table = [_cells(line) for line in make_table(read).splitlines()]
    for row in make_table(stock[0]).splitlines()[2:]:
        assert _cells(row) in table
    assert {task for results in stock for task in results["results"]} == set(read["results"])
    make_table(read, "groups")
    assert list((tmp_path / "out").rglob("samples_t_shots_*.jsonl"))

    # Scored again, from the answers alone: the same, and no engine was there.
    before = results_of(home)
    again = e2e.json("rescore", "one", home=home)
    check_equal(again, stock)
    assert again["makespan_s"] == before["makespan_s"]
    # A second evaluation of the same weights sends no request to an engine.
    reused = e2e.json(
        "run", "--suite", e2e.suite(), "--model", e2e.model(), "--threads", 1, home=home
    )
    check_equal(reused, stock)
    assert reused["requests"] == 0
    assert reused["reused"] >= before["requests"]
    assert "engine-seconds" in e2e.look("why", "one", home=home)
    assert "t_choice" in e2e.look("compare", "one", reused["id"], home=home)
    assert json.loads(e2e.look("ls", "--json", home=home))["evaluations"][0]["state"] == "done"


def test_in_free_mode_what_counts_is_equal_and_what_measures_nearly(e2e, stock, tmp_path):
    evaluation = e2e.json(
        "run",
        "--suite",
        e2e.suite(),
        "--model",
        e2e.model(),
        "--threads",
        1,
        "--mode",
        "free",
        home=tmp_path / "home",
    )
    check_close(evaluation, stock)
    assert evaluation["mode"] == "free"
    assert evaluation["numerics"].startswith("hf free ")
