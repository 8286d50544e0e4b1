"""The hang detector, with steps, looks and time set by the test."""

import functools
from dataclasses import replace

import pytest

from holdfast.recover.detectors.collectives import Begun
from holdfast.recover.detectors.hang import (
    SHORTEST_BETWEEN_LOOKS_S,
    HangDetector,
    HangLimits,
    Look,
)
from holdfast.recover.stacks import Activity, Stand

LIMITS = HangLimits(factor=10, floor_s=3, first_step_s=100, section_s=50, silence_s=80)

IN_REDUCE = Stand(
    Activity.COLLECTIVE, ("all_reduce (distributed_c10d.py:3252)", "<module> (train.py:7)")
)
IN_BACKWARD = Stand(
    Activity.BACKWARD, ("_engine_run_backward (graph.py:979)", "<module> (train.py:6)")
)
IN_LOCK = Stand(Activity.LOCK, ("fetch (queue_of_mine.py:5)", "<module> (train.py:3)"))
IN_CODE = Stand(Activity.OTHER, ("evaluate (train.py:40)",))


def trained(ranks=2, steps=5, step_s=0.1, limits=LIMITS):
    """A detector after `steps` steps of every rank; returns it and the time."""
    detector, now_s = HangDetector(limits), 0.0
    detector.world_size = ranks
    for rank in range(ranks):
        detector.attached(rank, now_s)
    for step in range(1, steps + 1):
        now_s += step_s
        for rank in range(ranks):
            detector.stepped(rank, step, step_s, now_s)
    return detector, now_s


def first_alarm(detector, began_s, until_s, looks, states=lambda _now_s: {}):
    """The first alarm after `began_s` and its time, ticking as the supervisor does.

    `looks(now_s)` gives each look.
    """
    for tick in range(int((until_s - began_s) * 10)):
        now_s = began_s + tick / 10
        if detector.look_due(now_s):
            detector.looked(looks(now_s), now_s)
        frozen = detector.check(now_s, states(now_s))
        if frozen is not None:
            return frozen, now_s - began_s
    return None, None


def standing(*stands, cpu_per_s=0.0, state="sleeping"):
    """Looks at ranks that stay where they are."""

    def looks(now_s):
        return {
            rank: Look(state=state, cpu_s=cpu_per_s * now_s, io_bytes=7, stand=stand)
            for rank, stand in enumerate(stands)
        }

    return looks


def test_silence_alone_has_half_an_hour_and_says_so():
    detector, now_s = trained(limits=HangLimits())
    looks = standing(IN_CODE, IN_REDUCE, cpu_per_s=1.0)
    assert first_alarm(detector, now_s, now_s + 1799, looks) == (None, None)
    frozen = detector.check(now_s + 1801, {})
    assert frozen.only_silence
    assert frozen.rank == 0
    assert frozen.limit_s == 1800


def test_a_rank_that_sleeps_or_computes_is_named_and_not_found_early():
    for cpu_per_s in (0.0, 1.0):
        detector, now_s = trained()
        frozen, after_s = first_alarm(
            detector, now_s, now_s + 90, standing(IN_CODE, IN_BACKWARD, cpu_per_s=cpu_per_s)
        )
        assert after_s > 80
        assert (frozen.rank, frozen.only_silence) == (0, True)
        assert frozen.why == "the others wait for it; it stands in evaluate (train.py:40)"


def test_a_longer_pause_that_ended_is_learnt():
    detector, now_s = trained()
    for rank in (0, 1):
        detector.stepped(rank, 6, 0.1, now_s + 70)
    assert detector.check(now_s + 70 + 139, {}) is None
    assert detector.check(now_s + 70 + 141, {}).limit_s == 140


def test_a_lock_that_nobody_can_release_is_found_within_the_short_limit():
    detector, now_s = trained()
    frozen, after_s = first_alarm(detector, now_s, now_s + 60, standing(IN_REDUCE, IN_LOCK))
    assert (frozen.is_locked, frozen.is_of_software) == (True, True)
    assert LIMITS.floor_s < after_s < LIMITS.floor_s + SHORTEST_BETWEEN_LOOKS_S
    assert (frozen.rank, frozen.only_silence, frozen.limit_s) == (1, False, LIMITS.floor_s)
    detector, now_s = trained()
    frozen, _ = first_alarm(detector, now_s, now_s + 60, standing(IN_CODE, IN_LOCK))
    assert frozen.rank == 1
    assert (
        "a lock that none of its threads can release; it stands in fetch (queue_of_mine.py:5)"
        in frozen.why
    )


