"""Iterations of jobs that nothing instruments."""

from collections.abc import Sequence

import pytest

from holdfast.profile import Recording, Series, Span
from holdfast.profile.iterations import (
    Iteration,
    from_lines,
    from_utilisation,
    iterations_of,
    step_of,
    typical_s,
)

S = 1_000_000_000


def utilisation(values: Sequence[float], metric: str = "gpu_utilization") -> Series:
    return Series(
        metric=metric,
        unit="%",
        source="nvml",
        node="n",
        device=0,
        rank=None,
        interval_s=1.0,
        times_ns=[second * S for second in range(len(values))],
        values=values,
    )


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 12 loss 3.1", 12),
        ("[2026-01-01 10:00:00] iteration       12/  100000 | consumed samples: 24", 12),
        ('{"global_step": 12, "loss": 1.0}', 12),
        ("{'step': 12, 'loss': 2}", 12),
        ("Step: 12 | loss 2.1", 12),
        ("iter=12", 12),
        ("stepping stone 12", None),
        ("loss 12", None),
    ],
)
def test_a_line_names_its_step(line: str, step: int | None) -> None:
    assert step_of(line) == step


def test_lines_of_every_tenth_step_give_the_time_of_a_step() -> None:
    lines = [(second * S, 10 * second) for second in range(5)]

    found = from_lines(lines)

    assert [one.steps for one in found] == [10, 10, 10, 10]
    assert typical_s(found) == 0.1


def test_a_step_that_is_named_again_or_goes_back_is_no_iteration() -> None:
    lines = [(1 * S, 1), (2 * S, 2), (3 * S, 2), (4 * S, 3), (9 * S, 1), (10 * S, 2)]

    found = from_lines(lines)

    assert [(one.start_ns // S, one.end_ns // S, one.last_step) for one in found] == [
        (1, 2, 2),
        (2, 4, 3),
        (9, 10, 2),
    ]


def test_utilisation_alone_shows_iterations() -> None:
    work, rest = [95.0] * 100, [3.0] * 40

    found = from_utilisation(utilisation([*rest, *work, *rest, *work, *rest, *work]))

    assert found == [
        Iteration(start_ns=40 * S, end_ns=139 * S),
        Iteration(start_ns=180 * S, end_ns=279 * S),
    ]


def test_short_rests_and_short_work_are_noise() -> None:
    work, short_rest, rest = [95.0] * 50, [3.0] * 20, [3.0] * 40

    assert from_utilisation(utilisation([*work, *short_rest, *work, *rest])) == [
        Iteration(start_ns=0, end_ns=119 * S)
    ]
    assert from_utilisation(utilisation([*work, *rest, *work, *rest])) == []


def test_phases_show_iterations_before_the_log_and_the_log_before_counters() -> None:
    def span(phase: str, start: int, end: int, step: int) -> Span:
        return Span(phase=phase, start_ns=start * S, end_ns=end * S, step=step, rank=0, node="n")

    series = utilisation([*[95.0] * 100, *[3.0] * 40], "gpu_sm_active")
    phases = (span("forward", 0, 1, 1), span("optimizer", 1, 3, 1), span("forward", 3, 4, 2))

    assert iterations_of(Recording(series=(series,))) == (
        [Iteration(start_ns=0, end_ns=99 * S)],
        "gpu_sm_active",
    )
    found, shown_by = iterations_of(Recording(series=(series,), spans=phases))
    assert (found[0].end_ns, found[1].last_step, shown_by) == (3 * S, 2, "phases")
    assert iterations_of(Recording(spans=(span("step", 0, 2, 5),)))[1] == "log"
    assert iterations_of(Recording()) == ([], "")
    assert typical_s([]) is None


def test_time_between_phases_is_part_of_a_step_but_a_gap_in_the_steps_is_not() -> None:
    def stall(at: int, step: int) -> Span:
        return Span(
            phase="checkpoint_stall",
            start_ns=at * S,
            end_ns=at * S + 1,
            step=step,
            rank=0,
            node="n",
        )

    phases = tuple(stall(at, step) for at, step in [(0, 1), (5, 2), (10, 3), (90, 7), (95, 8)])
    found, shown_by = iterations_of(Recording(spans=phases))

    assert shown_by == "phases"
    assert [one.end_ns - one.start_ns for one in found] == [5 * S, 5 * S, 1, 5 * S, 1]
    assert typical_s(found) == 5
