"""Contain hostile programs, checked from outside, with the right verdicts."""

import socket
import tempfile
import threading
from pathlib import Path

import pytest

from evaluation.hostile_programs import HOSTILE, Hostile
from evaluation.hostile_trials import Outside, processes_of
from holdfast.evaluate.metrics.sandbox.sandbox import Sandbox, Verdict


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda each: each.name.replace(" ", "-"))
def test_is_contained(sandbox: Sandbox, outside: Outside, hostile: Hostile) -> None:
    if hostile.needs_namespaces and not sandbox.protection.namespaces:
        pytest.skip("bounded for each file alone")
    trial = outside.try_out(sandbox, hostile)
    assert not trial.faults, trial.verdict


def test_what_is_not_contained_is_seen(
    sandbox: Sandbox, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace the sandbox by a function that breaks out: every fault is reported."""
    secret = (outside.canary / "secret").read_text()

    def let_loose(program: str, tests: str, *, wall_s: float | None) -> Verdict:
        (outside.canary / "mark").touch()
        with (
            socket.create_connection(outside.tcp.getsockname()),
            socket.socket(socket.AF_UNIX) as local,
        ):
            local.connect(outside.abstract.getsockname())
        return Verdict(passed=True, reason="passed", seconds=0.0, output_tail=secret * 1000)

    monkeypatch.setattr(sandbox, "run", let_loose)
    hostile = Hostile("loose", "everything", "", "", False)
    try:
        faults = outside.try_out(sandbox, hostile).faults
    finally:
        (outside.canary / "mark").unlink()
    said = " ".join(faults)
    assert "judged 'passed'" in said
    assert "changed files: ['mark', 'secret']" in said
    assert "connected to ('127.0.0.1'" in said
    assert "connected to b'" in said
    assert "printed the secret" in said
    assert "had 24000 characters" in said
    assert len(faults) == 6


def test_bounds_processes_seen_from_outside(sandbox: Sandbox) -> None:
    forks = "    for _ in range(6):\n        try: os.fork()\n        except OSError: pass\n"
    program = f"import os, time\ndef f():\n{forks}    time.sleep(60)\n"
    most = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, len(processes_of(sandbox)))

    counting = threading.Thread(target=count)
    counting.start()
    try:
        verdict = sandbox.run(program, "f()", wall_s=10.0)
    finally:
        ended.set()
        counting.join()
    assert verdict.reason == "timed out"
    # 50 of the program; besides, its tests' process, two wardens and the forkserver.
    assert 20 < most <= 50 + 4


def test_there_are_enough_of_them() -> None:
    assert len(HOSTILE) >= 40
    assert len({each.name for each in HOSTILE}) == len(HOSTILE)


def test_leaves_no_folder_behind(sandbox: Sandbox) -> None:
    before = set(Path(tempfile.gettempdir()).glob("holdfast-jail-*"))
    assert sandbox.run("open('a', 'w').close()\n", "").passed
    assert set(Path(tempfile.gettempdir()).glob("holdfast-jail-*")) <= before
