"""Begin, resume, supervise, stop and remove runs: what the commands of the same names do."""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import Event, Ledger, Run
from holdfast.core.paths import RUN_ID, RunPaths
from holdfast.recover.outcome import Outcome
from holdfast.recover.run_lock import POLL_S, RunLock, holder_pid, is_alive
from holdfast.recover.spec import RunSpec
from holdfast.recover.supervisor import Observer, Supervisor

TEARDOWN_TIMEOUT_S = 5.0
"""How long the guard of a dead supervisor may need to end what it left."""
STOPPERS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "a closed terminal",
}


def begin_run(spec: RunSpec, ledger: Ledger, home: Path, *, name: str | None = None) -> RunPaths:
    """Record a new run; `supervise` starts it.

    Raises:
        BadUse: the name is taken or cannot be a file's name.
    """
    run_id = name or _new_id(spec)
    if RUN_ID.fullmatch(run_id) is None:
        raise BadUse(f"--name {run_id!r}: use letters, digits, '.', '_' and '-', at most 64.")
    if any(run.run_id == run_id for run in ledger.runs()):
        raise BadUse(
            f"There is already a run {run_id!r}. Choose another --name, or `holdfast run --resume {run_id}`."
        )
    paths = RunPaths(home, run_id)
    try:
        paths.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadUse(
            f"The run's folder {paths.root} cannot be made: {error.strerror}. Set HOLDFAST_HOME to a writable one."
        ) from error
    ledger.add_run(
        Run(
            run_id=run_id,
            state="running",
            command=list(spec.command),
            options=spec.to_options(),
            cwd=spec.cwd,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at_s=time.time(),
        )
    )
    return paths


def _new_id(spec: RunSpec) -> str:
    scripts = [Path(word).stem for word in spec.command if word.endswith(".py")]
    stem = re.sub(
        r"[^A-Za-z0-9._-]", "-", scripts[0] if scripts else Path(spec.command[0]).name
    ).lstrip("._-")
    return f"{stem[:32] or 'run'}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def change_options(run: Run, options: dict[str, Any], ledger: Ledger, home: Path) -> None:
    """Give a run that is about to be resumed other options.

    Raises:
        BadUse: an option is not allowed, or the run is still going.
    """
    spec = RunSpec.from_options(run.command, run.cwd, options)
    RunLock.acquire(RunPaths(home, run.run_id).lock).release()
    ledger.set_run(run.run_id, options=spec.to_options())


def state_of(run: Run, home: Path) -> str:
    """The run's state; "lost" where the ledger says running and no process of it lives."""
    if run.state == "running" and not is_alive(RunPaths(home, run.run_id).lock):
        return "lost"
    return run.state


def supervise(
    run_id: str, ledger: Ledger, home: Path, *, observer: Observer, echo: bool
) -> Outcome:
    """Supervise a run from where it is to its end, in the foreground.

    Ctrl-C, SIGTERM and SIGHUP save state first and then stop; a second one stops at once.

    Raises:
        NotFound: there is no such run.
        BadUse: it completed, it is still going, or its command cannot run any more; nothing was changed.
    """
    run = ledger.run(run_id)
    if run.state == "completed":
        raise BadUse(
            f"Run {run_id} completed. Start a new one, or give its script more steps in a new run, "
            "which goes on from its checkpoints once `.holdfast-writer` in their folder is deleted."
        )
    paths = RunPaths(home, run_id)
    spec = RunSpec.from_options(run.command, run.cwd, run.options)
    lock = RunLock.acquire(paths.lock, timeout_s=TEARDOWN_TIMEOUT_S)
    try:
        paths.stop_asked.unlink(missing_ok=True)
        attempts = ledger.attempts(run_id)
        _close_lost_attempts(run, ledger)
        ledger.set_run(
            run_id, state="running", pid=os.getpid(), ended_at_s=None, exit_code=None, outcome=""
        )
        supervisor = Supervisor(spec, paths, ledger, lock, observer=observer, echo=echo)
        lost = run.state == "running" and bool(attempts)
        return asyncio.run(_until_the_end(supervisor, paths, resumed=lost))
    finally:
        lock.release()


