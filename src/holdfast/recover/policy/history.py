"""Decide if the attempts of a run have gained anything.

An attempt has gained something if it reached a higher step than all earlier attempts, or made a
newer checkpoint durable. If an attempt began from an older checkpoint than the newest known one,
the newest one is lost, and gains are counted from the older one. If a job reports neither steps nor
checkpoints, an attempt has gained something if it lived for `blind_gain_s`.
"""

from dataclasses import replace

from holdfast.recover.policy.events import Diagnosed
from holdfast.recover.policy.state import RestartLimits, State
from holdfast.recover.skipping.plan import Skip

BROKEN_SLACK = 3
"""If a loss breaks again, this may become certain up to this number of steps later than before."""


def after_failure(
    limits: RestartLimits,
    state: State,
    failure: Diagnosed,
    now_s: float,
    *,
    skip: Skip | None = None,
    replays: bool = False,
) -> State:
    """Return the state after a failure of the present attempt.

    Args:
        limits: the limits of the policy.
        state: the state before the failure.
        failure: the failure.
        now_s: the time of the failure, in monotonic seconds.
        skip: a range of batches that is left out because of the failure; None if there is none.
        replays: True if the next attempt runs the same steps again to find the cause.
    """
    state = _rolled_back(state, failure)
    gained = not state.roots_since_gain or _has_gained(limits, state, failure, now_s)
    lived_s = now_s - state.launched_at_s
    # The lifetime is no certain sign of a gain. So if a blind job fails again within `window_s`,
    # the restart must wait.
    in_doubt = (
        bool(state.roots_since_gain) and is_blind(state, failure) and lived_s < limits.window_s
    )
    # After a skip or for a replay, the next attempt differs from this one, so that this failure
    # does not count as a vain restart.
    counts = skip is None and not replays
    return replace(
        state,
        vain_at_s=() if gained else (*state.vain_at_s, *(now_s,) * counts),
        waits=0 if gained and not in_doubt else state.waits + counts,
        roots_since_gain=(place(failure),)
        if gained
        else (*state.roots_since_gain, *(place(failure),) * counts),
        best_step=_higher(state.best_step, failure.reached),
        best_checkpoint_step=_higher(state.best_checkpoint_step, failure.checkpoint_step),
        has_stepped=failure.has_stepped,
        broken_step=state.broken_step if failure.healthy_step is None else failure.step,
        is_replay=replays,
        replays_in_vain=(0 if gained else state.replays_in_vain) + replays,
        skipping=state.skipping.after(skip, gained=gained),
    )


def _rolled_back(state: State, failure: Diagnosed) -> State:
    """If newer checkpoints are lost, count gains from the start of the attempt."""
    restored, newest = failure.restored_step, state.best_checkpoint_step
    # If checkpoints are lost down to the same step a second time, `best_step` stays: the gains
    # since the first time did not last.
    if restored is None or newest is None or restored >= newest or restored == state.rolled_back_to:
        return state
    if failure.reached is not None and failure.reached + 1 >= (state.best_step or 0):
        return state  # the attempt reached the best step again
    return replace(
        state, best_step=restored, best_checkpoint_step=restored, rolled_back_to=restored
    )


def place(failure: Diagnosed) -> tuple[str, bool]:
    """Return the root and the place of a failure; the place is True after a first step.

    Two failures count as the same if both values are equal. A failure at the start and a failure in
    the training loop are different, since one kill from outside may hit the start and another one
    the loop.
    """
    return failure.fingerprint, failure.has_stepped


def _has_gained(limits: RestartLimits, state: State, failure: Diagnosed, now_s: float) -> bool:
    if is_blind(state, failure):
        return now_s - state.launched_at_s >= limits.blind_gain_s
    if (
        failure.healthy_step is not None
        and state.broken_step is not None
        and failure.step is not None
        and failure.step <= state.broken_step + BROKEN_SLACK
    ):
        return False
    if failure.checkpoint_step is not None and failure.checkpoint_step > (
        state.best_checkpoint_step or 0
    ):
        return True
    # One step more counts as the same step, since a rank's last report may be lost when the rank
    # dies.
    return failure.reached is not None and failure.reached > (state.best_step or 0) + 1


def is_blind(state: State, failure: Diagnosed) -> bool:
    """Return True if the job has reported neither steps nor checkpoints."""
    known = (state.best_step, state.best_checkpoint_step, failure.step, failure.checkpoint_step)
    return all(step is None for step in known)


def allowed_retries(limits: RestartLimits, failed: State, event: Diagnosed) -> int:
    """Return how often the root of a failure may recur at the same place without a gain."""
    if is_blind(failed, event):
        return limits.blind_retries
    is_outside = event.waits_for_outside or event.killed_from_outside
    is_mended = event.is_hardware or event.is_checkpoint
    return limits.outside_retries if is_outside or is_mended else 1


def _higher(best: int | None, step: int | None) -> int | None:
    return max((each for each in (best, step) if each is not None), default=None)
