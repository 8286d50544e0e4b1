"""Provide `holdfast profile --attach RUN`: show or sample a run, and request captures."""

import contextlib
import time
from pathlib import Path
from typing import Final

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json
from holdfast.cli.profile.command import PIDS_EVERY_S, ranks_of_run
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths

LOOK_S: Final = 0.5
CAPTURE_S: Final = 600.0
"""Seconds that the ranks have for a capture, which takes some steps and writes their files."""


def attach_to(
    place: Place,
    run_id: str,
    wanted: list[str],
    *,
    max_bytes: int,
    interval_s: float,
    as_json: bool,
) -> int:
    """Request captures of a run in progress, or show or make its recording; return the exit code.

    Args:
        place: the home and the ledger of the records.
        run_id: the run.
        wanted: the kinds of captures to request from the ranks. If empty, the recording of the run
            is summarized. If the run records nothing either, this process first samples the ranks on
            this node until the run ends.
        max_bytes: the largest size of one rank's capture.
        interval_s: seconds between two samples, if this process samples.
        as_json: True to print JSON.
    """
    from holdfast.cli.profile.command import print_summary

    with Ledger.open(place.ledger) as ledger:
        run = ledger.run(run_id)
        folder = RunPaths(place.home, run_id).profile
        is_profiled = run.options.get("profile", False)
        if run.state != "running" and not (is_profiled and not wanted):
            raise BadUse(
                f"Run {run_id} is over: {run.state}. `holdfast profile report {run_id}` shows what was recorded."
            )
        if wanted:
            return _capture(folder, run_id, wanted, max_bytes=max_bytes, as_json=as_json)
        if not is_profiled:
            _sample(ledger, run_id, folder, interval_s, as_json=as_json)
        print_summary(folder, f"run {run_id}", None, as_json=as_json)
    return 0


def _sample(ledger: Ledger, run_id: str, folder: Path, interval_s: float, *, as_json: bool) -> None:
    """Sample this node until the run ends, or until Ctrl-C."""
    from holdfast.profile import LocalSampler, own_node

    pids = ranks_of_run(run_id)
    if not pids:
        raise BadUse(f"No rank of run {run_id} runs on this node. Attach on a node of the run.")
    if not as_json:
        click.echo(
            f"Sampling {len(pids)} ranks of run {run_id} on this node; Ctrl-C ends the sampling.",
            err=True,
        )
    sampler = LocalSampler(folder, own_node(), interval_s)
    due_s = time.monotonic() + PIDS_EVERY_S
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while ledger.run(run_id).state == "running":
                if time.monotonic() >= due_s:
                    due_s, pids = time.monotonic() + PIDS_EVERY_S, ranks_of_run(run_id)
                sampler.look(pids)
                time.sleep(LOOK_S)
    finally:
        sampler.close()


def _capture(folder: Path, run_id: str, wanted: list[str], *, max_bytes: int, as_json: bool) -> int:
    """Request captures of two ranks, and wait for them.

    The ranks are rank 0 and the rank whose own work takes longest.
    """
    from holdfast.profile import Recording, captured, outlier_rank, request_capture

    recording = Recording.read(folder)
    if not recording.ranks:
        raise BadUse(
            f"No rank of run {run_id} records phases, so none can capture. Call holdfast.attach() in its script."
        )
    outlier = outlier_rank(recording)
    ranks = {min(recording.ranks), *(() if outlier is None else (outlier,))}
    request = request_capture(folder, kinds=wanted, ranks=ranks, max_bytes=max_bytes)
    if not as_json:
        who = " and ".join(f"rank {rank}" for rank in request.ranks)
        click.echo(f"Capturing {request.steps} steps of {who} …", err=True)
    due_s = time.monotonic() + CAPTURE_S
    while len(found := captured(folder, request)) < len(request.ranks) * len(wanted):
        if time.monotonic() > due_s:
            raise HoldfastError(
                f"{len(found)} of {len(request.ranks) * len(wanted)} captures came within {CAPTURE_S:.0f} s. "
                f"Check whether run {run_id} makes steps: holdfast runs show {run_id}"
            )
        time.sleep(LOOK_S)
    if as_json:
        rows = [{name: getattr(one, name) for name in one.__dataclass_fields__} for one in found]
        print_json("profile.captures", {"folder": str(folder / "captures"), "captures": rows})
    for one in found if not as_json else ():
        line = f"  rank {one.rank}, {one.kind}: "
        if one.state == "done":
            line += f"{folder / 'captures' / one.file} ({one.size_bytes / 1e6:.1f} MB"
            line += (
                f", predicted {one.predicted_bytes / 1e6:.1f} MB before compression)"
                if one.predicted_bytes
                else ")"
            )
        else:
            line += f"refused: {one.reason}"
        click.echo(line)
    return 0 if all(one.state == "done" for one in found) else 4
