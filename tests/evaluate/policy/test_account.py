"""Check that every engine-second is counted once."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.evaluate.policy import account as words
from holdfast.evaluate.policy.account import account
from holdfast.evaluate.types.engine import Curve
from holdfast.evaluate.types.timeline import (
    Begin,
    End,
    EngineSpan,
    JudgeSpan,
    MetricSpan,
    NodeSpan,
    RequestSpan,
    timeline_of,
)

CURVE = Curve(
    prefill_tokens_per_s=1000.0, request_s=0.0, step_base_s=1.0, step_sequence_s=0.0, max_batch=4
)
TIMES = st.integers(0, 40).map(lambda quarter: quarter / 4)


@st.composite
def spans(draw, kind, **fixed):
    begin = draw(TIMES)
    return kind(
        t0=begin, t1=begin + draw(TIMES), **{name: draw(values) for name, values in fixed.items()}
    )


SMALL = st.integers(0, 2)
LINES = st.lists(
    st.one_of(
        spans(EngineSpan, what=st.sampled_from(("load", "swap", "serve", "lost")), engine=SMALL, node=SMALL),
        spans(
            RequestSpan, engine=SMALL, task=SMALL, sample=SMALL, prompt_tokens=st.integers(0, 5000),
            new_tokens=st.integers(0, 30), error=st.sampled_from(("", "no")),
        ),
        spans(MetricSpan, node=SMALL, task=SMALL, sample=SMALL),
        spans(JudgeSpan, task=SMALL, sample=SMALL),
        spans(NodeSpan, what=st.sampled_from(("here", "fetch")), node=SMALL),
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(lines=LINES, with_curve=st.booleans(), end=st.one_of(st.none(), TIMES))
def test_the_parts_add_up_whatever_happened(lines, with_curve, end):
    ended = [] if end is None else [End(state="done", t1=end)]
    timeline = timeline_of([Begin(started_at_s=0.0, suite="s", tasks=[]), *lines, *ended])
    found = account(timeline, CURVE if with_curve else {})
    assert set(found.seconds) == set(words.CATEGORIES)
    assert math.isclose(sum(found.seconds.values()), found.engines * found.makespan_s, abs_tol=1e-6)
    assert all(part_s >= -1e-9 for part_s in found.seconds.values())


def test_each_part_by_hand():
    timeline = timeline_of(
        [
            NodeSpan(what="fetch", node=0, t0=0.0, t1=3.0),
            EngineSpan(what="load", engine=0, node=0, t0=1.0, t1=5.0),
            EngineSpan(what="serve", engine=0, node=0, t0=5.0, t1=30.0),
            RequestSpan(engine=0, task=0, sample=0, new_tokens=8, t0=6.0, t1=14.0),
            RequestSpan(engine=0, task=0, sample=1, new_tokens=4, t0=6.0, t1=10.0),
            RequestSpan(
                engine=0, task=0, sample=2, new_tokens=2, t0=16.0, t1=18.0, error="it broke"
            ),
            MetricSpan(node=0, task=0, sample=0, t0=14.0, t1=30.0),
            End(state="done", t1=30.0),
        ]
    )
    found = account(timeline, CURVE)
    assert {name: part_s for name, part_s in found.seconds.items() if part_s} == {
        words.ABSENT: 1.0,
        words.WEIGHTS: 2.0,
        words.START: 2.0,
        words.BEFORE: 1.0,
        words.USEFUL: 3.0,
        words.REDONE: 0.5,
        words.UNDERFILLED: 6.5,
        words.BETWEEN: 2.0,
        words.TAIL_METRIC: 12.0,
    }
    assert found.share(words.USEFUL) == pytest.approx(0.1)
    assert [(step.what, step.t0, step.t1) for step in found.path] == [
        ("load", 1.0, 5.0), ("request", 6.0, 14.0), ("metric", 14.0, 30.0),
    ]  # fmt: skip
    assert found.path[1].waited_s == 1.0


def test_a_batch_of_one_place_is_full_whatever_the_curve_makes_of_it():
    slow = RequestSpan(
        engine=0, model=0, task=0, sample=0, prompt_tokens=10, new_tokens=1, t0=0.0, t1=8.0
    )
    timeline = timeline_of(
        [Begin(started_at_s=0.0, suite="s", tasks=["a"]), slow, End(state="done", t1=8.0)]
    )
    one_place = Curve(
        prefill_tokens_per_s=1000.0,
        request_s=0.0,
        step_base_s=1.0,
        step_sequence_s=0.0,
        max_batch=1,
    )
    assert account(timeline, one_place).seconds[words.USEFUL] == 8.0
    assert account(timeline, CURVE).seconds[words.UNDERFILLED] > 7.0
