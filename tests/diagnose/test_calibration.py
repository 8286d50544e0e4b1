"""Confidence rises with the evidence, and stays within what was measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.diagnose.explain.answer import STEPS, calibrated


def test_steps_rise_in_both():
    scores, shares = zip(*STEPS, strict=True)
    assert list(scores) == sorted(set(scores))
    assert list(shares) == sorted(shares)
    assert (scores[0], scores[-1]) == (0.0, 1.0)
    assert 0 <= shares[0] < shares[-1] <= 1


@pytest.mark.parametrize(("score", "share"), STEPS)
def test_at_a_step_it_is_what_was_measured(score, share):
    assert calibrated(score) == pytest.approx(share)


@given(st.floats(-1, 2), st.floats(-1, 2))
def test_more_evidence_is_never_less_sure(one, other):
    less, more = sorted((one, other))
    assert 0 <= calibrated(less) <= calibrated(more) <= 1


@given(st.floats(0, 1), st.floats(0, 1e-6))
def test_it_does_not_jump(score, little):
    assert calibrated(min(score + little, 1.0)) - calibrated(score) < 1e-4