def test_a_lock_must_be_seen_for_half_of_the_limit():
    detector, now_s = trained()
    locked_s = now_s + LIMITS.floor_s  # before, the rank computes

    def looks(look_s):
        if look_s < locked_s:
            return standing(IN_REDUCE, IN_CODE, cpu_per_s=1.0)(look_s)
        return standing(IN_REDUCE, IN_LOCK)(look_s)

    frozen, after_s = first_alarm(detector, now_s, now_s + 60, looks)
    assert frozen.is_locked
    assert after_s >= 1.5 * LIMITS.floor_s


def test_a_lock_is_no_sign_while_some_thread_or_child_works():
    detector, now_s = trained()
    assert first_alarm(
        detector, now_s, now_s + 79, standing(IN_REDUCE, IN_LOCK, cpu_per_s=0.5)
    ) == (None, None)
    detector, now_s = trained()

    def reads(now_s):  # a worker reads from slow storage, which takes no CPU
        return {
            rank: replace(look, io_bytes=int(now_s * 1e6))
            for rank, look in standing(IN_REDUCE, IN_LOCK)(now_s).items()
        }

    assert first_alarm(detector, now_s, now_s + 79, reads) == (None, None)


@pytest.mark.parametrize("stand", [IN_LOCK, IN_BACKWARD])
def test_the_cost_of_answers_to_looks_is_no_work(stand):
    """With a full flight recorder on a slow host, each answer takes a tenth of a second."""

    def looks(now_s, *, answers_per_s):
        return {
            rank: replace(look, answers_cpu_s=answers_per_s * now_s)
            for rank, look in standing(stand, stand, cpu_per_s=0.3)(now_s).items()
        }

    detector, now_s = trained()
    frozen, after_s = first_alarm(
        detector, now_s, now_s + 60, functools.partial(looks, answers_per_s=0.3)
    )
    assert frozen.limit_s == LIMITS.floor_s
    assert LIMITS.floor_s < after_s < 2 * LIMITS.floor_s
    detector, now_s = trained()
    works = functools.partial(looks, answers_per_s=0.1)
    assert first_alarm(detector, now_s, now_s + 79, works) == (None, None)


def test_all_ranks_in_collectives_are_found_within_the_short_limit():
    for stand, cpu_per_s in (
        (IN_REDUCE, 1.0),
        (IN_BACKWARD, 0.0),
    ):  # NCCL waits with the CPU, gloo without
        detector, now_s = trained()
        frozen, after_s = first_alarm(
            detector, now_s, now_s + 60, standing(stand, stand, cpu_per_s=cpu_per_s)
        )
        assert LIMITS.floor_s < after_s < 2 * LIMITS.floor_s
        assert (frozen.rank, frozen.why) == (None, "all ranks wait in collectives")


@pytest.mark.parametrize(
    "looks",
    [
        standing(IN_BACKWARD, IN_BACKWARD, cpu_per_s=1.0),
        standing(IN_REDUCE, IN_CODE),
        standing(IN_REDUCE, None),
        lambda now_s: standing(
            IN_REDUCE, Stand(Activity.COLLECTIVE, (f"gather (train.py:{now_s})",))
        )(now_s),
    ],
    ids=["backward that computes", "one outside", "one that does not answer", "one that goes on"],
)
def test_what_may_be_work_is_no_second_sign(looks):
    detector, now_s = trained()
    assert first_alarm(detector, now_s, now_s + 79, looks) == (None, None)


def test_a_collective_means_nothing_while_a_rank_has_not_attached():
    detector, now_s = trained()
    detector.world_size = 3
    assert first_alarm(detector, now_s, now_s + 79, standing(IN_REDUCE, IN_REDUCE)) == (None, None)


def test_what_was_seen_before_a_step_counts_no_more():
    detector, now_s = trained()
    for step in range(6, 30):  # each step takes 2.9 s, nearly all of it in a collective
        assert first_alarm(detector, now_s, now_s + 2.9, standing(IN_REDUCE, IN_REDUCE)) == (
            None,
            None,
        )
        now_s += 2.9
        for rank in (0, 1):
            detector.stepped(rank, step, 0.1, now_s)


