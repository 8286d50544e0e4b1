"""What the supervisor makes of what shims and ranks tell."""

import pytest

from holdfast.recover.attempt import AttemptView
from holdfast.recover.channel import Peer
from holdfast.recover.hang import Frozen, HangLimits


def peer(role, rank, pid):
    return Peer(role=role, attempt=1, rank=rank, local_rank=rank, world_size=2, pid=pid)


SHIMS = [peer("shim", rank, 10 + rank) for rank in range(2)]
RANKS = [peer("rank", rank, 20 + rank) for rank in range(2)]


def exited(returncode, at_s):
    return {"kind": "exited", "pid": 0, "returncode": returncode, "at_monotonic_s": at_s, "log_dropped_bytes": 0}


@pytest.fixture
def view():
    """Two ranks, attached, at step 3."""
    view = AttemptView.begin(1, HangLimits())
    for shim, rank in zip(SHIMS, RANKS, strict=True):
        view.heard(shim, {"kind": "hello"}, 0.0)
        view.heard(shim, {"kind": "started", "pid": 30 + shim.rank}, 0.0)
        view.heard(rank, {"kind": "hello"}, 0.0)
        view.heard(rank, {"kind": "step", "step": 3, "step_s": 0.1}, 1.0)
    return view


def test_the_process_that_attached_is_the_rank(view):
    assert view.rank_pids == {0: 20, 1: 21}
    assert (view.world_size, view.last_step) == (2, 3)


def test_the_rank_that_died_first_is_blamed_whoever_is_heard_first(view):
    view.heard(SHIMS[0], exited(-15, 5.2), 5.3)
    view.heard(SHIMS[1], exited(-9, 5.0), 5.4)
    assert view.blamed_rank == 1
    assert view.context().stopped_ranks == (0,)
    first, second = view.observations(0.0)
    assert first.startswith("1970-01-01T00:00:00.000Z holdfast: rank 1 ")
    assert "was killed by SIGKILL after step 3; it ended first" in first
    assert "was killed by SIGTERM after step 3; teardown" in second


def test_a_rank_that_ended_well_did_not_fail(view):
    view.heard(SHIMS[0], exited(0, 4.0), 4.0)
    view.heard(SHIMS[1], exited(1, 5.0), 5.0)
    assert view.blamed_rank == 1


def test_a_shim_that_ends_without_a_word_took_its_rank_with_it(view):
    view.heard(SHIMS[1], {"kind": "gone"}, 6.0)
    (end,) = view.exits
    assert (end.rank, end.signal, end.at_monotonic_s) == (1, 9, 6.0)
    view.heard(SHIMS[0], exited(0, 5.0), 5.0)
    view.heard(SHIMS[0], {"kind": "gone"}, 5.1)
    assert len(view.exits) == 2, "a shim that told the end is not counted twice"


def test_in_a_frozen_job_every_death_is_teardown(view):
    view.frozen = Frozen(waited_s=3.0, limit_s=2.0, rank=1, state="T")
    view.heard(SHIMS[0], exited(-9, 9.0), 9.0)
    assert view.blamed_rank == 1
    frozen, ended = view.observations(0.0)
    assert "no step for 3.0 s (limit 2.0 s) after step 3; rank 1 (pid 21) is frozen: process state T" in frozen
    assert ended.endswith("teardown\n")


def test_steps_of_a_rank_that_never_attached_are_not_counted(view):
    view.heard(peer("rank", 7, 1), {"kind": "step", "step": 99, "step_s": 0.1}, 1.0)
    assert view.last_step == 3


@pytest.mark.parametrize("message", [{"kind": "step"}, {"kind": "step", "step": "x", "step_s": 1}, {"kind": "exited"}])
def test_malformed_messages_raise_what_the_supervisor_catches(view, message):
    with pytest.raises((KeyError, TypeError, ValueError)):
        view.heard(RANKS[0], message, 1.0)
