"""`holdfast run`: supervise a job."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json
from holdfast.core.errors import BadUse
from holdfast.core.ledger import Ledger
from holdfast.recover.hang import HangLimits
from holdfast.recover.policy import RestartLimits
from holdfast.recover.runs import begin_run, detach, supervise
from holdfast.recover.spec import RunSpec

RESTARTS, HANGS = RestartLimits(), HangLimits()


@click.command(context_settings={"ignore_unknown_options": False, "show_default": True})
@click.option("--nproc", type=int, default=1, metavar="N", help="Ranks on this node.")
@click.option(
    "--max-restarts", type=int, default=RESTARTS.max_restarts, metavar="N", help="Restarts within the window."
)
@click.option(
    "--window-s", type=float, default=RESTARTS.window_s, metavar="S", help="The window of the restart budget."
)
@click.option(
    "--hang-factor",
    type=float,
    default=HANGS.factor,
    metavar="K",
    help="A hang: no step for K median step times …",
)
@click.option("--hang-floor-s", type=float, default=HANGS.floor_s, metavar="S", help="… and at least this long.")
@click.option(
    "--first-step-limit-s",
    type=float,
    default=HANGS.first_step_s,
    metavar="S",
    help="A hang before the first step.",
)
@click.option(
    "--section-limit-s",
    type=float,
    default=HANGS.section_s,
    metavar="S",
    help="A hang in a save, restore or evaluation.",
)
@click.option(
    "--stop-grace-s",
    type=float,
    default=RESTARTS.stop_grace_s,
    metavar="S",
    help="How long a stop may take to save first.",
)
@click.option("--log-max-mib", type=int, default=64, metavar="MIB", help="How much of each rank's output is kept.")
@click.option("--name", metavar="RUN", help="The run's id.  [default: the script's name and the time]")
@click.option("--detach", "detached", is_flag=True, help="Supervise in the background; no terminal is needed.")
@click.option("--resume", metavar="RUN", help="Go on with a run that was stopped, failed or lost its supervisor.")
@click.option("--no-echo", is_flag=True, help="Do not show what the ranks print; `holdfast logs` does.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON; implies --no-echo.")
@click.argument("job", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    place: Place,
    job: tuple[str, ...],
    resume: str | None,
    name: str | None,
    detached: bool,
    no_echo: bool,
    as_json: bool,
    nproc: int,
    max_restarts: int,
    window_s: float,
    hang_factor: float,
    hang_floor_s: float,
    first_step_limit_s: float,
    section_limit_s: float,
    stop_grace_s: float,
    log_max_mib: int,
) -> int:
    r"""Run a training job and keep it running.

    \b
    holdfast run --nproc 8 -- python train.py --lr 3e-4
    holdfast run -- torchrun --nproc-per-node 8 train.py
    holdfast run --resume RUN
    """
    if resume is not None and (job or name):
        raise BadUse("--resume takes the command of the run that it resumes; leave the command and --name out.")
    if resume is None and not job:
        raise BadUse("Nothing to run. Give the job's command after `--`: holdfast run -- python train.py")
    with Ledger.open(place.ledger) as ledger:
        if resume is not None:
            run_id = ledger.run(resume).run_id
        else:
            spec = RunSpec(
                command=job,
                cwd=str(Path.cwd()),
                nproc=nproc,
                restarts=dataclasses.replace(
                    RESTARTS, max_restarts=max_restarts, window_s=window_s, stop_grace_s=stop_grace_s
                ),
                hangs=HangLimits(
                    factor=hang_factor,
                    floor_s=hang_floor_s,
                    first_step_s=first_step_limit_s,
                    section_s=section_limit_s,
                ),
                log_max_mib=log_max_mib,
            )
            run_id = begin_run(spec, ledger, place.home, name=name).run_id
        if detached:
            pid = detach(run_id, place.home, ["--ledger", place.ledger])
            _print_detached(run_id, pid, as_json=as_json)
            return 0
        outcome = supervise(run_id, ledger, place.home, observer=_Narrator(run_id), echo=not (no_echo or as_json))
    if as_json:
        print_json(
            "run",
            {
                "run": run_id,
                "state": outcome.state,
                "exit_code": outcome.exit_code,
                "outcome": outcome.sentence,
            },
        )
    return outcome.exit_code


def _print_detached(run_id: str, pid: int, *, as_json: bool) -> None:
    if as_json:
        print_json("run", {"run": run_id, "state": "running", "pid": pid})
        return
    click.echo(f"Run {run_id} goes on in the background (pid {pid}).")
    click.echo(f"  holdfast logs {run_id} -f     follow it\n  holdfast runs stop {run_id}   save its state and stop it")


class _Narrator:
    """Says what happens, a line each, on standard error."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        text = self._text(kind, data)
        if text is not None:
            print(f"holdfast: {text}", file=sys.stderr, flush=True)  # noqa: T201 - not click's: the ranks print too

    def _text(self, kind: str, data: Mapping[str, Any]) -> str | None:
        match kind:
            case "launch":
                return f"run {self._run_id}, attempt {data['attempt']}"
            case "restored":
                over = "".join(f"; passed over step {one['step']}: {one['reason']}" for one in data["passed_over"])
                return f"restored step {data['step']} from {data['path']}{over}"
            case "incident":
                rank = "" if data["rank"] is None else f" at rank {data['rank']}"
                return f"{'the job stands still' if data['kind'] == 'hang' else 'the job failed'}{rank}; diagnosing"
            case "resolved" if data["action"] == "restart":  # a stop is told by the outcome
                return f"incident {data['incident_id']}: {data['summary']} {data['explanation']}"
            case "resumed":
                return f"training again at step {data['step']}, {data['seconds_to_restart']:.1f} s after detection"
            case "stopping":
                return f"{data['by']}: saving state, then stopping (once more: stop now)"
            case "trouble":
                return str(data["text"])
            case "save_failed":
                return f"a save failed and training goes on: {data}"
            case "ended":
                return str(data["outcome"])
        return None
