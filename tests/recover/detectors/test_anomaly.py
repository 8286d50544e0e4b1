"""A broken loss is found within a few steps, and noise is not taken for one."""

import math
import random

import pytest

from holdfast.recover.detectors.anomaly import (
    MIN_STEPS,
    NEVER_FINITE_STEPS,
    NOT_FINITE_STEPS,
    SPIKE_STEPS,
    Anomaly,
    AnomalyDetector,
)

NAN, INF = math.nan, math.inf


def found_in(losses, detector=None, *, first_step=1):
    """The first anomaly in the losses of one rank, None where there is none."""
    detector = detector or AnomalyDetector()
    for step, loss in enumerate(losses, first_step):
        found = detector.look(0, step, loss, leads=True)
        if found is not None:
            return found
    return None


def ordinary(steps=MIN_STEPS, *, level=2.0, noise=0.05, seed=0):
    source = random.Random(seed)
    return [source.gauss(level, noise) for _ in range(steps)]


def test_two_steps_in_a_row_that_are_not_finite_are_an_anomaly():
    found = found_in([2.5, 2.4, NAN, INF])
    assert (found.kind, found.first_step, found.step) == ("not finite", 3, 4)
    assert (found.value, found.usual) == (INF, None)
    assert NOT_FINITE_STEPS == 2


