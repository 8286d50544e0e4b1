"""The hang detector, told of steps and time by hand."""

from holdfast.recover.hang import HangDetector, HangLimits

LIMITS = HangLimits(factor=10, floor_s=3, first_step_s=100, section_s=50)


def trained(ranks=2, steps=5, step_s=0.1, limits=LIMITS):
    """A detector after `steps` steps of every rank; returns it and the time."""
    detector, now_s = HangDetector(limits), 0.0
    for rank in range(ranks):
        detector.attached(rank, now_s)
    for step in range(1, steps + 1):
        now_s += step_s
        for rank in range(ranks):
            detector.stepped(rank, step, step_s, now_s)
    return detector, now_s


def test_the_floor_holds_for_fast_steps_and_the_factor_for_slow_ones():
    fast, now_s = trained(step_s=0.1)
    assert fast.check(now_s + 2.9, {}) is None
    assert fast.check(now_s + 3.1, {}) is not None
    slow, now_s = trained(step_s=2.0)
    assert slow.check(now_s + 19.9, {}) is None
    assert slow.check(now_s + 20.1, {}) is not None


def test_the_first_step_is_no_measure_of_the_others():
    detector = HangDetector(LIMITS)
    detector.attached(0, 0.0)
    detector.stepped(0, 1, 90.0, 90.0)
    assert detector.step_limit_s == LIMITS.floor_s


def test_nothing_to_say_before_anyone_attached():
    assert HangDetector(LIMITS).check(1e9, {}) is None


def test_before_the_first_step_ranks_may_compile():
    detector = HangDetector(LIMITS)
    detector.attached(0, 0.0)
    assert detector.check(99.0, {}) is None
    assert detector.check(101.0, {}) is not None


def test_a_section_has_its_own_limit_and_excuses_those_who_wait_for_it():
    detector, now_s = trained()
    detector.section(0, now_s, is_open=True, limit_s=None)
    assert detector.check(now_s + 49, {}) is None
    assert detector.check(now_s + 51, {}) is not None
    detector, now_s = trained()
    detector.section(0, now_s, is_open=True, limit_s=7.0)
    assert detector.check(now_s + 7.1, {}).limit_s == 7.0
    detector, now_s = trained()
    detector.section(0, now_s, is_open=True, limit_s=None)
    detector.section(0, now_s + 40, is_open=False, limit_s=None)
    assert detector.check(now_s + 42, {}) is None, "rank 1 was silent because it waited for rank 0"
    assert detector.check(now_s + 44, {}) is not None


def test_a_stopped_rank_is_found_in_a_section_too():
    detector, now_s = trained()
    for rank in (0, 1):
        detector.section(rank, now_s, is_open=True, limit_s=None)
    states = {0: "sleeping", 1: "stopped"}
    assert detector.check(now_s, states) is None
    frozen = detector.check(now_s + 3.1, states)
    assert (frozen.rank, frozen.state) == (1, "T")


def test_a_rank_that_was_stopped_and_continued_in_time_is_not_frozen():
    detector, now_s = trained()
    detector.section(0, now_s, is_open=True, limit_s=None)
    assert detector.check(now_s, {0: "stopped"}) is None
    assert detector.check(now_s + 2, {0: "running"}) is None
    assert detector.check(now_s + 4, {0: "stopped"}) is None


def test_the_kernel_names_the_culprit_before_the_steps_do():
    detector, now_s = trained()
    detector.stepped(0, 6, 0.1, now_s)  # so rank 1 is behind, but rank 0 is the stopped one
    frozen = detector.check(now_s + 3.5, {0: "stopped", 1: "sleeping"})
    assert (frozen.rank, frozen.state, frozen.behind_at_step) == (0, "T", None)
    detector, now_s = trained()
    assert detector.check(now_s + 3.5, {0: "sleeping", 1: "disk-sleep"}).state == "D"


def test_the_rank_behind_is_the_culprit():
    detector, now_s = trained(ranks=4)
    for rank in (0, 1, 3):
        detector.stepped(rank, 6, 0.1, now_s)
    frozen = detector.check(now_s + 3.5, dict.fromkeys(range(4), "sleeping"))
    assert (frozen.rank, frozen.behind_at_step) == (2, 5)


def test_no_culprit_is_invented():
    detector, now_s = trained(ranks=2)
    assert detector.check(now_s + 3.5, {0: "sleeping", 1: "sleeping"}).rank is None
    detector, now_s = trained(ranks=2)
    assert detector.check(now_s + 3.5, {0: "stopped", 1: "stopped"}).rank is None


def test_a_rank_that_ended_is_not_waited_for():
    detector, now_s = trained(ranks=2)
    detector.finished(0)
    detector.finished(1)
    assert detector.check(now_s + 1000, {}) is None


def test_a_watcher_that_stood_still_blames_nobody():
    detector, now_s = trained()
    detector.resumed(1000.0)
    assert detector.check(now_s + 1002, {}) is None
    assert detector.check(now_s + 1004, {}) is not None
