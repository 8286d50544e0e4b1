"""Kill each part of a real evaluation once: stock lm-eval's scores, and nothing done twice."""

import json
import os
import signal
import time
from dataclasses import dataclass

import pytest
from end_to_end_world import REQUESTS, World, check_equal, wait_until
from fault_injector import PATIENCE_S, FaultInjector
from gated_engine import Gate

from evaluation.fault_injected_evaluation import FaultInjectedEvaluation
from holdfast.core.processes import process_state

SILENT_S = 5


@dataclass(kw_only=True)
class FaultInjectedSuite(FaultInjectedEvaluation):
    """Run the whole suite on two reference engines behind a gate in `folder`."""

    world: World

    def start(self):
        what = [
            "--suite",
            self.world.suite(),
            "--model",
            self.world.model(),
            "--id",
            self.paths.evaluation_id,
        ]
        how = [
            "--threads",
            1,
            "--engines-per-node",
            2,
            "--silent-s",
            SILENT_S,
            *Gate(self.folder).flags,
        ]
        return self._command(["run", *map(str, what + how)])


@pytest.mark.slow  # real engines, real harness
def test_every_kind_of_process_is_killed_in_one_run(e2e, stock, tmp_path):
    home, gate = tmp_path / "home", Gate(tmp_path)
    evaluation = FaultInjectedSuite(
        folder=tmp_path, home=home, world=e2e, tasks=(), environment=e2e.environment(home)
    )
    injector = FaultInjector(evaluation, seed=6)

    def wait_until_finished(count):
        gate.let(count)
        assert evaluation.wait_until_finished(count, PATIENCE_S), evaluation.output()

    gate.let(0)
    command = evaluation.start()
    try:
        for count, role in ((10, "coordinator"), (20, "engine"), (30, "host"), (40, "client")):
            wait_until_finished(count)
            zygotes = evaluation.processes()["zygote"]
            injector.inject(role)
            if role == "host":  # its children end with it
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
        gate.open()
        assert command.wait(PATIENCE_S) == 0, evaluation.output()
        check_equal(json.loads(evaluation.paths.results.read_bytes()), stock)
        injector.check(REQUESTS)
    finally:
        evaluation.end()
