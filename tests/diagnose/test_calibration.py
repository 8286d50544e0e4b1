"""Test that confidence rises with the support, and stays within the measurable range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.diagnose import diagnose
from holdfast.diagnose.explain.confidence import Support, sureness

SHARES = st.floats(0, 1)
MARGINS = st.floats(-4, 4)


def sure(rule, margin, most=1.0):
    return sureness(Support(rule=rule, margin=margin, most=most))


@given(SHARES, SHARES, MARGINS, MARGINS)
def test_more_support_is_never_less_sure(rule, other_rule, margin, other_margin):
    less = sure(min(rule, other_rule), min(margin, other_margin))
    more = sure(max(rule, other_rule), max(margin, other_margin))
    assert 0.02 <= less <= more <= 0.98


@given(SHARES, MARGINS, SHARES)
def test_nothing_is_surer_than_its_limit(rule, margin, most):
    assert sure(rule, margin, most) <= most


@given(SHARES, MARGINS, st.floats(0, 1e-6))
def test_it_does_not_jump(rule, margin, little):
    assert sure(min(rule + little, 1.0), margin) - sure(rule, margin) < 1e-3


def test_a_general_rule_is_in_doubt_where_a_special_one_is_not():
    """Test a class such as RuntimeError, which is correct in one of two cases."""
    assert 0.4 < sure(0.65, 3.9) < 0.7
    assert sure(0.85, 3.9) > 0.95


@pytest.mark.parametrize("ranks", [4, 128])
def test_a_timeout_that_all_peers_report_never_makes_sure(tmp_path, ranks):
    said = (
        "[rank{0}]:[E1121 01:54:30.1 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600043 milliseconds"
    )
    (tmp_path / "job.log").write_text("".join(f"{said.format(rank)}\n" for rank in range(ranks)))
    assert 0.5 < diagnose(tmp_path / "job.log").confidence < 0.8
