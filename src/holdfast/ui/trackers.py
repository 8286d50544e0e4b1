"""Write the curves of a run into an experiment tracker: TensorBoard, W&B or trackio.

Each step appears once, with the numbers of its last execution. Steps that were rolled back are left
out. All trackers receive the same curves.
"""

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.core.accounting import latest_steps, summarize
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.explanation import story_of
from holdfast.core.ledger import Ledger

Tracker = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "holdfast"


@dataclass(frozen=True, kw_only=True)
class Point:
    """The numbers that were reported for one step."""

    step: int
    at_s: float
    """The time at which the step was completed, in Unix seconds."""
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The curves and incidents of a run, in the form that all trackers need."""

    run_id: str
    points: tuple[Point, ...]
    incidents: tuple[tuple[int, float, str], ...]
    """The step, the Unix time and the story of each incident."""
    config: Mapping[str, Any]


def curves_of(ledger: Ledger, home: Path, run_id: str) -> Curves:
    """Return the curves of a run; if the run is in progress, up to now.

    Raises:
        NotFound: the ledger has no such run.
        BadUse: no step of the run is recorded on this host.
        HoldfastError: the journal of steps is damaged.
    """
    steps = latest_steps(ledger, home, run_id)
    if not steps:
        raise BadUse(
            f"Run {run_id} has no step on this host to export. Run the export on the host that has the run's folder: "
            f"{ledger.run(run_id).host}."
        )
    summary = summarize(ledger, home, run_id)
    stories = story_of(summary, ledger.events(run_id)).incidents
    detected_s = [one.incident.detected_at_s for one in summary.incidents]
    points = tuple(
        Point(
            step=one.step,
            at_s=one.at_s,
            values={
                **({} if one.loss is None else {"loss": one.loss}),
                **one.metrics,
                "holdfast/step_seconds": one.step_s,
                "holdfast/attempt": float(one.attempt),
                "holdfast/incidents": float(sum(at_s <= one.at_s for at_s in detected_s)),
            },
        )
        for one in steps
    )
    return Curves(
        run_id=run_id,
        points=points,
        incidents=tuple(
            (
                one.step or 0,
                one.at_s,
                f"{one.what}. Cause: {one.cause} Done: {one.done} {one.check}",
            )
            for one in stories
        ),
        config={
            "command": shlex.join(summary.run.command),
            "state": summary.run.state,
            "outcome": summary.run.outcome,
            "ettr": summary.ettr,
            "ranks": summary.world_size,
            "attempts": len(summary.attempts),
            "steps_lost": summary.steps_lost,
            "incidents": [f"{one.what}, {one.place}. {one.cause}" for one in stories],
        },
    )


def export(curves: Curves, tracker: Tracker, folder: Path) -> str:
    """Write the curves into a tracker; return a sentence with the place of the result.

    Args:
        curves: the curves of the run.
        tracker: the tracker.
        folder: the folder for the files of the tracker.

    Raises:
        BadUse: the tracker is not installed, or the folder holds this run already.
        HoldfastError: the tracker refused.
    """
    return WRITERS[tracker](curves, folder)


def _to_tensorboard(curves: Curves, folder: Path) -> str:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise _not_installed("tensorboard") from error
    target = folder / curves.run_id
    if target.exists():
        raise BadUse(f"{target} exists already. Delete that folder, or name another with --output.")
    partial = target.with_name(f".{curves.run_id}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
    writer = EventFileWriter(str(partial))
    try:
        for point in curves.points:
            values = [
                Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()
            ]
            writer.add_event(
                Event(wall_time=point.at_s, step=point.step, summary=Summary(value=values))
            )
        for step, at_s, said in curves.incidents:
            tensor = TensorProto(dtype="DT_STRING", string_val=[said.encode()])
            metadata = create_summary_metadata(display_name="", description="")
            text = Summary.Value(tag="holdfast/incident", metadata=metadata, tensor=tensor)
            writer.add_event(Event(wall_time=at_s, step=step, summary=Summary(value=[text])))
    finally:
        writer.close()
    partial.rename(target)
    return f"Written to {target}. Look at it: tensorboard --logdir {shlex.quote(str(folder))}"


def _to_wandb(curves: Curves, folder: Path) -> str:
    try:
        import wandb
    except ImportError as error:
        raise _not_installed("wandb") from error
    folder.mkdir(parents=True, exist_ok=True)
    # This process trains nothing: its own load, output and code are of no interest.
    settings = wandb.Settings(
        x_disable_stats=True, x_disable_meta=True, console="off", disable_git=True, save_code=False
    )
    try:
        with _output_to_stderr():
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT, name=curves.run_id,
                dir=str(folder), config=dict(curves.config), settings=settings,
            )  # fmt: skip
            for point in curves.points:
                run.log({**point.values, "holdfast/at_s": point.at_s}, step=point.step)
            place = run.url or run.settings.sync_dir
            run.finish()
    except (wandb.Error, OSError) as error:
        raise HoldfastError(
            f"W&B refused the run: {error}. Run `wandb login`, or set WANDB_MODE=offline and send the files later."
        ) from error
    is_sent = str(place).startswith("http")
    return (
        f"Sent to {place}"
        if is_sent
        else f"Written to {place}. Send it: wandb sync {shlex.quote(str(place))}"
    )


def _to_trackio(curves: Curves, folder: Path) -> str:
    # trackio reads this variable when it is imported.
    os.environ["TRACKIO_DIR"] = str(folder)
    try:
        import trackio
    except ImportError as error:
        raise _not_installed("trackio") from error
    with _output_to_stderr():
        trackio.init(
            project=PROJECT, name=curves.run_id, config=dict(curves.config), embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        for point in curves.points:
            trackio.log({**point.values, "holdfast/at_s": point.at_s}, step=point.step)
        trackio.finish()
    return f"Written to {folder}. Look at it: TRACKIO_DIR={shlex.quote(str(folder))} trackio show --project {PROJECT}"


WRITERS: Mapping[Tracker, Callable[[Curves, Path], str]] = {
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
    "trackio": _to_trackio,
}


def _not_installed(package: str) -> BadUse:
    return BadUse(f"This needs {package}, which is not installed. Run: pip install {package}")


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Redirect a tracker's output to standard error.

    Standard output is for the command's own answer, which programs may read.
    """
    with contextlib.redirect_stdout(sys.stderr):
        yield
