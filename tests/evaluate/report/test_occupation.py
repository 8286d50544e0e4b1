import random

import numpy as np
import pytest
from sample_evaluations import made_timeline

from holdfast.evaluate.report.occupation import OTHER_TASKS, covered, held, most_at_once, occupation
from holdfast.evaluate.types.timeline import Begin, End, EngineSpan, RequestSpan, timeline_of


def spans(draw, number):
    starts = [draw.randrange(0, 90) for _ in range(number)]
    return [
        RequestSpan(engine=0, task=0, sample=0, t0=float(t), t1=float(t + draw.randrange(0, 30)))
        for t in starts
    ]


@pytest.mark.parametrize("seed", range(20))
def test_slices_count_as_second_by_second_counting_does(seed):
    draw = random.Random(seed)
    some, edges = spans(draw, draw.randrange(1, 25)), np.linspace(0, 120, 13)
    each_second = np.array([sum(one.t0 <= at < one.t1 for one in some) for at in range(120)])
    assert held(some, edges) == pytest.approx(each_second.reshape(12, 10).mean(axis=1))
    assert covered(some, edges) == pytest.approx((each_second > 0).reshape(12, 10).mean(axis=1))
    assert most_at_once(some) == each_second.max()


def test_nothing_covers_nothing():
    assert covered([], np.array([0.0, 1.0, 2.0])).tolist() == [0.0, 0.0]
    assert most_at_once([]) == 0


def test_time_at_several_requests_counts_once_and_is_shared_out():
    found = occupation(
        timeline_of(
            [
                Begin(started_at_s=0.0, suite="s", tasks=["a", "b"]),
                EngineSpan(what="load", engine=3, node=0, t0=0.0, t1=4.0),
                EngineSpan(what="serve", engine=3, node=0, t0=4.0, t1=10.0),
                EngineSpan(what="lost", engine=7, node=0, t0=5.0, t1=6.0),
                RequestSpan(engine=3, task=0, sample=0, t0=4.0, t1=8.0),
                RequestSpan(engine=3, task=0, sample=1, t0=4.0, t1=6.0),
                RequestSpan(engine=3, task=1, sample=0, t0=6.0, t1=8.0),
                RequestSpan(engine=7, task=1, sample=1, t0=6.0, t1=7.0),
                End(state="done", t1=10.0),
            ]
        ),
        slices=5,
    )
    assert found.engines == (3, 7)
    assert found.kinds == ("load", "swap", "lost", "idle", "a", "b")
    by_kind = dict(zip(found.kinds, found.shares[0], strict=True))
    assert by_kind["load"].tolist() == [1, 1, 0, 0, 0]
    assert by_kind["a"].tolist() == [0, 0, 1, 0.5, 0]
    assert by_kind["b"].tolist() == [0, 0, 0, 0.5, 0]
    assert by_kind["idle"].tolist() == [0, 0, 0, 0, 1]
    assert found.shares[1][found.kinds.index("b")].tolist() == [0, 0, 0, 0.5, 0]
    assert found.seconds() == pytest.approx(
        {"load": 4, "swap": 0, "lost": 1, "idle": 2, "a": 3, "b": 2}
    )


def test_every_second_that_an_engine_was_there_is_accounted_for():
    timeline = made_timeline(engines=5, samples=200, seed=3)
    found = occupation(timeline, slices=97)
    there_s = {}
    for engine in found.engines:
        mine = [one for one in (*timeline.engines, *timeline.requests) if one.engine == engine]
        there_s[engine] = max(one.t1 for one in mine) - min(one.t0 for one in mine)
    slice_s = np.diff(found.edges_s)
    for row, engine in enumerate(found.engines):
        # Random requests and swaps may overlap and count twice, so a slice can exceed its length.
        assert (found.shares[row].sum(axis=0) @ slice_s) == pytest.approx(there_s[engine], rel=0.05)
    assert found.shares.min() >= 0


def test_small_tasks_are_one():
    found = occupation(made_timeline(samples=400, tasks=30), slices=10)
    assert len(found.kinds) == 4 + 7
    assert found.kinds[-1] == OTHER_TASKS
    few = occupation(made_timeline(samples=400, tasks=5), slices=10)
    assert OTHER_TASKS not in few.kinds