def test_an_exploding_loss_begins_with_its_first_high_step():
    """The steps before the first one that is not finite show the broken state already."""
    found = found_in([*ordinary(100), 1.9e6, 1.2e18, INF, INF])
    assert (found.kind, found.first_step, found.step) == ("not finite", 101, 104)
    assert found_in([*ordinary(100), 9.0, *ordinary(1), INF, NAN]).first_step == 103, (
        "an ordinary step ends what was high"
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_an_exploding_loss_is_found_in_the_warm_up_too(sign):
    falling = [sign * 3.0 / step for step in range(1, 21)]
    assert found_in([*falling, 7.0, 1e9, 1e8, NAN, NAN]).first_step == 21
    assert found_in([*falling, NAN, NAN]).first_step == 21
    assert found_in([1.0, NAN, NAN]).first_step == 2


def test_a_single_step_that_is_not_finite_is_none():
    """A script that leaves out such a step may report its loss."""
    assert found_in([2.5, NAN, 2.4, INF, 2.3] * 50) is None


def test_all_ranks_at_one_step_are_one_step():
    """If the loss is the mean of all ranks, each rank reports that the script left out the step."""
    detector = AnomalyDetector()
    for step, loss in enumerate([2.0, NAN, 2.0, NAN, 2.0], 1):
        for rank in range(4):
            assert detector.look(rank, step, loss, leads=rank == 0) is None


@pytest.mark.parametrize(
    ("first", "others", "named"),
    [
        ({1: NAN}, 3, 1),
        ({1: NAN, 2: NAN}, 3, None),
        ({0: NAN, 1: NAN, 2: NAN}, 3, None),
        ({0: NAN}, 1, None),
    ],
)
def test_a_rank_whose_loss_alone_was_not_finite_at_first_is_named(first, others, named):
    """One step later the summed gradients have reached all ranks."""
    detector = AnomalyDetector()
    found = None
    for step, losses in enumerate([{}, {}, first, dict.fromkeys(range(others), NAN)], 1):
        for rank in range(others):
            found = found or detector.look(rank, step, losses.get(rank, 2.0), leads=rank == 0)
    assert (found.first_step, found.rank) == (3, named)


def test_the_first_rank_of_an_explosion_that_all_ranks_showed_is_not_named():
    detector = AnomalyDetector()
    found = None
    for step, loss in enumerate([*ordinary(100), 1.9e6, 1.2e18, INF, INF], 1):
        for rank in range(2):
            shown = 1e30 if rank == 0 and step == 103 else loss
            found = found or detector.look(rank, step, shown, leads=rank == 0)
    assert (found.first_step, found.rank) == (101, None)


def test_a_rank_that_does_not_lead_is_enough_where_it_goes_on():
    detector = AnomalyDetector()
    for step, loss in enumerate([2.0, NAN, NAN], 1):
        assert detector.look(0, step, 2.0, leads=True) is None
        found = detector.look(1, step, loss, leads=False)
    assert (found.first_step, found.step) == (2, 3)


def test_a_stage_of_a_pipeline_without_a_loss_may_report_nan():
    detector = AnomalyDetector()
    for step in range(1, 10):
        assert detector.look(0, step, NAN, leads=True) is None
        assert detector.look(3, step, 2.0, leads=False) is None


def test_a_loss_that_is_nan_from_the_first_step_is_an_anomaly():
    detector = AnomalyDetector()
    for step in range(1, NEVER_FINITE_STEPS):
        for rank in range(2):
            assert detector.look(rank, step, NAN, leads=rank == 0, ranks=lambda: {0, 1}) is None
            assert not detector.is_calm, "no loss shows that the state is healthy"
            assert detector.not_finite_since == 1
    found = detector.look(0, NEVER_FINITE_STEPS, NAN, leads=True, ranks=lambda: {0, 1})
    assert (found.kind, found.first_step, found.step) == ("not finite", 1, NEVER_FINITE_STEPS)
    assert found.rank is None


def test_the_step_since_which_a_loss_is_broken_is_kept_over_many_findings():
    detector = AnomalyDetector()
    found_in([2.0, 2.0, *[NAN] * 5], detector)
    for step in range(4, 60):
        detector.look(0, step, NAN, leads=True)
    assert detector.not_finite_since == 3
    detector.look(0, 60, 2.0, leads=True)
    assert detector.not_finite_since is None


def test_the_first_finite_loss_may_be_reported_late():
    detector = AnomalyDetector()
    for step in range(1, 50):
        assert detector.look(0, step, NAN, leads=True, ranks=lambda: {0, 1}) is None
    assert detector.look(1, 1, 2.0, leads=False) is None
    assert detector.not_finite_since is None
    for step in range(50, 100):
        assert detector.look(0, step, NAN, leads=True, ranks=lambda: {0, 1}) is None


def test_several_reports_of_a_step_are_one():
    detector = AnomalyDetector()
    assert found_in(ordinary(100), detector) is None
    assert [detector.look(0, 101, loss, leads=True) for loss in (NAN, NAN, 9.0)] == [None] * 3
    assert detector.look(0, 102, NAN, leads=True).kind == "not finite"


def test_a_script_that_counts_its_steps_anew_learns_anew():
    """As one that trains one model after the other."""
    detector = AnomalyDetector()
    assert found_in(ordinary(200, level=0.1, noise=0.01), detector) is None
    assert found_in(ordinary(200, level=2.0), detector) is None


def test_losses_of_which_most_are_zero_are_no_spike():
    source = random.Random(0)
    losses = [0.0 if source.random() < 0.9 else source.random() for _ in range(1000)]
    assert found_in([*losses, 0.5, 0.6, 0.7]) is None


def test_ranks_whose_losses_differ_are_no_spike():
    detector = AnomalyDetector()
    for step, loss in enumerate(ordinary(500), 1):
        for rank in range(4):
            assert detector.look(rank, step, loss + 10 * rank, leads=rank == 0) is None


@pytest.mark.parametrize("level", [2.0, 0.01, -3.0, 500.0])
def test_a_loss_that_jumps_and_stays_is_an_anomaly_at_the_third_step(level):
    before = ordinary(100, level=level, noise=abs(level) / 40)
    found = found_in([*before, *(level + abs(level) * rise for rise in (0.8, 1.0, 1.5))])
    assert (found.kind, found.first_step, found.step) == ("spike", 101, 103)
    assert SPIKE_STEPS == 3
    assert found.usual == pytest.approx(level, rel=0.05)
    assert found.usual < found.limit < found.value


def test_single_outliers_are_no_spike_and_do_not_change_what_is_usual():
    losses = [9.0 if step % 3 else loss for step, loss in enumerate(ordinary(600))]
    detector = AnomalyDetector()
    assert found_in(ordinary(), detector) is None
    assert found_in(losses, detector, first_step=100) is None
    assert found_in([4.0] * 3, detector, first_step=1000).usual == pytest.approx(2.0, rel=0.05)


def curve(kind, steps, seed):
    """Losses of a training in which nothing happens."""
    source, drift = random.Random(seed), 0.0
    for step in range(steps):
        base = 1.8 + 9.0 * math.exp(-step / 400)
        drift = 0.98 * drift + source.gauss(0, 0.01)
        noise = {
            "even": source.gauss(0, 0.05),
            "heavy tails": 0.05 * source.gauss(0, 1) / math.sqrt(source.gammavariate(1.5, 1 / 1.5)),
            "slow": drift + source.gauss(0, 0.02),
            "sawtooth": 0.3 * (step % 500) / 500 + source.gauss(0, 0.02),
            "other data": (0.35 if step // 700 % 2 else 0.0) + source.gauss(0, 0.01),
            "outliers": source.gauss(0, 0.03) + (3.0 if source.random() < 0.02 else 0.0),
        }[kind]
        yield base + noise


@pytest.mark.parametrize(
    "kind", ["even", "heavy tails", "slow", "sawtooth", "other data", "outliers"]
)
def test_noise_is_no_anomaly(kind):
    assert found_in(curve(kind, 4_000, seed=1)) is None


@pytest.mark.parametrize("seed", range(10))
def test_a_poisoned_training_is_found_three_steps_later(seed):
    source = random.Random(seed)
    at = source.randrange(1_000, 2_000)
    losses = list(curve("heavy tails", at, seed))
    losses += [loss + source.uniform(1.5, 6.0) for loss in curve("even", 10, seed=at)]
    found = found_in(losses)
    assert at < found.first_step <= found.step <= at + 2 + SPIKE_STEPS


@pytest.mark.parametrize("at", [100, 300, 900])
def test_a_loss_that_jumps_while_it_falls_fast_is_found(at):
    """Higher losses than the broken ones are among the last ordinary ones."""
    losses = list(curve("even", at, seed=at))
    found = found_in([*losses, *[1.5 * losses[-1]] * 5])
    assert (found.first_step, found.step) == (at + 1, at + 3)


def test_before_enough_steps_are_known_only_what_is_not_finite_counts():
    rising = [1.0 + step for step in range(MIN_STEPS - 1)]
    assert found_in(rising) is None
    assert found_in([*rising, NAN, NAN]).kind == "not finite"


def test_steps_that_are_made_again_are_learnt_again():
    detector = AnomalyDetector()
    assert found_in(ordinary(100), detector) is None
    assert found_in([9.0] * 3, detector, first_step=101).kind == "spike"
    detector.restarted(90)
    assert found_in(ordinary(10), detector, first_step=91) is None
    found = found_in([9.0] * 3, detector, first_step=101)
    assert isinstance(found, Anomaly)
    detector.restarted(10)
    assert found_in([9.0] * 3, detector, first_step=11) is None, "ten steps tell nothing"


def test_a_level_that_is_accepted_is_the_usual_one():
    detector = AnomalyDetector()
    assert found_in([*ordinary(100), 9.0, 9.0, 9.0], detector) is not None
    detector.accept()
    assert not detector.is_calm, "nothing would be seen"
    assert found_in(ordinary(500, level=9.0), detector, first_step=104) is None
    assert found_in([20.0] * 3, detector, first_step=604).kind == "spike"


def test_a_rank_without_a_loss_is_passed_over():
    assert AnomalyDetector().look(0, 1, None, leads=True) is None
