"""The supervisor's state of an attempt after messages of shims and ranks."""

from dataclasses import replace

import pytest

from holdfast.diagnose import diagnose
from holdfast.recover.attempt import TOGETHER_S, AttemptView
from holdfast.recover.channel import Peer
from holdfast.recover.detectors.hang import Frozen, HangLimits


def peer(role, rank, pid):
    return Peer(role=role, attempt=1, rank=rank, local_rank=rank, world_size=2, pid=pid)


SHIMS = [peer("shim", rank, 10 + rank) for rank in range(2)]
RANKS = [peer("rank", rank, 20 + rank) for rank in range(2)]


def step(number):
    return {"kind": "step", "step": number, "step_s": 0.1}


def stacks(module, function):
    frames = [[module, "file.py", function, 7]]
    main = {"main": True, "name": "", "daemon": False, "ours": False, "call": "", "frames": frames}
    return {"kind": "stacks", "threads": [main]}


def exited(returncode, at_s):
    return {"kind": "exited", "pid": 0, "returncode": returncode, "at_monotonic_s": at_s}


def started(pid, *, starts_again=True):
    return {"kind": "started", "pid": pid, "starts_again": starts_again}


def gone(*, launcher_lives=True):
    return {"kind": "gone", "launcher_lives": launcher_lives}


@pytest.fixture
def view():
    """Two ranks, attached, at step 3."""
    view = AttemptView.begin(1, HangLimits())
    for shim, rank in zip(SHIMS, RANKS, strict=True):
        view.on_message(shim, {"kind": "hello"}, 0.0)
        view.on_message(shim, started(30 + shim.rank), 0.0)
        view.on_message(rank, {"kind": "hello"}, 0.0)
        view.on_message(rank, {"kind": "step", "step": 3, "step_s": 0.1}, 1.0)
    return view


def test_the_process_that_attached_is_the_rank(view):
    assert view.rank_pids == {0: 20, 1: 21}
    assert (view.world_size, view.last_step) == (2, 3)


def test_a_second_program_of_a_rank_is_watched_anew(view):
    view.on_message(RANKS[0], {"kind": "gone"}, 4.0)
    view.on_message(RANKS[1], {"kind": "gone"}, 4.0)
    assert view.detector.living == {}
    second = replace(RANKS[0], pid=40)
    view.on_message(second, {"kind": "hello"}, 5.0)
    assert view.steps[0] == 3, "until it will report its own"
    view.on_message(second, {"kind": "watch"}, 5.0)
    assert 0 not in view.steps
    assert view.check(5.0 + 1799) is None
    assert view.check(5.0 + 1801).limit_s == HangLimits().first_step_s
    view.on_message(second, step(1), 6.0)
    assert (view.steps[0], list(view.detector.living)) == (1, [0])


def test_a_rank_that_is_stopped_before_it_reports_anything_is_frozen():
    view = AttemptView.begin(1, HangLimits(floor_s=2.0))
    for shim in SHIMS:
        view.on_message(shim, {"kind": "hello"}, 0.0)
        view.on_message(shim, started(30 + shim.rank), 0.0)
    view.states |= {0: "sleeping", 1: "stopped"}
    assert view.check(5.0) is None
    view.states |= {1: "running"}
    assert view.check(6.0) is None, "it went on"
    view.states |= {1: "stopped"}
    assert view.check(7.0) is None
    assert view.check(8.9) is None
    frozen = view.check(9.1)
    assert (frozen.rank, frozen.state, frozen.limit_s) == (1, "T", 2.0)
    assert view.blamed_rank == 1
    view.on_message(SHIMS[1], exited(-9, 9.2), 9.2)
    assert view.check(20.0) is None


def test_the_rank_that_died_first_is_blamed_whoever_is_heard_first(view):
    view.on_message(SHIMS[0], exited(-15, 5.2), 5.3)
    view.on_message(SHIMS[1], exited(-9, 5.0), 5.4)
    assert view.blamed_rank == 1
    assert view.context().stopped_ranks == (0,)
    first, second = view.observations(0.0)
    assert first.startswith("1970-01-01T00:00:00.000Z holdfast: rank 1 ")
    assert "was killed by SIGKILL after step 3; it ended first" in first
    assert "was killed by SIGTERM after step 3; teardown" in second


def test_a_rank_that_ended_well_did_not_fail(view):
    view.on_message(SHIMS[0], exited(0, 4.0), 4.0)
    view.on_message(SHIMS[1], exited(1, 5.0), 5.0)
    assert view.blamed_rank == 1


