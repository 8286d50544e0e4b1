"""Send signals to the processes of an evaluation, and record the finished requests each time."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from evaluation.fault_injected_evaluation import FaultInjectedEvaluation, Role, redone

PATIENCE_S = 120.0  # of the test, for a machine that is busy


class FaultInjector:
    """Inject faults into an evaluation's processes, and check that no finished work is repeated."""

    def __init__(self, evaluation: FaultInjectedEvaluation, seed: int) -> None:
        self.evaluation, self.chance = evaluation, random.Random(seed)
        self.killed_s: dict[int, float] = {}
        self.kept: list[tuple[float, set[str]]] = []

    def inject(self, *roles: Role, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the first process of one of the roles; return its pid."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            now_s, processes = time.monotonic(), self.evaluation.processes()
            engines, by_agent = processes["engine"], self.evaluation.engines_by_agent()
            living = [role for role in roles if processes[role]]
            role = self.chance.choice(living or roles)
            if pid := self.evaluation.strike(role, self.chance, number):
                break
            assert now_s < deadline_s, f"there is no {' or '.join(roles)}"
        self._remember(
            {"engine": [pid], "node": by_agent.get(pid, []), "command": engines}.get(role, []),
            now_s,
        )
        return pid

    def end(self, agent: int, kill: Callable[[], None]) -> None:
        """End a node by `kill`, with its agent, engines and memory."""
        engines, now_s = self.evaluation.engines_by_agent().get(agent, []), time.monotonic()
        kill()
        for session in Path(f"/dev/shm/holdfast-{os.getuid()}").glob(f"{agent}-*"):
            shutil.rmtree(session)
        self._remember(engines, now_s)

    def _remember(self, dead: Iterable[int], now_s: float) -> None:
        self.killed_s |= {engine: now_s for engine in dead if engine not in self.killed_s}
        self.kept.append((time.monotonic(), self.evaluation.committed()))

    def check(self, requests: int) -> None:
        """Check that all requests were answered, none again after a fault, and nothing is left."""
        evaluation = self.evaluation
        record = evaluation.record()
        assert redone(record, self.killed_s, self.kept) == []
        assert len({line.key for line in record if line.what == "finished"}) == requests
        assert evaluation.leftovers() == []
        assert evaluation.shared_memory() == []