def test_no_rank_is_looked_at_while_steps_come():
    detector, now_s = trained()
    assert not detector.look_due(now_s + LIMITS.floor_s / 2)
    assert detector.look_due(now_s + LIMITS.floor_s / 2 + 0.1)


def test_a_process_stuck_in_the_kernel_is_found_within_the_short_limit():
    detector, now_s = trained()
    stuck = standing(IN_REDUCE, None, state="disk-sleep")
    frozen, after_s = first_alarm(
        detector, now_s, now_s + 60, stuck, lambda _: {0: "sleeping", 1: "disk-sleep"}
    )
    assert LIMITS.floor_s < after_s < 2 * LIMITS.floor_s
    assert (frozen.rank, frozen.state) == (1, "D")


def test_a_process_that_finishes_reads_and_writes_is_not_stuck():
    detector, now_s = trained()

    def looks(now_s):
        return {
            rank: Look(state="disk-sleep", cpu_s=0.0, io_bytes=int(now_s * 1e6)) for rank in (0, 1)
        }

    assert first_alarm(detector, now_s, now_s + 79, looks) == (None, None)


def test_the_floor_holds_for_fast_steps_and_the_factor_for_slow_ones():
    for step_s, limit_s in ((0.1, 3), (2.0, 20)):
        detector, now_s = trained(step_s=step_s)
        assert detector.check(now_s, {1: "stopped"}) is None
        assert detector.check(now_s + limit_s - 0.1, {1: "stopped"}) is None
        assert detector.check(now_s + limit_s + 0.1, {1: "stopped"}).limit_s == pytest.approx(
            limit_s
        )


def test_the_first_step_is_no_measure_of_the_others():
    detector = HangDetector(LIMITS)
    detector.attached(0, 0.0)
    detector.stepped(0, 1, 90.0, 90.0)
    assert detector.step_limit_s == LIMITS.floor_s
    assert detector.silence_limit_s == LIMITS.silence_s


def test_nothing_to_say_before_anyone_attached():
    assert HangDetector(LIMITS).check(1e9, {}) is None
    assert not HangDetector(LIMITS).look_due(1e9)


def test_before_the_first_step_ranks_may_compile():
    detector = HangDetector(LIMITS)
    detector.world_size = 2
    for rank in (0, 1):
        detector.attached(rank, 0.0)
    assert first_alarm(detector, 0.0, 99.0, standing(IN_REDUCE, IN_REDUCE)) == (None, None)
    frozen = detector.check(101.0, {})
    assert (frozen.only_silence, frozen.option) == (True, "--first-step-limit-s")


def test_a_section_has_the_limit_of_silence_and_excuses_those_who_wait_for_it():
    detector, now_s = trained()
    detector.section(0, now_s, is_open=True, limit_s=None)
    assert first_alarm(detector, now_s, now_s + 79, standing(IN_REDUCE, IN_REDUCE)) == (None, None)
    frozen = detector.check(now_s + 81, {})
    assert (frozen.limit_s, frozen.only_silence, frozen.option) == (80, True, "--section-limit-s")
    detector, now_s = trained()
    detector.section(0, now_s, is_open=True, limit_s=None)
    detector.section(0, now_s + 40, is_open=False, limit_s=None)
    assert detector.check(now_s + 40 + 79, {}) is None, (
        "rank 1 was silent because it waited for rank 0"
    )
    assert detector.check(now_s + 40 + 81, {}).option == "--silence-limit-s"


def test_a_section_that_works_is_never_ended_before_a_pause_that_works():
    for limits, limit_s in (
        (HangLimits(), 1800),
        (HangLimits(section_s=3600), 3600),
        (HangLimits(silence_s=60), 900),
    ):
        detector, now_s = trained(limits=limits)
        detector.section(0, now_s, is_open=True, limit_s=None)
        looks = standing(IN_CODE, IN_REDUCE, cpu_per_s=1.0)
        frozen, after_s = first_alarm(detector, now_s, now_s + limit_s + 1, looks)
        assert (frozen.limit_s, frozen.only_silence) == (limit_s, True)
        assert after_s > limit_s


def test_the_own_limit_of_a_section_holds_exactly():
    for limit_s in (2.0, 70.0, 500.0):
        detector, now_s = trained()
        detector.section(0, now_s, is_open=True, limit_s=limit_s)
        assert detector.check(now_s + limit_s - 0.1, {}) is None
        frozen = detector.check(now_s + limit_s + 0.1, {})
        assert (frozen.limit_s, frozen.only_silence, frozen.option) == (
            limit_s,
            False,
            "--section-limit-s",
        )


