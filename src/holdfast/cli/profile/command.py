"""Provide `holdfast profile`: record one job, or attach to a run."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json, seconds
from holdfast.cli.output_paths import OUTPUT_FOLDER
from holdfast.cli.profile.report import report
from holdfast.core.errors import BadUse, NotFound

if TYPE_CHECKING:
    import psutil

    from holdfast.profile import LocalSampler, Recording

PIDS_EVERY_S: Final = 10.0
LOOK_S: Final = 0.5


class _Profile(click.Group):
    """A group whose default command is `record`, so that `holdfast profile -- COMMAND` suffices."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["record", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Profile)
def command() -> None:
    """Profile one job: the counters of its nodes and the phases of its ranks.

    \b
    holdfast profile -- python train.py
    holdfast profile --interval-s 0.2 -- torchrun --nproc-per-node 8 train.py
    holdfast profile --attach RUN
    holdfast profile --attach RUN --deep
    holdfast profile report RUN
    """


command.add_command(report)


@command.command()
@click.option(
    "--interval-s",
    type=float,
    default=1.0,
    show_default=True,
    help="Seconds between samples; at least 0.1.",
)
@click.option(
    "--folder",
    type=OUTPUT_FOLDER,
    help="The recording's folder.  [default: a new one]",
)
@click.option("--attach", metavar="RUN", help="A run that is going on, instead of a command.")
@click.option(
    "--deep", is_flag=True, help="With --attach: trace 3 steps of rank 0 and of the slowest rank."
)
@click.option(
    "--memory", is_flag=True, help="With --attach: record a memory snapshot of the same ranks."
)
@click.option(
    "--max-mib",
    type=int,
    default=512,
    show_default=True,
    help="The largest capture of a rank, in MiB.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.argument("job", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def record(
    place: Place,
    interval_s: float,
    folder: Path | None,
    attach: str | None,
    deep: bool,
    memory: bool,
    max_mib: int,
    as_json: bool,
    job: tuple[str, ...],
) -> int:
    """Record a command, or attach to a run.

    \b
    holdfast profile record -- python train.py
    holdfast profile record --attach RUN --deep

    `holdfast run` records a profile by default. For such a run, --attach shows the recording, and
    requests captures.
    """
    from holdfast.profile import MIN_INTERVAL_S

    if (attach is None) == (not job):
        raise BadUse("Give either a command after `--`, or --attach RUN.")
    if attach is None and (deep or memory):
        raise BadUse("--deep and --memory go with --attach RUN.")
    if interval_s < MIN_INTERVAL_S:
        raise BadUse(f"--interval-s is {interval_s:g}; it must be at least {MIN_INTERVAL_S:g}.")
    if max_mib < 1:
        raise BadUse(f"--max-mib is {max_mib}; it must be at least 1.")
    if attach is not None:
        from holdfast.cli.profile.attach import attach_to

        wanted = [kind for kind, is_wanted in (("trace", deep), ("memory", memory)) if is_wanted]
        return attach_to(
            place, attach, wanted, max_bytes=max_mib << 20, interval_s=interval_s, as_json=as_json
        )
    return _record(list(job), folder, interval_s, as_json=as_json)


def _record(job: list[str], folder: Path | None, interval_s: float, *, as_json: bool) -> int:
    from holdfast.core.phases import ENV_PROFILE
    from holdfast.profile import ENV_NODE, LocalSampler, new_folder, own_node

    if shutil.which(job[0]) is None:
        raise NotFound(
            f"There is no program {job[0]!r} to run. Check its name, or give its full path."
        )
    folder = (folder or new_folder(Path(job[-1 if len(job) == 1 else 1]).stem or "job")).absolute()
    node = own_node()
    environment = {**os.environ, ENV_PROFILE: str(folder), ENV_NODE: node}
    sampler = LocalSampler(folder, node, interval_s)
    try:
        with _started(job, environment) as process:
            log = _Log(process, to_stderr=as_json)
            _watch(process, sampler)
            log.thread.join()
    finally:
        sampler.close()
    _write_steps(folder, node, log.steps)
    print_summary(folder, shlex.join(job), process.returncode, as_json=as_json)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


