"""Idle valleys and their causes, over recordings made by hand."""

import pytest

from holdfast.profile.incidents import IncidentMark
from holdfast.profile.recording import MemoryUse, Recording, Series, Span
from holdfast.profile.valleys import find_valleys, flattened, idle_times, phases_of_rank

SECOND = 1_000_000_000


def series(values, *, metric="gpu_sm_active", device=0, rank=None, node="a", times=None):
    times = list(range(1, len(values) + 1)) if times is None else times
    return Series(
        metric=metric, unit="%", source="gpm", node=node, device=device, rank=rank, interval_s=1.0,
        times_ns=[at * SECOND for at in times], values=values,
    )  # fmt: skip


def span(phase, start, end, *, rank=0, step=1, node="a"):
    return Span(
        phase=phase, start_ns=round(start * SECOND), end_ns=round(end * SECOND), step=step, rank=rank, node=node
    )  # fmt: skip


def recording(*series, spans=(), incidents=(), memory=()):
    return Recording(
        series=series,
        spans=tuple(sorted(spans, key=lambda one: (one.rank, one.start_ns, -one.end_ns))),
        incidents=incidents,
        memory=memory,
    )


def causes(*arguments, **options):
    return [
        (valley.start_ns // SECOND, valley.end_ns // SECOND, valley.cause)
        for valley in find_valleys(recording(*arguments, **options)).found
    ]


def test_a_valley_is_two_samples_below_a_tenth_of_the_median():
    assert causes(series([50, 4.9, 50, 4.9, 4.9, 50, 50, 50, 5, 5, 50, 50])) == [(3, 5, "unknown")]
    assert causes(series([0.2, 0.2, 50, 50, 50])) == [(0, 2, "unknown")]
    assert causes(series([50, 50, 50, 0, 0, 0])) == [(3, 6, "unknown")]


def test_a_run_that_idles_for_most_of_its_time_has_valleys():
    found = find_valleys(recording(series([0, 0, 0, 0, 60, 0, 0, 0])))
    assert found.median == 60
    assert sum(valley.seconds for valley in found.found) == 7
    assert find_valleys(recording(series([0, 0, 0]))).found == ()


def test_the_cause_is_the_phase_that_covers_most():
    idle = series([80, 80, 0, 0, 0, 80, 80])
    spans = [span("forward", 0, 2.5), span("checkpoint_stall", 2.5, 4.6), span("data", 4.6, 5)]
    assert causes(idle, spans=spans) == [(2, 5, "checkpoint_stall")]
    found = find_valleys(recording(idle, spans=spans)).found[0]
    assert found.covered == pytest.approx(2.1 / 3)
    assert (found.rank, found.device) == (0, 0)


def test_what_no_phase_covers_is_unknown_and_counted():
    idle = series([80, 0, 0, 0, 80, 80, 0, 0, 80])
    found = find_valleys(recording(idle, spans=[span("data", 1, 2.2), span("data", 5.9, 8.1)]))
    assert found.seconds_by_cause() == {"data": 2.0, "unknown": 3.0}
    assert list(found.seconds_by_cause())[-1] == "unknown"
    assert found.watched_s == 9.0


def test_a_phase_counts_in_front_of_the_one_that_it_lies_inside():
    idle = series([80, 0, 0, 0, 80])
    spans = [span("backward", 0, 5), span("communication", 1.2, 3.8)]
    assert causes(idle, spans=spans) == [(1, 4, "communication")]


def test_an_incident_counts_in_front_of_phases():
    struck = IncidentMark(
        incident_id=7, kind="exit", reason="ECCError", start_ns=1 * SECOND, end_ns=3 * SECOND, rank=0, step=1
    )  # fmt: skip
    idle = series([80, 0, 0, 0, 80])
    found = find_valleys(recording(idle, spans=[span("data", 0, 5)], incidents=(struck,))).found
    assert [(one.cause, one.detail) for one in found] == [("incident", "7: ECCError")]


def test_an_incident_that_never_ended_lasts_to_the_end():
    struck = IncidentMark(
        incident_id=1, kind="hang", reason="", start_ns=2 * SECOND, end_ns=None, rank=None, step=1
    )  # fmt: skip
    found = find_valleys(recording(series([80, 80, 0, 0, 0, 0]), incidents=(struck,))).found
    assert [(one.cause, one.detail, one.covered) for one in found] == [("incident", "1: hang", 1.0)]


def test_gaps_inside_a_step_of_a_pipeline_are_its_bubble():
    idle = series([80, 0, 0, 80, 80, 0, 0, 80])
    spans = [span("forward", 0, 1), span("backward", 3, 5), span("forward", 7, 8, step=2)]
    found = find_valleys(recording(idle, spans=spans), pipeline=True)
    assert [one.cause for one in found.found] == ["pipeline_bubble", "unknown"]
    assert find_valleys(recording(idle, spans=spans)).seconds_by_cause() == {"unknown": 4.0}


def test_a_device_belongs_to_its_local_rank_and_a_node_to_all():
    spans = [span("data", 1, 3, rank=4), span("evaluation", 1, 3, rank=5)]
    idle = [80, 0, 0, 80]
    assert causes(series(idle, device=1), spans=spans) == [(1, 3, "evaluation")]
    assert causes(series(idle, rank=4), spans=spans) == [(1, 3, "data")]
    both = find_valleys(recording(series(idle, metric="cpu_utilization", device=None), spans=spans))
    assert both.found[0].covered == 0.5
    assert both.found[0].rank is None


def test_the_best_utilisation_there_is_is_used():
    plain = series([90, 0, 0, 90], metric="gpu_utilization")
    host = series([50, 50, 50, 50], metric="cpu_utilization", device=None)
    assert find_valleys(recording(host, plain)).metric == "gpu_utilization"
    assert find_valleys(recording(host)).metric == "cpu_utilization"
    assert find_valleys(recording()).metric is None
    silent = MemoryUse(
        at_ns=1, step=1, rank=0, node="a", allocated_bytes=1, reserved_bytes=1, peak_bytes=1
    )
    assert find_valleys(recording(plain, memory=(silent,))).found[0].rank == 0


def test_a_gap_without_samples_is_no_valley():
    gap = series([80, 0, 0, 80, 80], times=[1, 2, 20, 21, 22])
    assert idle_times(gap, 8.0) == []
    assert find_valleys(recording(gap)).watched_s == 5.0


def test_a_span_of_which_the_inside_is_unknown_is_no_cause():
    assert causes(series([80, 0, 0, 80]), spans=[span("step", 0, 4)]) == [(1, 3, "unknown")]


def test_flattened_intervals_do_not_overlap_and_keep_the_inner_one():
    found = flattened([(0, 10, "a"), (2, 4, "b"), (3, 4, "c"), (8, 11, "d"), (12, 13, "a")])
    assert [(one.start_ns, one.end_ns, one.label) for one in found] == [
        (0, 2, "a"), (2, 3, "b"), (3, 4, "c"), (4, 8, "a"), (8, 11, "d"), (12, 13, "a"),
    ]  # fmt: skip
    assert phases_of_rank([]) == []
