"""Hostile programs are contained, as seen from outside, and get the right verdict."""

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from hostile_programs import HOSTILE, Hostile

from holdfast.evaluate.metrics.sandbox import Sandbox

SECRET = "the-secret-of-the-canary"


class Outside(NamedTuple):
    canary: Path
    tcp: socket.socket
    abstract: socket.socket
    name: str


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    name = f"holdfast-canary-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        canary = Path(folder)
        canary.chmod(0o777)
        (canary / "secret").write_text(SECRET)
        abstract.bind(f"\0{name}")
        abstract.listen()
        tcp.setblocking(False)
        abstract.setblocking(False)
        yield Outside(canary, tcp, abstract, name)


def _source(program: str, outside: Outside) -> str:
    port = outside.tcp.getsockname()[1]
    for name, value in (("canary", outside.canary), ("port", port), ("socket", outside.name), ("owner", os.getpid())):
        program = program.replace(f"{{{name}}}", str(value))
    return program


def _processes(sandbox: Sandbox) -> list[psutil.Process]:
    """Of the sandbox, besides its launcher."""
    return psutil.Process(sandbox.process_id()).children(recursive=True)


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda each: each.name.replace(" ", "-"))
def test_is_contained(sandbox: Sandbox, outside: Outside, hostile: Hostile) -> None:
    if not sandbox.protection.namespaces and hostile.name in {"fill the inodes", "fill the disk"}:
        pytest.skip("bounded for each file alone")
    standing = set(_processes(sandbox))
    verdict = sandbox.run(_source(hostile.program, outside), hostile.tests, wall_s=hostile.wall_s)

    assert verdict.passed == hostile.passes, verdict
    assert (verdict.reason == "passed") == verdict.passed
    assert hostile.reason in verdict.reason
    assert SECRET not in verdict.output_tail
    assert len(verdict.output_tail) <= 2 * sandbox.limits.output_bytes
    # As seen from outside.
    assert [(path.name, path.read_text()) for path in outside.canary.iterdir()] == [("secret", SECRET)]
    for listening in (outside.tcp, outside.abstract):
        with pytest.raises(BlockingIOError):
            listening.accept()
    # The program's processes are gone before there is a verdict; a warden may still be on its way out.
    assert not psutil.wait_procs(set(_processes(sandbox)) - standing, timeout=10)[1]


def test_bounds_processes_seen_from_outside(sandbox: Sandbox) -> None:
    forks = "    for _ in range(6):\n        try: os.fork()\n        except OSError: pass\n"
    program = f"import os, time\ndef f():\n{forks}    time.sleep(9)\n"
    most = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, len(_processes(sandbox)))

    counting = threading.Thread(target=count)
    counting.start()
    try:
        verdict = sandbox.run(program, "f()", wall_s=1.0)
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
