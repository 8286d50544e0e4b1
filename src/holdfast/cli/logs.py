"""Provide `holdfast logs`: print the output of a run's ranks."""

import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths
from holdfast.core.rotating_log import LogTail, parts_oldest_first
from holdfast.recover import state_of

FOLLOW_S = 0.3


@click.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--rank", type=int, help="One rank only.")
@click.option("--attempt", type=int, help="The attempt, counted from 1.  [default: the newest]")
@click.option(
    "--launcher",
    is_flag=True,
    help="Print the output of PyTorch's launcher and the supervisor instead.",
)
@click.option("-f", "--follow", is_flag=True, help="Keep printing as the run goes on.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the paths of the log files as one JSON object."
)
@click.pass_obj
def command(
    place: Place,
    run_id: str | None,
    rank: int | None,
    attempt: int | None,
    launcher: bool,
    follow: bool,
    as_json: bool,
) -> None:
    """Print what a run's ranks printed, rank by rank.

    \b
    holdfast logs
    holdfast logs RUN --rank 3 --follow

    Without RUN, print the output of the newest run.
    """
    if follow and as_json:
        raise BadUse("--follow and --json do not go together. Leave one of them out.")
    with Ledger.open(place.existing_ledger()) as ledger:
        run_id = ledger.newest_run().run_id if run_id is None else ledger.run(run_id).run_id
        newest = max((one.number for one in ledger.attempts(run_id)), default=0)
    paths = RunPaths(place.home, run_id)
    number = newest if attempt is None else attempt
    logs = _logs(paths, number, rank, launcher=launcher)
    if as_json:
        files = [
            {"log": log.stem, "parts": [str(part) for part in parts_oldest_first(log)]}
            for log in logs
        ]
        print_json("logs", {"id": run_id, "attempt": number, "logs": files})
        return
    if not logs and not follow:
        raise NotFound(_nothing(paths, number, rank))
    if follow:
        _follow(place, paths, rank, attempt, launcher=launcher)
        return
    for log in logs:
        if len(logs) > 1:
            click.echo(f"==> {log.name} <==")
        with closing(LogTail(log)) as tail:
            _show(tail)


def _logs(paths: RunPaths, attempt: int, rank: int | None, *, launcher: bool) -> list[Path]:
    folder = paths.attempt_logs(attempt)
    if launcher:
        found = [paths.launcher_log(attempt), paths.observer_log(attempt)]
        return [log for log in found if log.exists()]
    if rank is not None:
        log = paths.rank_log(attempt, rank)
        return [log] if log.exists() else []
    return sorted(folder.glob("rank-*.log"), key=lambda log: int(log.stem.removeprefix("rank-")))


def _nothing(paths: RunPaths, attempt: int, rank: int | None) -> str:
    there = sorted(
        int(log.stem.removeprefix("rank-"))
        for log in paths.attempt_logs(attempt).glob("rank-*.log")
    )
    if rank is not None and there:
        return f"Rank {rank} of attempt {attempt} left no log; there are ranks {there[0]} to {there[-1]}."
    tried = sorted(
        int(folder.name.removeprefix("attempt-")) for folder in paths.logs.glob("attempt-*")
    )
    if not tried:
        return f"Run {paths.run_id} has no logs yet."
    return (
        f"Attempt {attempt} left no rank's log; there are attempts {tried[0]} to {tried[-1]}. "
        "--launcher shows what the launcher printed."
    )


def _show(tail: LogTail) -> None:
    """Print all lines of the log that were not printed yet."""
    for chunk, _ in tail.read():
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def _follow(
    place: Place, paths: RunPaths, rank: int | None, attempt: int | None, *, launcher: bool
) -> None:
    """Print a log, and follow it across rotations and restarts until the run ends."""
    tails: dict[Path, LogTail] = {}
    with Ledger.open(place.existing_ledger()) as ledger, ExitStack() as opened:
        shown = attempt or max((one.number for one in ledger.attempts(paths.run_id)), default=1)
        while True:
            going = state_of(ledger.run(paths.run_id), place.home) in ("running", "queued")
            newest = max((one.number for one in ledger.attempts(paths.run_id)), default=shown)
            for number in range(shown, (attempt or newest) + 1):
                for log in _logs(paths, number, rank, launcher=launcher):
                    if log not in tails:
                        tails[log] = opened.enter_context(closing(LogTail(log)))
                    _show(tails[log])
            shown = attempt or newest
            if not going or (attempt is not None and newest > attempt):
                return
            time.sleep(FOLLOW_S)