def test_a_longer_section_that_ended_is_learnt():
    detector, now_s = trained()
    detector.section(0, now_s, is_open=True, limit_s=300.0)
    detector.section(0, now_s + 20, is_open=True, limit_s=None)  # a save within an evaluation
    detector.section(0, now_s + 30, is_open=True, limit_s=300.0)
    detector.resumed(1000.0)
    now_s += 1200
    detector.section(0, now_s, is_open=False, limit_s=None)
    detector.section(0, now_s, is_open=True, limit_s=None)
    assert detector.check(now_s + 399, {}) is None
    assert detector.check(now_s + 401, {}).limit_s == 400
    detector.section(0, now_s, is_open=False, limit_s=None)
    assert detector.check(now_s + 81, {}).limit_s == 80, "between steps there is no section"


@pytest.mark.parametrize("first_step", [True, False])
def test_a_lock_and_a_stuck_process_are_found_in_a_section_too(first_step):
    for looks, states in (
        (standing(IN_LOCK, IN_REDUCE), {}),
        (standing(IN_CODE, IN_REDUCE, state="disk-sleep"), {0: "disk-sleep"}),
    ):
        detector, now_s = trained(steps=0 if first_step else 5)
        detector.section(0, now_s, is_open=True, limit_s=None)
        frozen, after_s = first_alarm(
            detector, now_s, now_s + 60, looks, lambda _, states=states: states
        )
        assert LIMITS.floor_s < after_s < 2 * LIMITS.floor_s
        assert (frozen.rank, frozen.only_silence, frozen.limit_s) == (0, False, LIMITS.floor_s)
        assert frozen.option is None


def test_a_lock_is_found_while_the_others_wait_for_the_rank_in_a_save():
    detector, now_s = trained()
    detector.section(0, now_s, is_open=True, limit_s=None)
    frozen, after_s = first_alarm(detector, now_s, now_s + 60, standing(IN_REDUCE, IN_LOCK))
    assert LIMITS.floor_s < after_s < 2 * LIMITS.floor_s
    assert (frozen.rank, frozen.is_locked, frozen.only_silence) == (1, True, False)


def test_ranks_that_all_evaluate_may_wait_in_collectives():
    detector, now_s = trained()
    for rank in (0, 1):
        detector.section(rank, now_s, is_open=True, limit_s=None)
    assert first_alarm(detector, now_s, now_s + 79, standing(IN_REDUCE, IN_REDUCE)) == (None, None)


def test_a_stopped_rank_is_found_in_a_section_too():
    detector, now_s = trained()
    for rank in (0, 1):
        detector.section(rank, now_s, is_open=True, limit_s=None)
    states = {0: "sleeping", 1: "stopped"}
    assert detector.check(now_s + 30, states) is None
    frozen = detector.check(now_s + 33.1, states)
    assert (frozen.rank, frozen.state) == (1, "T")
    assert frozen.waited_s == pytest.approx(3.1), "since it was stopped"


def test_a_rank_that_was_stopped_and_continued_in_time_is_not_frozen():
    detector, now_s = trained()
    detector.section(0, now_s, is_open=True, limit_s=None)
    assert detector.check(now_s, {0: "stopped"}) is None
    assert detector.check(now_s + 2, {0: "running"}) is None
    assert detector.check(now_s + 4, {0: "stopped"}) is None


def test_the_kernel_names_the_culprit_before_stacks_and_steps_do():
    detector, now_s = trained()
    detector.stepped(0, 6, 0.1, now_s)  # so rank 1 is behind, but rank 0 is the stopped one
    frozen, _ = first_alarm(
        detector, now_s, now_s + 9, standing(None, IN_LOCK), lambda _: {0: "stopped", 1: "sleeping"}
    )
    assert (frozen.rank, frozen.state, frozen.behind_at_step) == (0, "T", None)


def test_the_rank_behind_is_the_culprit():
    detector, now_s = trained(ranks=4)
    for rank in (0, 1, 3):
        detector.stepped(rank, 6, 0.1, now_s)
    frozen = detector.check(now_s + 81, dict.fromkeys(range(4), "sleeping"))
    assert (frozen.rank, frozen.behind_at_step) == (2, 5)


