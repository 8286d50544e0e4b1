"""Compare `holdfast eval` with stock lm-eval on all kinds of tasks: the same bits, with any kills."""

import json
import os
import signal
import time
from dataclasses import dataclass

import psutil
import pytest
from end_to_end_world import (
    REQUESTS,
    World,
    check_close,
    check_equal,
    wait_until,
)
from fault_injector import PATIENCE_S, FaultInjector
from gated_engine import Gate, finished_keys

from evaluation.fault_injected_evaluation import FaultInjectedEvaluation
from holdfast.core.processes import process_state
from holdfast.profile import Recording
from holdfast.testing.slurm import PrivateSlurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
    pytest.mark.timeout(1200),  # a test does much, on a machine that runs other tests
]  # real engines, real harness
SILENT_S = 5

INSPECT = """\
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def words():
    samples = [Sample(input=f"the {animal} runs", target="the") for animal in ("cat", "dog", "tree")]
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=includes(), version=1)
"""


@dataclass(kw_only=True)
class FaultInjectedSuite(FaultInjectedEvaluation):
    """Run the whole suite on two nodes, with reference engines behind a gate in `folder`."""

    world: World

    def start(self):
        what = ["--suite", self.world.suite(confirmed=False), "--confirm-unsafe-code"]
        what += ["--model", self.world.model(), "--id", self.paths.evaluation_id]
        how = ["--threads", 1, "--nodes", 2, "--silent-s", SILENT_S, "-o", self.folder / "out"]
        return self._command(["run", *map(str, what + how), *Gate(self.folder).flags])


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def _cells(row):
    return [cell.strip() for cell in row.split("|")]


def kill_the_parts(evaluation, injector, gate):
    """Kill each kind of process but the command once, and let an engine hang."""

    def wait_until_finished(count):
        gate.let(count)
        assert evaluation.wait_until_finished(count, PATIENCE_S), evaluation.output()

    for count, role in ((10, "coordinator"), (20, "engine"), (30, "host"), (40, "client")):
        wait_until_finished(count)
        parents = {pid: psutil.Process(pid).ppid() for pid in evaluation.processes()["zygote"]}
        killed = injector.inject(role)
        if role == "host":  # its children end with it
            zygotes = [pid for pid, parent in parents.items() if parent == killed]
            assert zygotes
            wait_until(
                lambda pids=zygotes: all(process_state(pid) in (None, "zombie") for pid in pids)
            )
    wait_until_finished(50)
    stopped = evaluation.record()[-1].pid  # recently at work, now silent with its requests
    os.kill(stopped, signal.SIGSTOP)
    injector.killed_s[stopped] = time.monotonic()
    wait_until_finished(60)
    wait_until(lambda: process_state(stopped) is None)  # while there is work that waits for it


def test_the_parts_of_two_nodes_are_killed_then_the_command_is_stopped_and_one_node_goes_on(
    e2e, stock, tmp_path
):
    home, gate = tmp_path / "home", Gate(tmp_path)
    evaluation = FaultInjectedSuite(
        folder=tmp_path, home=home, world=e2e, tasks=(), environment=e2e.environment(home)
    )
    injector = FaultInjector(evaluation, seed=6)
    name, folder = evaluation.paths.evaluation_id, evaluation.paths.root
    gate.let(0)
    process = evaluation.start()
    try:
        wait_until(lambda: len(gate.asked()) == 2, process)
        kill_the_parts(evaluation, injector, gate)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130, evaluation.output()
        assert "Traceback" not in evaluation.output()
        assert f"holdfast eval resume {name}" in evaluation.output()
        [listed] = json.loads(e2e.look("ls", "--json", home=home))["evaluations"]
        assert listed["state"] == "stopped"
        assert len(finished_keys(gate.record)) < REQUESTS

        gate.open()
        out, err = e2e.run("resume", name, "--nodes", 1, home=home)
        check_equal(results_of(folder), stock)
        injector.check(REQUESTS)
    finally:
        evaluation.end()
    assert results_of(folder)["results"]["results"]["t_code"]["pass@1,code"] == 0.5, (
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
    before = results_of(folder)
    again = e2e.json("rescore", name, home=home)
    check_equal(again, stock)
    assert again["makespan_s"] == before["makespan_s"]
    assert "engine-seconds" in e2e.look("why", name, home=home)
    assert json.loads(e2e.look("ls", "--json", home=home))["evaluations"][0]["state"] == "done"


def stock_part(stock, *tasks):
    """Return stock lm-eval's results of some tasks of the suite."""
    return [
        {
            part: {task: found[task] for task in tasks if task in found}
            for part, found in stock[0].items()
            if isinstance(found, dict)
        }
    ]


def test_inspect_beside_lm_eval_in_free_mode(e2e, stock, tmp_path):
    pytest.importorskip("inspect_ai")
    (tmp_path / "inspected.py").write_text(INSPECT)
    path = tmp_path / "both.toml"
    tasks = ["t_score", "t_votes", f"inspect:{tmp_path}/inspected.py@words"]
    path.write_text(f'include_paths = ["{e2e.tasks}"]\ntasks = {json.dumps(tasks)}\n')
    how = ["--threads", 1, "--mode", "free", "--id", "x"]
    home = tmp_path / "home"
    out, _ = e2e.run("run", "--suite", path, "--model", e2e.model(), *how, home=home)
    assert "|t_score" in out
    assert "|words" in out
    said = results_of(home / "evaluations" / "x")
    assert said["mode"] == "free"
    assert said["numerics"].startswith("hf free ")
    assert "accuracy,includes" in said["results"]["results"].pop("words")
    check_close(said, stock_part(stock, "t_score", "t_votes"))


def test_a_node_of_slurm(e2e, stock, tmp_path, tmp_path_factory):
    if reason := PrivateSlurm.missing():
        pytest.skip(reason)
    suite = e2e.suite(("t_score",), (), name="one")
    with PrivateSlurm(tmp_path_factory.mktemp("s"), nodes=1, cpus=2) as slurm:
        evaluation = e2e.json(
            "run", "--suite", suite, "--model", e2e.model(), "--threads", 1, "--on", "slurm",
            home=tmp_path / "home", **{name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")},
        )  # fmt: skip
        wait_until(lambda: slurm.run(["squeue", "--noheader"]) == "")  # it is cancelled
    check_equal(evaluation, stock_part(stock, "t_score"))
    assert evaluation["nodes"] == 1
