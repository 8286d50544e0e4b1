"""Provide `holdfast run`: supervise a job."""

import contextlib
import copy
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json
from holdfast.cli.run.ending import ending
from holdfast.cli.run.slurm import (
    JobRequest,
    check_slurm_use,
    run_on_slurm,
    settle,
    with_slurm,
)
from holdfast.cluster import end_of_pod, ends_pod
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.explanation.narration import narrate
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import RunPaths
from holdfast.recover import (
    MODES,
    Outcome,
    RunSpec,
    begin_run,
    board_of,
    change_options,
    check_urls,
    default_stem,
    detach,
    is_left,
    join,
    meeting_of,
    supervise,
)

if TYPE_CHECKING:
    from holdfast.cli.run.evaluation import RunEvaluation, Wish
    from holdfast.recover import Board, Meeting

SETTINGS = (
    ("--nproc", "nproc", "Ranks on this node."),
    (
        "--max-restarts",
        "restarts.max_restarts",
        "Restarts in a row without progress, within the window, before the run ends.",
    ),
    ("--window-s", "restarts.window_s", "The window of the restart budget."),
    (
        "--hang-factor",
        "hangs.factor",
        "A hang: an idle state for this many median step times …",
    ),
    ("--hang-floor-s", "hangs.floor_s", "… and at least this long."),
    (
        "--silence-limit-s",
        "hangs.silence_s",
        "A hang: no step for so long, where the state of the ranks is unknown.",
    ),
    ("--first-step-limit-s", "hangs.first_step_s", "A hang: no first step for so long."),
    (
        "--section-limit-s",
        "hangs.section_s",
        "A hang: a save, restore or evaluation of so long, unless --silence-limit-s is longer.",
    ),
    ("--stop-grace-s", "restarts.stop_grace_s", "Time for a save before a stop."),
    (
        "--healthy-after",
        "healthy_after",
        "After a broken loss, go back to a checkpoint followed by so many ordinary losses; 0: never.",
    ),
    ("--log-max-mib", "log_max_mib", "Most output that is kept of each rank."),
)
"""The options of the supervision: each with the field of `RunSpec` that it sets, and its help."""


LAST_WORDS_S = 2.0
ENV_NOTIFY = "HOLDFAST_NOTIFY"
"""The environment variable with more URLs in the form of --notify, separated by spaces.

It exists because every user of a node can read command lines, and the URLs may hold secrets.
"""