@contextlib.contextmanager
def _started(job: list[str], environment: Mapping[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the job, forward SIGTERM and Ctrl-C to it, and end it after the block."""
    process = subprocess.Popen(
        job, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )

    def pass_on(number: int, _frame: FrameType | None) -> None:
        # Ctrl-C in a terminal reaches the job by itself.
        if number != signal.SIGINT or not sys.stdin.isatty():
            process.send_signal(number)

    former = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for number, handler in former.items():
            signal.signal(number, handler)


class _Log:
    """Print the job's output as it arrives, and collect the steps that its lines name."""

    def __init__(self, process: "subprocess.Popen[bytes]", *, to_stderr: bool) -> None:
        self.steps: list[tuple[int, int]] = []
        """For each line that names a step: the monotonic time in ns, and the step."""
        self._process = process
        self._out = sys.stderr if to_stderr else sys.stdout
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        from holdfast.profile import step_of

        assert self._process.stdout is not None
        for line in self._process.stdout:
            at_ns = time.monotonic_ns()
            text = line.decode(errors="replace")
            if (step := step_of(text)) is not None:
                self.steps.append((at_ns, step))
            with contextlib.suppress(OSError, ValueError):  # a closed terminal ends no job
                self._out.write(text)
                self._out.flush()


def _watch(process: "subprocess.Popen[bytes]", sampler: "LocalSampler") -> None:
    """Run the sampler until the job ends, and send it the processes of the ranks."""
    due_s = 0.0
    pids: dict[int, int] = {}
    while True:
        if time.monotonic() >= due_s:
            due_s = time.monotonic() + PIDS_EVERY_S
            pids = ranks_below(process.pid)
        sampler.look(pids)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
            return


def ranks_below(pid: int) -> dict[int, int]:
    """Find the processes of ranks among a process and its descendants; return them by rank.

    If no process has a rank, the process itself is returned as rank 0.
    """
    import psutil

    found: dict[int, int] = {}
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        for process in (top, *top.children(recursive=True)):  # parents come before their children
            if (rank := _variable(process, "RANK")).isdigit():
                found.setdefault(int(rank), process.pid)
    return found or {0: pid}


def ranks_of_run(run_id: str) -> dict[int, int]:
    """Return the topmost process of each of a run's ranks on this node, by rank."""
    import psutil

    from holdfast.core.link import ENV_RUN

    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        rank = _variable(process, "RANK")
        if not rank.isdigit() or _variable(process, ENV_RUN) != run_id or _is_own(process):
            continue
        before = found.get(int(rank))
        with contextlib.suppress(psutil.Error):
            if before is None or process.create_time() < before.create_time():
                found[int(rank)] = process
    return {rank: process.pid for rank, process in found.items()}


def _is_own(process: "psutil.Process") -> bool:
    """Return True for Holdfast's own process around a rank (the shim), which is no rank itself."""
    import psutil

    try:
        return any("holdfast-rank" in word or "rank_shim" in word for word in process.cmdline())
    except psutil.Error:
        return True


def _variable(process: "psutil.Process", name: str) -> str:
    import psutil

    try:
        return process.environ().get(name, "")
    except psutil.Error:
        return ""


def _write_steps(folder: Path, node: str, lines: list[tuple[int, int]]) -> None:
    """Record the steps that were found in the log, unless the ranks have recorded phases."""
    from holdfast.profile import STEP_PHASE, RecordingWriter, from_lines

    if any(folder.glob("spans-rank*")):
        return
    iterations = from_lines(lines)
    if not iterations:
        return
    with RecordingWriter(folder, node=node, rank=0) as writer:
        for one in iterations:
            each_ns = (one.end_ns - one.start_ns) // one.steps
            assert one.last_step is not None
            for place in range(one.steps):
                start_ns = one.start_ns + place * each_ns
                step = one.last_step - one.steps + 1 + place
                writer.spans(step, [(STEP_PHASE, start_ns, start_ns + each_ns)])


def print_summary(folder: Path, what: str, exit_code: int | None, *, as_json: bool) -> None:
    """Print what a recording contains, and which sources are missing."""
    from holdfast.profile import Recording, iterations_of, typical_s

    try:
        recording = Recording.read(folder)
    except NotFound:
        recording = Recording()
    iterations, shown_by = iterations_of(recording)
    step_s = typical_s(iterations)
    sources = sorted({one.source for one in recording.series})
    missing = _missing(recording)
    if as_json:
        fields: dict[str, Any] = {
            "folder": str(folder),
            "exit_code": exit_code,
            "sources": sources,
            "ranks": recording.ranks,
            "steps": len(iterations),
            "step_s": step_s,
            "steps_from": shown_by,
            "unavailable": missing,
        }
        print_json("profile.recording", fields)
        return
    click.echo(f"Profile of {what}: {folder}")
    if shown_by:
        click.echo(
            f"  {len(iterations)} iterations, median step {seconds(step_s)}, from the {_words(shown_by)}"
        )
    else:
        click.echo(
            "  No iterations: no rank recorded phases, no line of the log names a step, and no GPU shows any."
        )
    click.echo(f"  Counters from: {', '.join(sources) or 'nowhere'}")
    for one in missing:
        click.echo(f"  Not read on {one['node']}: {one['source']} ({one['reason']})")
    click.echo(f"  Next: holdfast profile report {folder}")


def _missing(recording: "Recording") -> list[dict[str, str]]:
    return [
        {"node": node, "source": source, "reason": reason}
        for node, sources in recording.unavailable.items()
        for source, reason in sources.items()
    ]


def _words(shown_by: str) -> str:
    return {"phases": "ranks' phases", "log": "log's lines"}.get(shown_by, f"metric {shown_by}")
