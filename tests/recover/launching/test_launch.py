"""The work of a launch besides starting processes."""

import asyncio
import sys
from pathlib import Path

from holdfast.core.paths import RunPaths
from holdfast.recover.agent.rendezvous import loopback_listener
from holdfast.recover.channel import ChannelServer
from holdfast.recover.launching.launch import (
    ATTEMPTS_WITH_LOGS,
    Place,
    can_stand_by,
    launch,
    make_log_folder,
    stand_by,
)
from holdfast.recover.launching.warm_launcher import launcher_arguments
from holdfast.recover.run_lock import RunLock
from holdfast.recover.spec import RunSpec


def test_the_logs_of_old_attempts_are_deleted(tmp_path):
    """Started with a launcher that ends at once, since only the folder matters here."""
    launcher = tmp_path / "torchrun"
    launcher.write_text("#!/bin/sh\n")
    launcher.chmod(0o755)
    paths = RunPaths(tmp_path, "r")
    for attempt in range(1, 31):
        paths.attempt_logs(attempt).mkdir(parents=True)
        paths.rank_log(attempt, 0).write_text("x")
    spec = RunSpec(command=(str(launcher),), cwd=str(tmp_path))
    lock = RunLock.acquire(paths.lock)

    async def start():
        channel = {"address": "127.0.0.1:1", "token": "x", "environment": {}, "place": Place()}
        job = await launch(spec, paths, 31, **channel, lock_fd=lock.fd, echo=False)
        return await job.wait()

    assert asyncio.run(start()) == 0
    lock.release()
    kept = sorted(int(folder.name[-3:]) for folder in paths.logs.iterdir())
    assert kept == list(range(32 - ATTEMPTS_WITH_LOGS, 32))


def test_a_launcher_that_stands_by_does_what_the_command_would(tmp_path):
    paths = RunPaths(tmp_path, "r")
    script = tmp_path / "rank.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'], os.environ['MARK'], sys.argv)\n")
    spec = RunSpec(command=("python", str(script), "a"), cwd=str(tmp_path))
    lock = RunLock.acquire(paths.lock)

    async def start():
        def received(peer, message):
            if message["kind"] == "swept":
                agent.send({"kind": "leave"}, to="shim")

        agent, listening = ChannelServer(received, token="x"), loopback_listener()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        await agent.start(listening)
        standby = await stand_by(spec, lock_fd=lock.fd, echo=False)
        told = {"lock_fd": lock.fd, "echo": False, "environment": {"MARK": "here"}}
        told |= {"address": address, "token": "x", "place": Place()}
        job = await launch(spec, paths, 1, **told, standby=standby)
        assert job is standby
        code = await job.wait()
        unused = await stand_by(spec, lock_fd=lock.fd, echo=False)
        unused.kill()
        assert await unused.wait() == 0
        await agent.close()
        return code

    assert asyncio.run(start()) == 0, paths.launcher_log(1).read_text()
    assert f"0 here ['{script}', 'a']" in paths.rank_log(1, 0).read_text()
    lock.release()
    RunLock.acquire(paths.lock, timeout_s=0.0).release()


def test_another_program_than_this_interpreters_torchrun_is_started_anew():
    assert launcher_arguments([sys.executable, "-m", "torch.distributed.run", "-x"]) == ["-x"]
    beside = str(Path(sys.executable).with_name("torchrun"))
    assert launcher_arguments([beside, "--nnodes=2", "t.py"]) == ["--nnodes=2", "t.py"]
    assert launcher_arguments(["/elsewhere/bin/torchrun", "t.py"]) is None


def test_no_launcher_stands_by_for_a_torchrun_of_another_environment(tmp_path):
    elsewhere = tmp_path / "torchrun"
    elsewhere.touch(0o755)
    nodes = {"cwd": str(tmp_path), "nnodes": 2}
    assert not can_stand_by(RunSpec(command=(str(elsewhere), "t.py"), **nodes))
    (tmp_path / "t.py").touch()
    assert can_stand_by(RunSpec(command=("torchrun", "t.py"), **nodes))
    assert can_stand_by(RunSpec(command=("python", "t.py"), **nodes))


def test_logs_of_old_attempts_go_but_not_those_that_the_launcher_writes(tmp_path):
    paths = RunPaths(tmp_path, "r")
    launched = 3
    for attempt in range(1, 60):
        if attempt == launched:
            make_log_folder(paths, attempt, launched=attempt)
            paths.launcher_log(attempt).write_text("of the launcher\n")
        else:
            make_log_folder(paths, attempt, launched=min(attempt, launched))
    kept = sorted(int(folder.name.split("-")[1]) for folder in paths.logs.iterdir())
    assert kept == [launched, *range(60 - ATTEMPTS_WITH_LOGS, 60)]
    assert paths.launcher_log(59).read_text() == "of the launcher\n"
