"""Define the outcome of a run, with remarks for the user."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.recover import policy
from holdfast.recover.spec import MIB, RunSpec

if TYPE_CHECKING:  # the process of a node needs neither the diagnosis nor the recorder
    from holdfast.recover.attempt import AttemptView
    from holdfast.recover.recorder import Recorder

NO_STEP = (
    "It ended without reporting a step, so its progress could not be watched. If it trains, add "
    "`run = holdfast.attach()` and `run.step(step, loss=loss)` to it; if it should have trained, see "
    "`holdfast logs {run_id}`."
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run."""

    state: str
    exit_code: int
    sentence: str
    led: bool = True
    """True on the node that led the run at its end."""


def outcome_of(
    end: policy.End, *, run_id: str, spec: RunSpec, view: "AttemptView", recorder: "Recorder"
) -> Outcome:
    """Return the outcome that the policy decided, with remarks on the last attempt."""
    # The policy does not know the name of the run.
    outcome = end.outcome.replace("`holdfast run --resume`", f"`holdfast run --resume {run_id}`")
    sentence = " ".join([outcome, *_remarks(end, run_id, spec, view, recorder)])
    return Outcome(state=end.state, exit_code=end.exit_code, sentence=sentence)


def _remarks(
    end: policy.End, run_id: str, spec: RunSpec, view: "AttemptView", recorder: "Recorder"
) -> list[str]:
    remarks = []
    if end.state == "completed" and not recorder.any_step:
        restored = view.restored if view.watched else None
        done = (
            f"It restored step {restored['step']} and had no step left to make."
            if restored
            else NO_STEP
        )
        remarks.append(done.format(run_id=run_id))
    if end.state == "stopped":
        remarks.append(_where_to_go_on(run_id, recorder))
    if view.dropped_log_bytes:
        remarks.append(
            f"Its output was cut: the last {spec.log_max_mib} MiB of each rank were kept and "
            f"{view.dropped_log_bytes / MIB:.0f} MiB before them dropped; "
            "print less, or raise --log-max-mib."
        )
    return remarks


def _where_to_go_on(run_id: str, recorder: "Recorder") -> str:
    newest = recorder.newest_checkpoint()
    if newest is None:
        return "No checkpoint was saved."
    return (
        f"State is safe at step {newest.step} in {newest.path}; "
        f"`holdfast run --resume {run_id}` goes on from there."
    )
