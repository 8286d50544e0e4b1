"""The processes of a real run, before and after a restart."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from holdfast.testing import Injector, read_log, run_processes
from holdfast.testing.run_processes import nodes_of

SCRIPT = """
import os, pathlib, time, holdfast
run = holdfast.attach()
place = pathlib.Path(f"pid-{os.environ['RANK']}")
step = int(os.environ["HOLDFAST_ATTEMPT"]) * 1000
while not pathlib.Path("finish").exists():
    step += 1
    run.step(step)
    place.with_suffix(".new").write_text(str(os.getpid()))
    place.with_suffix(".new").rename(place)
    time.sleep(0.05)
"""


def test_each_process_of_a_run_is_found_and_a_rank_again_after_its_restart(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    home = tmp_path / "home"
    command = [sys.executable, "-m", "holdfast.cli.main", "run", "--name", "r", "--nproc", "2"]
    run = subprocess.Popen(
        [*command, "--", sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "HOLDFAST_HOME": str(home), "HOLDFAST_NODE_NAME": "alone"},
    )

    def pids():
        written = {rank: tmp_path / f"pid-{rank}" for rank in range(2)}
        return {rank: int(path.read_text()) for rank, path in written.items() if path.exists()}

    def wait_until(holds):
        deadline_s = time.monotonic() + 120
        while not holds():
            assert run.poll() is None and time.monotonic() < deadline_s  # noqa: PT018
            time.sleep(0.05)

    try:
        wait_until(lambda: len(pids()) == 2)
        (node,) = nodes_of(home, "r")
        assert (node.name, node.run.pid) == ("alone", run.pid)
        kinds = (node.agents, node.supervisors, node.guards, node.launchers, node.shims)
        assert [len(kind) for kind in kinds] == [1, 1, 1, 1, 2]
        assert nodes_of(home, "another") == []
        monkeypatch.setattr(run_processes, "_SHIM", "of no process")
        assert [one.run.pid for one in nodes_of(home, "r")] == [run.pid]
        assert nodes_of(home, "another") == [], "a spare of one run is none of another"
        monkeypatch.undo()
        assert nodes_of(Path("/nowhere"), "r") == []
        log = tmp_path / "log.jsonl"
        injector = Injector(log, home=home, run_id="r")
        for number in (1, 2):
            before = pids()
            (node,) = nodes_of(home, "r")
            assert {rank: one.pid for rank, one in node.ranks.items()} == before
            assert injector.inject("rank killed", rank=1).pid == before[1]
            wait_until(lambda b=before: not set(b.values()) & set(pids().values()))
            assert len(read_log(log)) == number
        (tmp_path / "finish").touch()
        assert run.wait(120) == 0
    finally:
        for process in (
            psutil.Process(run.pid).children(recursive=True) if run.poll() is None else []
        ):
            process.kill()
        run.kill()
        run.wait()
