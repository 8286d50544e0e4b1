"""`holdfast demo`: watch a run survive."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from holdfast.cli.output import print_json, seconds
from holdfast.core.accounting import IncidentSummary, RunSummary
from holdfast.core.errors import HoldfastError
from holdfast.core.explanation.narration import narrate
from holdfast.core.words import shorten

NAMES = {
    "faults": "training, with injected faults",
    "own-error": "an error of the user's own",
    "reference": "the same, left alone",
}


@click.command()
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of the weights, the data order and the faults.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-report"),
    show_default=True,
)
@click.option(
    "--steps",
    type=click.IntRange(min=100),
    default=240,
    show_default=True,
    help="Length of the training; a multiple of 20.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def command(seed: int, out: Path, steps: int, as_json: bool) -> int:
    """Train a small GPT while real faults strike, nobody intervenes, and the proof is printed.

    Three runs of two processes on this machine: one with a rank killed, a rank frozen and a checkpoint damaged;
    one that fails by an error of its own, which a restart does not mend; one without faults, to compare with.
    Leaves with 0 if the run with injected faults ended with the same weights, to the last bit.
    """
    missing = [
        name for name in ("torch", "matplotlib", "jinja2") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise HoldfastError(
            f"The demonstration needs {', '.join(missing)}: pip install 'holdfast[all]'"
        )
    from holdfast.demo import Demonstration

    demonstration = Demonstration(out=out, seed=seed, steps=steps)
    with _Display(steps, quiet=as_json) as display:
        verdict = demonstration.run(display.observe)
    if verdict is None:
        click.echo("Stopped; what had been shown by then is in the ledger.", err=True)
        return 4
    if as_json:
        print_json("demo", _fields(verdict.faulty, verdict.stopped, verdict.report))
    else:
        _print_verdict(verdict.faulty, verdict.stopped, verdict.report)
    expected = (
        verdict.identical
        and verdict.faulty.run.state == "completed"
        and verdict.stopped.run.exit_code == 1
    )
    return 0 if expected else 1


class _Display:
    """Progress bars with the incidents above them; plain lines where there is no terminal."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description:<27}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        totals = {"faults": steps, "own-error": 40, "reference": steps}
        self._tasks = {
            run: self._bars.add_task(NAMES[run], total=total, loss="", start=False)
            for run, total in totals.items()
        }

    def __enter__(self) -> "_Display":
        self._bars.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bars.stop()

    def observe(self, run: str, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "step":
            self._bars.update(
                self._tasks[run], completed=data["step"], loss=f"loss {data['loss']:.3f}"
            )
            return
        if kind == "launch" and data["attempt"] == 1:
            self._bars.start_task(self._tasks[run])
            self._say(f"{NAMES[run]}: starting")
            return
        text = narrate(kind, data)
        if text is not None:
            self._say(f"  {text}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _incident_fields(cost: IncidentSummary) -> dict[str, Any]:
    return {
        "injected": [one["fault"] for one in cost.injected],
        "reason": cost.incident.diagnosis["reason"],
        "rank": cost.incident.rank,
        "action": cost.incident.action,
        "seconds_to_detect": cost.seconds_to_detect,
        "seconds_to_restart": cost.seconds_to_restart,
        "steps_lost": cost.steps_lost,
        "passed_over": [one.step for one in cost.passed_over],
    }


def _fields(faulty: RunSummary, stopped: RunSummary, report: Path) -> dict[str, Any]:
    return {
        "report": str(report),
        "ettr": faulty.ettr,
        "wall_s": faulty.wall_s,
        "interventions": faulty.interventions,
        "checkpoint_stall_s": faulty.checkpoints.total_stall_s,
        "incidents": [_incident_fields(cost) for cost in faulty.incidents],
        "own_error": {"exit_code": stopped.run.exit_code, "outcome": stopped.run.outcome},
        "proof": faulty.proof,
    }


def _print_verdict(faulty: RunSummary, stopped: RunSummary, report: Path) -> None:
    click.echo()
    for cost in faulty.incidents:
        incident = cost.incident
        cause = cost.injected[-1]["detail"] if cost.injected else incident.kind
        click.echo(f"{cost.number}. step {incident.step}: {cause}")
        click.echo(f"   {incident.diagnosis['reason']}, action: {incident.action}")
        for line in incident.diagnosis["evidence"][:3]:
            click.echo(
                f"   {line['role']:<9} {Path(line['file']).name}:{line['line']}: {shorten(line['text'])}"
            )
        for over in cost.passed_over:
            click.echo(f"   passed over the checkpoint of step {over.step}: {over.reason}")
        click.echo(
            f"   detected in {seconds(cost.seconds_to_detect)}, training again in "
            f"{seconds(cost.seconds_to_restart)}, {cost.steps_lost} steps lost"
        )
    click.echo(f"\nThe user's own error: {stopped.run.outcome}\n")
    stalls = faulty.checkpoints
    click.echo(f"interventions by people        {faulty.interventions}")
    click.echo(f"effective training time ratio  {faulty.ettr or 0:.3f} of {seconds(faulty.wall_s)}")
    click.echo(
        f"checkpoint stalls              {seconds(stalls.total_stall_s)} for {stalls.count} checkpoints"
    )
    proof = faulty.proof
    if proof is None:
        click.echo(f"proof                          none: {faulty.run.outcome}")
    else:
        verdict = "identical to the last bit" if proof["identical"] else "DIFFERENT"
        click.echo(
            f"final weights                  {verdict} ({proof['bytes']} bytes, {proof['loaded_with']})"
        )
        click.echo(
            f"  with faults     {proof['sha256']}\n  without faults  {proof['reference_sha256']}"
        )
    click.echo(f"report                         {report}")
