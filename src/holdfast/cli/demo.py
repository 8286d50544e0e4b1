"""Provide `holdfast demo`: show a run that survives real faults."""

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.output import print_error, print_json, print_table, seconds
from holdfast.cli.output_paths import OUTPUT_FOLDER
from holdfast.core.errors import HoldfastError
from holdfast.core.explanation.narration import narrate
from holdfast.core.words import shorten

if TYPE_CHECKING:
    from holdfast.demo import Verdict

NAMES = {
    "faults": "two nodes, injected faults",
    "own-error": "an error of the user's own",
    "reference": "the same, left alone",
}
FAULTS = 5
CAUSE_LIMIT = 160
"""The most characters of a cause that is printed in a line of the terminal."""


@click.command()
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="The seed of the weights, the data order and the faults.",
)
@click.option(
    "--out",
    type=OUTPUT_FOLDER,
    default=Path("demo-report"),
    show_default=True,
)
@click.option(
    "--steps",
    type=click.IntRange(min=96),
    default=144,
    show_default=True,
    help="Length of the training; a multiple of 12.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def command(seed: int, out: Path, steps: int, as_json: bool) -> int:
    """Train a small GPT on two nodes under real faults, without a person, and print the proof.

    \b
    holdfast demo
    holdfast demo --seed 3 --steps 96 --out demo-report

    The demonstration makes three runs on this machine. The first run has two nodes and a spare
    node: a rank is killed, a checkpoint is damaged, a rank is frozen, a batch of bad data makes the
    loss NaN, and a node becomes faulty. The second run fails because of an error in its script,
    which a restart cannot fix. The third run has no faults, for comparison. If you are root, each
    node is a network namespace with its own address; otherwise all nodes are on this host.

    The exit code is 0 if the run with injected faults and the run without faults end with the same
    weights, to the last bit. The run without faults also leaves out the bad batches that the run
    with faults has found.
    """
    missing = [
        name for name in ("torch", "matplotlib", "jinja2") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise HoldfastError(
            f"The demonstration needs {', '.join(missing)}. Run: pip install 'holdfast[train,report]'"
        )
    from holdfast.demo import Demonstration

    demonstration = Demonstration(out=out, seed=seed, steps=steps)
    with _Display(steps, demonstration.save_every, quiet=as_json) as display:
        verdict = demonstration.run(display.observe)
    if verdict is None:
        print_error(f"Stopped. The records and logs so far are in {out}.", as_json=as_json)
        return 4
    if as_json:
        print_json("demo", _fields(verdict))
    else:
        _print_verdict(verdict)
    for shortcoming in verdict.shortcomings:
        click.echo(f"{shortcoming} The records and logs are in {out}.", err=True)
    return 1 if verdict.shortcomings else 0


class _Display:
    """Show progress bars with the incidents above them; without a terminal, print plain lines."""

    def __init__(self, steps: int, own_error_steps: int, *, quiet: bool) -> None:
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
        totals = {"faults": steps, "own-error": own_error_steps, "reference": steps}
        self._tasks = {
            run: self._bars.add_task(NAMES[run], total=total, loss="", start=False)
            for run, total in totals.items()
        }
        self._began_s = time.monotonic()
        self._faults = 0
        self._fault_at_s: float | None = None

    def __enter__(self) -> "_Display":
        self._bars.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bars.stop()

    def observe(self, run: str, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "step":
            loss = "" if data["loss"] is None else f"loss {float(data['loss']):.3f}"
            self._bars.update(self._tasks[run], completed=data["step"], loss=loss)
            return
        if kind == "launch":
            if data["attempt"] == 1:
                self._fault_at_s = None
                self._bars.start_task(self._tasks[run])
                self._print(f"{NAMES[run]}: starting")
            return
        text = self._line(kind, data)
        if text is not None:
            self._print(text)

    def _line(self, kind: str, data: Mapping[str, Any]) -> str | None:
        """Return the line to print for an event; None if the event has no line."""
        match kind:
            case "hosts" if data["why_one_host"] is None:
                return f"nodes: {', '.join(data['nodes'])} (the spare); a network namespace each"
            case "hosts":
                return f"nodes: {', '.join(data['nodes'])} (the spare); all on this host: {data['why_one_host']}"
            case "fault_injected":
                self._faults += 1
                self._fault_at_s = time.monotonic()
                return (
                    f"FAULT {self._faults} of {FAULTS}: {data['fault']}, after step {data['step']}\n"
                    f"{'':<9}injected: {data['detail']}"
                )
            case "incident":
                after = ""
                if self._fault_at_s is not None:
                    after = f", {time.monotonic() - self._fault_at_s:.1f} s after the fault"
                return f"  detected: {_seen(data)}{after}"
            case "resolved" if data["action"] == "restart":  # the outcome reports a stop
                cause = shorten(data["summary"], CAUSE_LIMIT)
                return f"  decided: restart. {cause} {data['explanation']}".rstrip()
            case "resolved":
                return None
            case "restored":
                passed = "".join(
                    f"; that of step {one['step']} is damaged: {one['reason']}"
                    for one in data["passed_over"]
                )
                return f"  went back to the checkpoint of step {data['step']}{passed}"
            case "resumed":
                self._fault_at_s = None
                after_s = data["seconds_to_restart"]
                return (
                    f"  training again at step {data['step']}, {after_s:.1f} s after the detection"
                )
        text = narrate(kind, data)
        return None if text is None else f"  {text}"

    def _print(self, text: str) -> None:
        at_s = time.monotonic() - self._began_s
        self._console.print(f"{at_s:>5.0f} s  {text}", markup=False, soft_wrap=True)


def _seen(data: Mapping[str, Any]) -> str:
    who = "a rank" if data["rank"] is None else f"rank {data['rank']}"
    match data["kind"]:
        case "hang":
            return "the job stands still" if data["rank"] is None else f"{who} stands still"
        case "anomaly":
            return f"{who} reports a broken loss"
        case _:
            return "the job failed" if data["rank"] is None else f"{who} failed"


def _fields(verdict: "Verdict") -> dict[str, Any]:
    faulty, stopped = verdict.faulty, verdict.stopped
    return {
        "report": str(verdict.report),
        "ettr": faulty.ettr,
        "wall_s": faulty.wall_s,
        "interventions": faulty.interventions,
        "checkpoint_stall_s": faulty.checkpoints.total_stall_s,
        "faults": [row.to_json() for row in verdict.rows],
        "own_error": {"exit_code": stopped.run.exit_code, "outcome": stopped.run.outcome},
        "proof": faulty.proof,
        "shortcomings": verdict.shortcomings,
    }


def _print_verdict(verdict: "Verdict") -> None:
    faulty, stopped = verdict.faulty, verdict.stopped
    rows = []
    for row in verdict.rows:
        who = row.seen_as if row.node is None else f"{row.seen_as}, on {row.node}"
        again = "never" if row.seconds_to_restart is None else f"{row.seconds_to_restart:.1f} s"
        lost = f"{row.rank_seconds_lost:.1f}"
        rows.append((row.fault, who, f"{row.seconds_to_detect:.1f} s", again, lost, row.action))
    click.echo("\nEach fault and its outcome")
    print_table(
        [
            "fault",
            "seen as",
            "detected",
            "training again",
            "rank-seconds lost",
            "action taken",
        ],
        rows,
    )
    click.echo("A rank-second is a second of one rank: with a GPU for each rank, a GPU-second.\n")
    click.echo(f"The user's own error: {stopped.run.outcome}\n")
    stalls = faulty.checkpoints
    click.echo(f"manual interventions           {faulty.interventions}")
    click.echo(f"effective training time ratio  {faulty.ettr or 0:.3f} of {seconds(faulty.wall_s)}")
    click.echo(
        f"checkpoint stalls              {seconds(stalls.total_stall_s)} for {stalls.count} checkpoints"
    )
    proof = faulty.proof
    if proof is None:
        click.echo(f"final weights                  not compared: {faulty.run.outcome}")
    else:
        same = "identical to the last bit" if proof["identical"] else "DIFFERENT"
        click.echo(
            f"final weights                  {same} ({proof['bytes']} bytes, {proof['loaded_with']})"
        )
        click.echo(
            f"  with faults     {proof['sha256']}\n  without faults  {proof['reference_sha256']}"
        )
    click.echo(f"page                           {verdict.report.absolute().as_uri()}")