def test_a_rank_that_others_lost_is_in_doubt_until_their_logs_are_read(view):
    view.on_message(SHIMS[1], exited(0, 4.0), 4.0)
    assert not view.in_doubt
    view.on_message(SHIMS[0], exited(1, 4.2), 4.2)
    assert view.in_doubt
    first, second = view.observations(0.0)
    assert first.endswith("exited with code 0 after step 3, before the others\n")
    assert second.endswith("exited with code 1 after step 3; it ended first\n")
    diagnosis = diagnose([], view.context())
    assert (diagnosis.decided_by, diagnosis.scope) == (("observer-left",), {"rank": 1})


def test_a_rank_that_left_is_found_by_the_steps_of_the_others(view):
    view.on_message(SHIMS[1], exited(0, 4.0), 4.0)
    view.on_message(RANKS[0], step(4), 4.0 + TOGETHER_S + 1)
    assert view.left is None, "the step that both were in"
    view.on_message(RANKS[0], step(9), 4.0 + TOGETHER_S - 1)
    assert view.left is None, "ranks that complete together may report late"
    view.on_message(RANKS[0], step(10), 4.0 + TOGETHER_S + 1)
    assert (view.blamed_rank, view.culprit.at_monotonic_s) == (1, 4.0)
    view.on_message(SHIMS[0], exited(-9, 20.0), 20.0)
    assert view.observations(0.0)[0].endswith(
        "exited with code 0 after step 3, while the others went on; it ended first\n"
    )
    diagnosis = diagnose([], view.context())
    assert (diagnosis.decided_by, diagnosis.scope) == (("observer-left",), {"rank": 1})


WAITS = "torch.distributed.distributed_c10d"


@pytest.mark.parametrize(
    ("module", "writes", "section", "left"),
    [
        (WAITS, False, False, True),
        (WAITS, True, False, False),
        (WAITS, False, True, False),
        ("train", False, False, False),
    ],
    ids=["collective", "merge", "end", "export"],
)
def test_a_rank_that_left_is_found_by_the_wait_of_the_others(view, module, writes, section, left):
    view.on_message(SHIMS[1], exited(0, 4.0), 4.0)
    view.on_message(RANKS[1], {"kind": "gone"}, 4.0)
    if section:
        view.on_message(RANKS[0], {"kind": "section", "open": True, "limit_s": 21600}, 4.0)
    floor_s = HangLimits().floor_s
    for second in range(int(floor_s) + 3):
        assert view.left is None or second > floor_s
        view.on_message(RANKS[0], stacks(module, "all_reduce"), 5.0 + second)
        view.looked({0: (1.0, second if writes else 1)}, 5.0 + second)
        assert view.check(5.0 + second) is None
    assert (view.blamed_rank == 1) is left
    view.on_message(SHIMS[0], exited(-9, 30.0), 30.0)
    (standing, *_) = view.observations(0.0)
    assert ("rank 0 (pid 20) stands in a collective: all_reduce (file.py:7)" in standing) is left


@pytest.mark.parametrize(
    ("limit_s", "waited_s", "named"),
    [
        (None, 1801, ["run.section(", "limit_s=", "--section-limit-s"]),
        (600, 601, ["run.section(", "limit_s=", "--section-limit-s"]),
        (0, 1801, ["--first-step-limit-s"]),
    ],
    ids=["section", "own limit", "first step"],
)
def test_the_diagnosis_names_the_option_of_the_limit_that_was_passed(limit_s, waited_s, named):
    view = AttemptView.begin(1, HangLimits())
    for rank in RANKS:
        view.on_message(rank, {"kind": "hello"}, 0.0)
        view.on_message(rank, {"kind": "watch"}, 0.0)
        if limit_s != 0:
            view.on_message(rank, step(1), 0.0)
            view.on_message(rank, {"kind": "section", "open": True, "limit_s": limit_s}, 0.0)
    assert view.check(waited_s) is not None
    diagnosis = diagnose([], view.context())
    assert all(name in diagnosis.mitigation for name in named)
    assert "--silence-limit-s" not in diagnosis.mitigation


def test_ranks_that_end_with_their_launcher_are_not_blamed(view):
    for shim in reversed(SHIMS):
        view.on_message(shim, gone(launcher_lives=False), 6.0)
    assert (view.blamed_rank, view.launcher_ended_first) == (None, True)
    launcher, *ranks = view.observations(0.0)
    assert "holdfast: the launcher died after step 3; it ended first" in launcher
    assert all(line.endswith("teardown\n") for line in ranks)
    diagnosis = diagnose([], view.context())
    assert (diagnosis.decided_by, diagnosis.scope, diagnosis.restart_helps) == (
        ("observer-launcher",),
        {},
        True,
    )


def test_a_launcher_that_ended_before_its_ranks_were_heard_is_named(view):
    view.launcher_ended(-9)
    assert "holdfast: the launcher died after step 3; it ended first" in view.observations(0.0)[0]
    assert diagnose([], view.context()).decided_by == ("observer-launcher",)


