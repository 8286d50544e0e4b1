"""Begin, resume, supervise, stop and remove runs, for the commands of the command line."""

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
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import RUN_ID, RunPaths
from holdfast.recover.agent.node import NodeProcess, Observer
from holdfast.recover.agent.rendezvous import Meeting
from holdfast.recover.leadership import Superseded
from holdfast.recover.outcome import Outcome
from holdfast.recover.people.decisions import PROPOSALS, open_proposal
from holdfast.recover.run_lock import POLL_S, RunLock, holder_pid, is_alive
from holdfast.recover.spec import RunSpec

TEARDOWN_TIMEOUT_S = 5.0
"""The seconds that the guard of a dead supervisor has to end the processes of the job."""
STOPPERS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "a closed terminal",
}


def begin_run(spec: RunSpec, ledger: Ledger, home: Path, *, name: str | None = None) -> RunPaths:
    """Record a new run; `supervise` starts it.

    Raises:
        BadUse: the name is taken or malformed, or the run's folder cannot be created.
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


def default_stem(command: Sequence[str]) -> str:
    """Return the first part of a run's id: the name of the script, or else of the program."""
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    name = scripts[0] if scripts else Path(command[0]).name
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:32] or "run"


def _new_id(spec: RunSpec) -> str:
    now = datetime.now(UTC)
    return f"{default_stem(spec.command)}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def change_options(run: Run, options: dict[str, Any], ledger: Ledger, home: Path) -> None:
    """Change the options of a run that is about to be resumed.

    Raises:
        BadUse: an option is not allowed, or the run is still running.
    """
    spec = RunSpec.from_options(run.command, run.cwd, options)
    RunLock.acquire(RunPaths(home, run.run_id).lock).release()
    ledger.set_run(run.run_id, options=spec.to_options())


def state_of(run: Run, home: Path) -> str:
    """Return the state of a run; "lost" if it runs according to the ledger but has no process."""
    return state_on_this_host(run.run_id, run.state, home)


def state_on_this_host(run_id: str, state: str, home: Path) -> str:
    """Return the state of a run on this host, like `state_of`, from its id and its ledger state."""
    if state == "running" and not is_alive(RunPaths(home, run_id).lock):
        return "lost"
    return state


def supervise(
    run_id: str,
    ledger: Ledger,
    home: Path,
    *,
    observer: Observer,
    echo: bool,
    meeting: Meeting | None = None,
    listening: socket.socket | None = None,
    notify: Sequence[str] = (),
) -> Outcome:
    """Supervise a run to its end, in the foreground, on the first or the only node.

    After Ctrl-C, SIGTERM or SIGHUP, the run saves its state and stops; after a second one, it stops
    at once.

    Args:
        run_id: the run.
        ledger: the ledger that holds the run.
        home: the folder above the run's folder.
        observer: a function that receives the events of the run.
        echo: True to show the output of this node's ranks.
        meeting: the meeting of the run's nodes; None for one node.
        listening: the socket on which the agents of other nodes connect.
        notify: the Apprise URLs to which messages about incidents are sent.

    Raises:
        NotFound: the ledger has no such run.
        BadUse: the run is completed or still running, or its command cannot be run any more.
            Nothing was changed.
        HoldfastError: the supervisor cannot be kept going.
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
        paths.stop_request.unlink(missing_ok=True)
        paths.rollback_request.unlink(missing_ok=True)
        goes_on = run.state in ("running", "queued")
        is_lost = goes_on and bool(ledger.attempts(run_id))
        changes = {"state": "running", "pid": os.getpid(), "host": socket.gethostname()}
        ledger.set_run(run_id, **changes, ended_at_s=None, exit_code=None, outcome="")
        node = NodeProcess(spec, home, meeting=meeting, observer=observer, echo=echo, notify=notify)
        leading = node.lead(
            paths, lock, ledger_url=ledger.url, listening=listening, is_lost=is_lost
        )
        try:
            outcome = asyncio.run(_until_the_end(node, leading))
            if not node.is_leading():  # the run continues, and another node leads
                return replace(outcome, led=False)
            with contextlib.suppress(HoldfastError):
                if ledger.run(run_id).state == "running":  # the supervisor recorded no end
                    end = {"state": outcome.state, "exit_code": outcome.exit_code}
                    ledger.set_run(run_id, ended_at_s=time.time(), outcome=outcome.sentence, **end)
        except Superseded:
            raise
        except (HoldfastError, OSError) as error:
            reason = (
                f"Holdfast itself failed: {error}." if isinstance(error, OSError) else str(error)
            )
            with contextlib.suppress(HoldfastError):
                if ledger.run(run_id).state == "running":
                    failed = {"state": "failed", "exit_code": 1, "outcome": reason}
                    ledger.set_run(run_id, ended_at_s=time.time(), **failed)
            raise HoldfastError(reason) from error
        else:
            return outcome
    finally:
        lock.release()


def join(
    spec: RunSpec,
    ledger: Ledger,
    home: Path,
    *,
    meeting: Meeting,
    observer: Observer,
    echo: bool,
    notify: Sequence[str] = (),
) -> Outcome:
    """Take part in a run that another node leads; take over the lead if that node is lost.

    Returns:
        The outcome of the run.

    Raises:
        HoldfastError: no supervisor was found, or another node has taken over from this one.
    """
    node = NodeProcess(spec, home, meeting=meeting, observer=observer, echo=echo, notify=notify)
    outcome = asyncio.run(_until_the_end(node, node.join(ledger_url=ledger.url)))
    return replace(outcome, led=node.is_leading())


async def _until_the_end(node: NodeProcess, running: Coroutine[Any, Any, Outcome]) -> Outcome:
    loop = asyncio.get_running_loop()
    for number, by in STOPPERS.items():
        loop.add_signal_handler(number, node.stop, by)
    try:
        return await running
    finally:
        for number in STOPPERS:
            loop.remove_signal_handler(number)


def detach(
    run_id: str, home: Path, arguments: Iterable[str], *, environment: Mapping[str, str]
) -> int:
    """Supervise a recorded run in a new process without a terminal; return its process id.

    Args:
        run_id: the run.
        home: the folder above the run's folder.
        arguments: the arguments of `holdfast` that precede `run`.
        environment: environment variables to add to those of this process.

    Raises:
        HoldfastError: the process ended immediately.
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
            env={**os.environ, "HOLDFAST_HOME": str(home), **environment},
        )
    while not is_alive(paths.lock):
        if process.poll() is not None:
            lines = paths.supervisor_log.read_text(errors="replace").strip().splitlines()
            raise HoldfastError(
                f"The detached supervisor ended at once: {lines[-1] if lines else process.returncode}."
            )
        time.sleep(POLL_S)
    return process.pid