def test_the_one_that_does_not_answer_is_the_culprit_where_the_others_wait():
    detector, now_s = trained(ranks=3)
    frozen, _ = first_alarm(detector, now_s, now_s + 90, standing(IN_REDUCE, None, IN_REDUCE))
    assert (frozen.rank, frozen.behind_at_step) == (1, None)
    assert frozen.why.endswith("its Python code does not answer")


def test_no_culprit_is_invented():
    detector, now_s = trained(ranks=2)
    assert detector.check(now_s + 81, {0: "sleeping", 1: "sleeping"}).rank is None
    detector, now_s = trained(ranks=2)
    assert detector.check(now_s, {0: "stopped", 1: "stopped"}) is None
    assert detector.check(now_s + 3.5, {0: "stopped", 1: "stopped"}).rank is None
    detector, now_s = trained(ranks=4)
    frozen, _ = first_alarm(
        detector, now_s, now_s + 90, standing(IN_REDUCE, IN_CODE, IN_CODE, IN_REDUCE)
    )
    assert frozen.rank is None


def test_a_rank_that_ended_is_not_waited_for():
    detector, now_s = trained(ranks=2)
    detector.finished(0)
    detector.finished(1)
    assert detector.check(now_s + 1000, {}) is None


def test_a_rank_that_ended_has_the_others_looked_at_at_once():
    detector, now_s = trained(ranks=3)
    detector.finished(2)
    assert detector.look_due(now_s)
    for second in range(12):
        detector.looked(
            standing(IN_REDUCE, IN_REDUCE, cpu_per_s=1.0)(now_s + second), now_s + second
        )
    assert detector.all_wait_s(now_s + 11) == pytest.approx(11)
    detector.looked(standing(IN_REDUCE, IN_CODE)(now_s + 12), now_s + 12)
    assert detector.all_wait_s(now_s + 12) == 0


def test_no_rank_is_looked_at_for_one_that_ended_while_another_is_in_a_section():
    detector, now_s = trained(ranks=3)
    detector.finished(2)
    detector.section(1, now_s, is_open=True, limit_s=None)
    assert not detector.look_due(now_s)


def test_a_watcher_that_stood_still_blames_nobody():
    detector, now_s = trained()
    detector.looked(standing(IN_REDUCE, IN_REDUCE)(now_s), now_s)
    detector.resumed(1000.0)
    detector.looked(standing(IN_REDUCE, IN_REDUCE)(now_s + 1002), now_s + 1002)
    assert detector.check(now_s + 1002, {}) is None
    assert detector.check(now_s + 1079, {}) is None
    assert detector.check(now_s + 1081, {}) is not None


def begun(last, *, waits=True):
    return Begun(at_s={}, last=last, waits=waits, read_at_s=0.0, cost_s=0.0)


@pytest.mark.parametrize(
    ("collectives", "stands", "named"),
    [
        # Rank 1 has not begun the collective in which the others wait.
        ([begun({"0": 9}), begun({"0": 8}, waits=False), begun({"0": 9})], {}, 1),
        # Rank 1 waits in its group with rank 2, so that rank 0 waits for rank 1: rank 2 is the
        # cause.
        ([begun({"0": 9}), begun({"0": 8, "1": 5}), begun({"1": 4}, waits=False)], {}, 2),
        # Rank 0 has not begun the others' collective since it waits for a message of rank 1.
        (
            [begun({"0": 8}, waits=False), begun({"1": 4}, waits=False), begun({"0": 9})],
            {0: IN_REDUCE, 2: IN_REDUCE},
            1,
        ),
        # All wait in the same collective.
        ([begun({"0": 9}), begun({"0": 9}), begun({"0": 9})], {}, None),
        # The rank that has not begun it does not answer: nothing is known of it.
        ([begun({"0": 9}), begun({"0": 9}), None], {}, None),
    ],
)
def test_the_rank_that_has_not_begun_the_others_collective_is_named(collectives, stands, named):
    detector, now_s = trained(ranks=3)
    # No stack stands in a collective that is known as one, unless stated.
    stand = Stand(Activity.OTHER, ("train_step (train.py:12)",))

    def looks(at_s):
        return {
            rank: Look(
                state="sleeping", cpu_s=at_s, io_bytes=7, stand=stands.get(rank, stand), begun=one
            )
            for rank, one in enumerate(collectives)
        }

    frozen, _ = first_alarm(detector, now_s, now_s + 90, looks)
    assert frozen.rank == named
    if named is not None:
        assert frozen.why == "the others wait for it; it stands in train_step (train.py:12)"