@pytest.mark.parametrize("returncode", [0, 1])
def test_a_launcher_that_ended_by_itself_is_not_blamed(view, returncode):
    view.launcher_ended(returncode)
    assert not view.launcher_ended_first


def test_a_launcher_that_the_supervisor_ended_is_not_blamed(view):
    view.killed = True
    view.on_message(SHIMS[1], gone(launcher_lives=False), 6.0)
    view.launcher_ended(-9)
    assert not view.launcher_ended_first


def test_a_rank_that_failed_before_its_launcher_ended_is_blamed(view):
    view.on_message(SHIMS[0], exited(1, 5.0), 5.0)
    view.on_message(SHIMS[1], gone(launcher_lives=False), 6.0)
    assert (view.blamed_rank, view.launcher_ended_first) == (0, False)


def test_most_ranks_that_ended_well_have_completed():
    view = AttemptView.begin(1, HangLimits())
    shims = [
        Peer(role="shim", attempt=1, rank=rank, local_rank=rank, world_size=4, pid=10 + rank)
        for rank in range(4)
    ]
    for rank in range(4):
        view.on_message(shims[rank], exited(0 if rank else 1, 9.0 - rank), 9.0)
    assert not any("before the others" in line for line in view.observations(0.0))


def test_a_shim_that_ends_without_a_word_took_its_rank_with_it(view):
    view.on_message(SHIMS[1], gone(), 6.0)
    (end,) = view.exits
    assert (end.rank, end.signal, end.at_monotonic_s) == (1, 9, 6.0)
    view.on_message(SHIMS[0], exited(0, 5.0), 5.0)
    view.on_message(SHIMS[0], gone(), 5.1)
    assert len(view.exits) == 2, "a shim that told the end is not counted twice"


def test_in_a_frozen_job_every_death_is_teardown(view):
    view.frozen = Frozen(waited_s=3.0, limit_s=2.0, rank=1, state="T")
    view.on_message(SHIMS[0], exited(-9, 9.0), 9.0)
    assert view.blamed_rank == 1
    frozen, ended = view.observations(0.0)
    assert (
        "no step for 3.0 s (limit 2.0 s) after step 3; rank 1 (pid 21) is frozen: process state T"
        in frozen
    )
    assert ended.endswith("teardown\n")


def test_steps_of_a_rank_that_never_attached_are_not_counted(view):
    view.on_message(peer("rank", 7, 1), {"kind": "step", "step": 99, "step_s": 0.1}, 1.0)
    assert view.last_step == 3


SWEPT = {"kind": "swept", "log_dropped_bytes": 3}


def test_the_next_attempt_begins_below_launchers_that_live(view):
    for shim in SHIMS:
        assert not view.all_ended
        view.on_message(shim, started(30 + shim.rank), 0.0)
        view.on_message(shim, SWEPT, 5.0)
        view.on_message(shim, SWEPT, 5.0)  # repeated, since the agent is another one
    assert (view.all_ended, view.dropped_log_bytes) == (True, 6)
    assert view.can_start_again
    view.launcher_ended(0)
    assert not view.can_start_again


def test_a_lost_node_ends_its_ranks_and_is_blamed_instead_of_those_that_miss_them(view):
    view.on_message(SHIMS[0], exited(1, 5.0), 5.0)  # it has lost the connection to rank 1
    view.on_message(SHIMS[0], SWEPT, 5.0)
    assert not view.all_ended
    view.node_lost("n2", [1], 7.0)
    assert view.all_ended
    assert not view.can_start_again
    assert view.blamed_rank is None
    lines = view.observations(0.0)
    assert lines[0].endswith("holdfast: node n2 was lost after step 3; it ended first\n")
    diagnosis = diagnose([], view.context())
    assert (diagnosis.decided_by, diagnosis.reason) == (("observer-node",), "NodeFailure")
    assert diagnosis.restart_helps


@pytest.mark.parametrize("shim", ["gone", "of another program"])
def test_the_next_attempt_needs_every_shim(view, shim):
    view.starts_again.clear()
    view.on_message(SHIMS[0], started(30), 0.0)
    view.on_message(SHIMS[1], started(31, starts_again=shim == "gone"), 0.0)
    assert view.can_start_again is (shim == "gone")
    view.on_message(SHIMS[0], SWEPT, 5.0)
    view.on_message(SHIMS[1], gone(), 5.0)
    assert view.all_ended, "what is below a shim ends with it"
    assert not view.can_start_again


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "stacks", "threads": 3},
        {"kind": "stacks", "threads": []},
        {"kind": "step"},
        {"kind": "step", "step": "x", "step_s": 1},
        {"kind": "exited"},
    ],
)
def test_malformed_messages_raise_what_the_supervisor_catches(view, message):
    sender = SHIMS[0] if message["kind"] == "exited" else RANKS[0]
    with pytest.raises((KeyError, TypeError, ValueError)):
        view.on_message(sender, message, 1.0)