def stop_run(run_id: str, ledger: Ledger, home: Path, *, timeout_s: float) -> None:
    """Have a run save its state and stop, and wait for its end.

    Any node that shares the run's folder can stop the run.

    Raises:
        BadUse: the run is not running, or this node does not have the run's folder.
        HoldfastError: the run did not stop in time.
    """
    run, paths = ledger.run(run_id), RunPaths(home, run_id)
    is_here = run.host == socket.gethostname()

    def is_going() -> bool:
        return is_alive(paths.lock) if is_here else ledger.run(run_id).state == "running"

    if not is_going():
        raise BadUse(f"Run {run_id} has ended. `holdfast runs show {run_id}` shows how it ended.")
    if not paths.root.is_dir():
        raise BadUse(f"Run {run_id} is supervised on {run.host}, in another folder; stop it there.")
    try:
        with paths.stop_request.open("ab") as file:
            file.write(b"x")  # the supervisor counts the bytes
    except OSError:  # if the disk is full, send the request as a signal
        pid = holder_pid(paths.lock)
        if not is_here or pid is None:
            raise
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    while is_going():
        if time.monotonic() > deadline_s:
            raise HoldfastError(
                f"Run {run_id} did not stop within {timeout_s:g} s; "
                "another `holdfast runs stop` ends it without saving."
            )
        time.sleep(POLL_S)


def approve_run(run_id: str, ledger: Ledger, home: Path, *, timeout_s: float) -> str:
    """Approve the proposal of a run, wait until it is carried out, and return its text.

    Raises:
        BadUse: the run is not running, no proposal waits, the proposal was withdrawn meanwhile, or
            this node does not have the run's folder.
        HoldfastError: the supervisor did not carry the proposal out in time.
    """
    run, paths = ledger.run(run_id), RunPaths(home, run_id)
    if state_of(run, home) != "running" and run.host == socket.gethostname():
        raise BadUse(f"Run {run_id} has ended. `holdfast explain {run_id}` shows how it ended.")

    def waiting() -> dict[str, Any] | None:
        events = ledger.events(run_id, kinds=PROPOSALS)
        newest = max((one.number for one in ledger.attempts(run_id)), default=0)
        return open_proposal([(one.kind, one.attempt, one.data) for one in events], newest)

    proposal = waiting()
    if proposal is None:
        raise BadUse(
            f"Run {run_id} has no proposal to approve. `holdfast explain {run_id}` shows the decisions."
        )
    if not paths.root.is_dir():
        raise BadUse(
            f"Run {run_id} is supervised on {run.host}, in another folder; approve it there."
        )
    write_atomic(paths.approved, f"{proposal['number']}\n".encode())
    deadline_s = time.monotonic() + timeout_s
    while (now := waiting()) is not None and now["number"] == proposal["number"]:
        if time.monotonic() > deadline_s:
            raise HoldfastError(
                f"Run {run_id} has not carried out the proposal within {timeout_s:g} s; "
                f"check its supervisor: holdfast runs show {run_id}"
            )
        time.sleep(POLL_S)
    events = ledger.events(run_id, kinds=PROPOSALS)
    if any(
        (one.kind, one.data.get("number")) == ("approved", proposal["number"]) for one in events
    ):
        return str(proposal["text"])
    why = next((one.data.get("why") for one in reversed(events) if one.kind == "withdrawn"), None)
    raise BadUse(
        "The proposal was not carried out, since it was withdrawn: "
        f"{why or 'its attempt has ended.'} `holdfast explain {run_id}` shows what happened since."
    )


def remove_run(run: Run, ledger: Ledger, home: Path) -> None:
    """Delete the records and the folder of a run. Checkpoints, which are in other folders, remain.

    Raises:
        BadUse: the run is still running, or waits in the queue.
    """
    paths = RunPaths(home, run.run_id)
    if is_alive(paths.lock):
        raise BadUse(
            f"Run {run.run_id} is still going. Stop it first: `holdfast runs stop {run.run_id}`."
        )
    if run.state == "queued":
        raise BadUse(
            f"Run {run.run_id} waits in the queue. Stop it first: `holdfast runs stop {run.run_id}`."
        )
    ledger.remove_run(run.run_id)
    if paths.root.exists():
        shutil.rmtree(paths.root)