def _close_lost_attempts(run: Run, ledger: Ledger) -> None:
    """Write down the end of an attempt whose supervisor died before it could."""
    for attempt in ledger.attempts(run.run_id):
        if attempt.outcome != "running":
            continue
        now_s = time.time()
        ledger.set_attempt(run.run_id, attempt.number, outcome="failed", ended_at_s=now_s)
        lost = {
            "detail": f"the supervisor (pid {run.pid}) ended without a word; its ranks ended with it"
        }
        ledger.add_event(
            Event(
                run_id=run.run_id,
                attempt=attempt.number,
                at_s=now_s,
                kind="supervisor_lost",
                data=lost,
            )
        )


async def _until_the_end(supervisor: Supervisor, paths: RunPaths, *, resumed: bool) -> Outcome:
    loop = asyncio.get_running_loop()

    def stop(by: str) -> None:
        supervisor.ask_to_stop(
            "holdfast runs stop" if by == "SIGTERM" and paths.stop_asked.exists() else by
        )

    for number, by in STOPPERS.items():
        loop.add_signal_handler(number, stop, by)
    try:
        return await supervisor.run(resumed=resumed)
    finally:
        for number in STOPPERS:
            loop.remove_signal_handler(number)


def detach(run_id: str, home: Path, arguments: Iterable[str]) -> int:
    """Supervise a recorded run in a process of its own that no terminal holds; returns its pid.

    Raises:
        HoldfastError: that process ended at once.
    """
    paths = RunPaths(home, run_id)
    with paths.supervisor_log.open("ab") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "holdfast.cli.main",
                *arguments,
                "run",
                "--resume",
                run_id,
                "--no-echo",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "HOLDFAST_HOME": str(home)},
        )
    while not is_alive(paths.lock):
        if process.poll() is not None:
            said = paths.supervisor_log.read_text(errors="replace").strip().splitlines()
            raise HoldfastError(
                f"The detached supervisor ended at once: {said[-1] if said else process.returncode}."
            )
        time.sleep(POLL_S)
    return process.pid


def stop_run(run: Run, home: Path, *, timeout_s: float) -> None:
    """Ask a run's supervisor to save state and stop, and wait for it.

    Raises:
        BadUse: the run is not going, or it is supervised on another host.
        HoldfastError: it did not stop in time.
    """
    paths = RunPaths(home, run.run_id)
    if run.host != socket.gethostname():
        raise BadUse(f"Run {run.run_id} is supervised on {run.host}; stop it there.")
    if not is_alive(paths.lock):
        raise BadUse(
            f"Run {run.run_id} is not going. `holdfast runs show {run.run_id}` tells how it ended."
        )
    pid = holder_pid(paths.lock)
    with contextlib.suppress(OSError):  # a full disk: it is stopped all the same
        paths.stop_asked.touch()
    try:
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass  # its supervisor is gone, and what it left is ending: wait for that
    deadline_s = time.monotonic() + timeout_s
    while is_alive(paths.lock):
        if time.monotonic() > deadline_s:
            raise HoldfastError(
                f"Run {run.run_id} did not stop within {timeout_s:g} s; asking once more ends it without saving."
            )
        time.sleep(POLL_S)


def remove_run(run: Run, ledger: Ledger, home: Path) -> None:
    """Forget a run and delete its folder; checkpoints, which lie where the script put them, stay.

    Raises:
        BadUse: it is still going.
    """
    paths = RunPaths(home, run.run_id)
    if is_alive(paths.lock):
        raise BadUse(
            f"Run {run.run_id} is still going. Stop it first: `holdfast runs stop {run.run_id}`."
        )
    ledger.remove_run(run.run_id)
    if paths.root.exists():
        shutil.rmtree(paths.root)