def _with_settings(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options of `SETTINGS` to a command.

    An option that is not given is None, so that a resumed run keeps its former value.
    """
    for flag, path, text in reversed(SETTINGS):
        default = _default(path)
        shown = f"{text}  [default: {default:g}]"
        command = click.option(
            flag, path.replace(".", "_"), type=type(default), metavar="N", help=shown
        )(command)
    return command


def _default(path: str) -> int | float:
    value: Any = DEFAULTS
    for name in path.split("."):
        value = value[name]
    assert isinstance(value, int | float)
    return value


DEFAULTS: Mapping[str, Any] = RunSpec.default_options()


@click.command()
@_with_settings
@click.option(
    "--nnodes",
    type=int,
    metavar="N",
    help="Nodes that train; start this command on each.  [default: 1]",
)
@click.option(
    "--min-nodes",
    type=int,
    metavar="M",
    help="If lost nodes are not replaced, continue with fewer, at least M.  [default: wait]",
)
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    help="One of the nodes, and a free port on it.  [default: from torchrun, Slurm or Kubernetes]",
)
@with_slurm
@click.option(
    "--spares",
    type=int,
    default=0,
    metavar="N",
    help="Nodes of a Slurm job, or of a TrainJob, that wait to replace others.",
)
@click.option(
    "--test-nodes",
    type=click.Choice(["auto", "always", "never"]),
    help="Test nodes before launches: after failures that a node may have caused, always, never."
    "  [default: auto]",
)
@click.option(
    "--name", metavar="RUN", help="The run's id.  [default: the script's name and the time]"
)
@click.option(
    "--fresh",
    is_flag=True,
    help="Ignore the checkpoints of other runs: move them to a subfolder.",
)
@click.option(
    "--detach", "detached", is_flag=True, help="Supervise in the background; no terminal is needed."
)
@click.option(
    "--resume",
    metavar="RUN",
    help="Continue a run that was stopped, failed or lost its supervisor.",
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    help=(
        "act: carry out every decision; propose: act on a running job only after `holdfast runs "
        "approve`; observe: only record the decisions.  [default: act]"
    ),
)
@click.option(
    "--notify",
    multiple=True,
    metavar="URL",
    help="Send a message about each incident by Apprise; set $HOLDFAST_NOTIFY to hide secrets.",
)
@click.option(
    "--eval-suite",
    metavar="SUITE",
    help="Evaluate each checkpoint: a TOML file, or names of tasks.",
)
@click.option(
    "--eval-drop-stale", is_flag=True, help="Drop waiting checkpoints when a newer one appears."
)
@click.option(
    "--eval-option",
    "eval_options",
    multiple=True,
    metavar="OPTION",
    help="An option for `holdfast eval watch` (--eval-option=--on=slurm); repeatable.",
)
@click.option(
    "--no-profile", is_flag=True, help="Record no counters of the nodes and no phases of the ranks."
)
@click.option(
    "--no-echo", is_flag=True, help="Do not show the output of the ranks; `holdfast logs` does."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the outcome as JSON; implies --no-echo."
)
@click.argument("job", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
@ends_pod
def command(
    place: Place,
    /,
    job: tuple[str, ...],
    nnodes: int | None,
    min_nodes: int | None,
    rendezvous: str | None,
    spares: int,
    on: str,
    nodes: int | None,
    sbatch_options: tuple[str, ...],
    test_nodes: str | None,
    resume: str | None,
    name: str | None,
    fresh: bool,
    detached: bool,
    mode: str | None,
    notify: tuple[str, ...],
    eval_suite: str | None,
    eval_drop_stale: bool,
    eval_options: tuple[str, ...],
    no_profile: bool,
    no_echo: bool,
    as_json: bool,
    **settings: float | None,
) -> int:
    """Run a training job and keep it running.

    \b
    holdfast run --nproc 8 -- python train.py --lr 3e-4
    holdfast run -- torchrun --nproc-per-node 8 train.py
    srun holdfast run --spares 1 -- torchrun --nproc-per-node 8 train.py
    holdfast run --on slurm --nodes 4 --spares 1 -- torchrun --nproc-per-node 8 train.py
    holdfast run --nnodes 4 --rendezvous node1:29500 -- torchrun --nproc-per-node 8 train.py
    holdfast run --eval-suite nightly.toml --eval-option=--hf-config=./llama -- python train.py
    holdfast run --resume RUN

    A resumed run keeps its options; those given again replace them.
    """
    _check_use(job, resume, name, fresh=fresh)
    check_slurm_use(on, nodes, sbatch_options, rendezvous, spares)
    wish = _wish(eval_suite, eval_drop_stale, eval_options)
    # Remove the URLs from the environment, because the ranks inherit it and run the user's code.
    urls = [*notify, *os.environ.pop(ENV_NOTIFY, "").split()]
    check_urls(urls)
    kept_settings: dict[str, float | str | bool | None] = {
        path: settings[path.replace(".", "_")] for _, path, _ in SETTINGS
    }
    kept_settings |= {"mode": mode, "test_nodes": test_nodes, "min_nodes": min_nodes}
    kept_settings["profile"] = False if no_profile else None
    given = {path: value for path, value in kept_settings.items() if value is not None}
    with Ledger.open(place.ledger) as ledger:
        run = None if resume is None else ledger.run(resume)
        if run is not None and is_left(run, place.home):
            click.echo(f"Run {run.run_id} is over: {run.state}.", err=True)
            if as_json:
                fields = {"state": run.state, "exit_code": 0, "outcome": run.outcome}
                print_json("outcome", {"id": run.run_id, **fields})
            return 0
        command_line = list(job) if run is None else run.command
        options = _merged({**DEFAULTS, "fresh": fresh} if run is None else run.options, given)
        if on == "slurm":
            options["nnodes"] = nodes or nnodes or options["nnodes"]
            cwd = str(Path.cwd()) if run is None else run.cwd
            spec = RunSpec.from_options(command_line, cwd, options)
            return run_on_slurm(
                lambda: _recorded(run, spec, ledger, place.home, name, None),
                place,
                ledger,
                JobRequest(
                    nodes=spec.nnodes,
                    spares=spares,
                    sbatch_options=sbatch_options,
                    environment={ENV_NOTIFY: " ".join(urls)},
                    echo=not (no_echo or as_json),
                ),
                keep=lambda paths: None if wish is None else wish.keep(paths),
                detached=detached,
                as_json=as_json,
            )
        meeting = meeting_of(
            command_line,
            nnodes=options.get("nnodes") if nnodes is None and run is not None else nnodes,
            rendezvous=rendezvous,
            spares=spares,
            stem=default_stem(command_line),
        )
        options["nnodes"] = 1 if meeting is None else meeting.nnodes
        cwd = str(Path.cwd()) if run is None else run.cwd
        spec = RunSpec.from_options(command_line, cwd, options)
        if meeting is not None and detached:
            raise BadUse(
                "--detach is for one node. Of several, start each one's command in the background."
            )
        if run is None and (done := _completed(ledger, meeting)) is not None:
            ended = Outcome(done.state, 0, done.outcome)
            click.echo(f"holdfast: run {done.run_id} has ended: {done.outcome}", err=True)
            return _print_outcome(done.run_id, ended, as_json=as_json)
        board = None if meeting is None else board_of(place.home, meeting.key, place.ledger)
        is_led = meeting is not None and board is not None and meeting.is_led(board)
        listening = None if meeting is None or is_led else meeting.listen()
        if meeting is not None and listening is None:
            echo = not (no_echo or as_json)
            run_id = None if run is None else run.run_id
            return _join(
                spec, ledger, place, meeting, run_id, echo=echo, as_json=as_json, notify=urls
            )
        name = name or (None if meeting is None else meeting.run_name)
        run_id = _recorded(run, spec, ledger, place.home, name, meeting)
        paths = RunPaths(place.home, run_id)
        if wish is not None:
            wish.keep(paths)
        if detached:
            environment = {ENV_NOTIFY: " ".join(urls)}
            pid = detach(run_id, place.home, ["--ledger", place.ledger], environment=environment)
            _print_detached(run_id, pid, as_json=as_json)
            return 0
        outcome = _lead(
            paths,
            ledger,
            place,
            echo=not (no_echo or as_json),
            meeting=meeting,
            listening=listening,
            notify=urls,
        )
    return _print_outcome(run_id, outcome, as_json=as_json)


def _completed(ledger: Ledger, meeting: "Meeting | None") -> Run | None:
    """Return the completed run of a job that the scheduler has started again; None without one."""
    name = None if meeting is None else meeting.run_name
    return next(
        (run for run in ledger.runs() if run.run_id == name and run.state == "completed"), None
    )


def _lead(paths: RunPaths, ledger: Ledger, place: Place, **options: Any) -> "Outcome":
    """Supervise a run to its end, and evaluate its checkpoints.

    `options` are passed to `supervise`.
    """
    narrator = _Narrator(paths.run_id)
    evaluation = _evaluation(paths, ledger.run(paths.run_id), place, narrator.say)

    def observe(kind: str, data: Mapping[str, Any]) -> None:
        narrator(kind, data)
        if evaluation is not None:
            evaluation(kind, data)

    try:
        outcome = supervise(paths.run_id, ledger, place.home, observer=observe, **options)
        if not outcome.led:
            return outcome  # another node leads the run, which continues
        if evaluation is not None:
            evaluation.finish()
        settle(paths, outcome, narrator.say)
        narrator.say(ending(ledger, place.home, paths.run_id))
    finally:
        narrator.finish()
    return outcome


def _check_use(job: tuple[str, ...], resume: str | None, name: str | None, *, fresh: bool) -> None:
    if resume is not None and (job or name):
        raise BadUse(
            "--resume takes the command of the run that it resumes; leave the command and --name out."
        )
    if resume is not None and fresh:
        raise BadUse("--fresh begins a run anew, and --resume goes on with one. Give one of them.")
    if resume is None and not job:
        raise BadUse(
            "Nothing to run. Give the job's command after `--`: holdfast run -- python train.py"
        )


def _recorded(
    run: Run | None,
    spec: RunSpec,
    ledger: Ledger,
    home: Path,
    name: str | None,
    meeting: "Meeting | None",
) -> str:
    """Record a new run, or the changed options of a run that continues; return the run's id."""
    if run is None and meeting is not None:
        run = _led_before(ledger, board_of(home, meeting.key, ledger.url), name, meeting)
    if run is None:
        return begin_run(spec, ledger, home, name=name).run_id
    if spec.to_options() != run.options:
        change_options(run, spec.to_options(), ledger, home)
    return run.run_id


def _led_before(ledger: Ledger, board: "Board", name: str | None, meeting: "Meeting") -> Run | None:
    """Return the run that continues in this process; None if a new run must begin.

    A run continues if its Slurm job was requeued, or if its first node has returned.
    """
    runs = {one.run_id: one for one in ledger.runs()}
    led = runs.get(meeting.led_before(board) or "")
    if led is not None and led.state == "running" and name in (None, led.run_id):
        return led
    return runs.get(name or "") if name == meeting.run_name else None


def _print_outcome(run_id: str, outcome: Outcome, *, as_json: bool) -> int:
    exit_code = end_of_pod(outcome.exit_code, outcome.sentence)
    if as_json:
        fields = {"state": outcome.state, "exit_code": exit_code, "outcome": outcome.sentence}
        print_json("outcome", {"id": run_id, **fields})
    return exit_code


def _join(
    spec: RunSpec,
    ledger: Ledger,
    place: Place,
    meeting: "Meeting",
    run_id: str | None,
    *,
    echo: bool,
    as_json: bool,
    notify: Sequence[str],
) -> int:
    """Take part in a run that another node leads; return the exit code."""
    narrator = _Narrator(meeting.key)
    ledger.close()  # the ledger is opened again only if this node comes to lead
    try:
        outcome = join(
            spec, ledger, place.home, meeting=meeting, observer=narrator, echo=echo, notify=notify
        )
        narrator("ended", {"outcome": outcome.sentence})
        if outcome.led and run_id is not None:
            settle(RunPaths(place.home, run_id), outcome, narrator.say)
    except HoldfastError as error:
        if run_id is not None and _has_failed_here(run_id, place):
            settle(RunPaths(place.home, run_id), Outcome("failed", 1, str(error)), narrator.say)
        raise
    finally:
        narrator.finish()
    return _print_outcome(meeting.key, outcome, as_json=as_json)


def _has_failed_here(run_id: str, place: Place) -> bool:
    """Return True if this process has taken over the lead of a run, and the run has failed."""
    with contextlib.suppress(HoldfastError), Ledger.open(place.ledger) as ledger:
        run = ledger.run(run_id)
        is_led_here = (run.host, run.pid) == (socket.gethostname(), os.getpid())
        return is_led_here and run.state == "failed"
    return False


def _wish(suite: str | None, drop_stale: bool, options: tuple[str, ...]) -> "Wish | None":
    """Return the evaluation that the command line requests; None without `--eval-suite`.

    Raises:
        BadUse: other evaluation options are given without `--eval-suite`.
    """
    if suite is None:
        if drop_stale or options:
            raise BadUse(
                "--eval-drop-stale and --eval-option need the tasks to evaluate. Give --eval-suite too."
            )
        return None
    from holdfast.cli.run.evaluation import Wish

    return Wish.checked(suite, drop_stale=drop_stale, options=options)


def _evaluation(
    paths: RunPaths, run: Run, place: Place, say: Callable[[str], None]
) -> "RunEvaluation | None":
    """Return the evaluation of the run's checkpoints; None if the run requests no evaluation."""
    from holdfast.cli.run.evaluation import RunEvaluation, Wish

    wish = Wish.kept(paths)
    if wish is None:
        return None
    return RunEvaluation(wish, paths, place.ledger, working_folder=Path(run.cwd), say=say)


def _merged(options: Mapping[str, Any], given: Mapping[str, float | str | bool]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(options))
    for path, value in given.items():
        group, _, name = path.rpartition(".")
        (merged[group] if group else merged)[name] = value
    return merged


def _print_detached(run_id: str, pid: int, *, as_json: bool) -> None:
    if as_json:
        print_json("outcome", {"id": run_id, "state": "running", "pid": pid})
        return
    click.echo(f"Run {run_id} goes on in the background (pid {pid}).")
    click.echo(
        f"  holdfast logs {run_id} -f     follow it\n  holdfast runs stop {run_id}   save its state and stop it"
    )


class _Narrator:
    """Print the events of a run on standard error, one line each.

    A separate thread prints, so that a blocked terminal does not block the supervisor.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._print, daemon=True)
        self._thread.start()

    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        text = (
            f"run {self._run_id}, attempt {data['attempt']}"
            if kind == "launch"
            else narrate(kind, data)
        )
        if text is not None:
            self.say(text)

    def say(self, text: str) -> None:
        """Queue a line for printing."""
        self._lines.put(text)

    def finish(self) -> None:
        """Wait for a limited time until all lines are printed."""
        self._lines.put(None)
        self._thread.join(LAST_WORDS_S)

    def _print(self) -> None:
        while (text := self._lines.get()) is not None:
            try:
                print(f"holdfast: {text}", file=sys.stderr, flush=True)  # noqa: T201 - not click's: the ranks print too
            except OSError:
                return  # the terminal was closed
