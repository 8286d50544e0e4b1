"""Write advice as an HTML page: the settings, the tornado, and the expected use of the time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.core.accounting import LOST_CAUSES
from holdfast.core.page import KeyFigure, template, time_bars, write_page
from holdfast.core.words import plainly
from holdfast.simulate.pretrain.plan import Advice, Swing

TEMPLATE: Final = Path(__file__).parent / "templates" / "plan.html.j2"


@dataclass(frozen=True, kw_only=True)
class _Bar:
    """One bar of the tornado; `left` and `width` are CSS percentages of the width of the row."""

    key: str
    left: str
    width: str


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One input of the tornado; the numbers are percentage points of the ETTR."""

    name: str
    half: str
    twice: str
    noise: str
    bars: tuple[_Bar, _Bar]


def write_plan(path: Path, advice: Advice) -> None:
    """Write the page to `path`.

    Raises:
        HoldfastError: jinja2 is not installed.
        OSError: the page could not be written; an earlier file at `path` is left unchanged.
    """
    filled = template(TEMPLATE)
    one, records, ettr = advice.scenario, advice.records, advice.answer.ettr
    mean, people = advice.mean_time_to_failure_h, advice.answer.interventions
    figures = [
        KeyFigure("ETTR", f"{ettr.mean:.1%}", f"{ettr.low:.1%} to {ettr.high:.1%}"),
        KeyFigure("failure every", f"{mean.mean:.3g} h", f"{mean.low:.3g} to {mean.high:.3g} h"),
        KeyFigure(
            "people needed", f"{people.mean:.1f} times", f"{people.low:.0f} to {people.high:.0f}"
        ),
        KeyFigure("failures", f"{advice.answer.failures.mean:.1f}", "simulated, mean"),
    ]
    settings = [
        ("save every", f"{advice.interval_s:.0f} s"),
        ("spare nodes", str(advice.spares)),
        ("hang, at least", f"{advice.hang_floor_s:.0f} s"),
        ("first step, at most", f"{advice.first_step_limit_s:.0f} s"),
    ]
    hours = advice.answer.gpu_hours_by_class()
    times = time_bars(
        [
            (name, name.replace("_", " "), words, hours[name] * 3600.0)
            for name, words in LOST_CAUSES.items()
            if name in hours
        ]
    )
    write_page(
        path,
        filled.render(
            headline=f"{one.gpus:,} GPUs for {one.days:g} days",
            context=(
                f"From {plainly(records.runs, 'run')} with {plainly(len(records.reasons), 'failure')} in "
                f"{records.job_days:.3g} days of training."
            ),
            key_figures=figures,
            settings=settings,
            command=f"holdfast run {advice.flags} -- COMMAND",
            tornado=_rows(advice.swings),
            times=times,
            source=f"Rates: {one.rates.source}.",
            assumed=", ".join(advice.assumed),
        ),
    )


def _rows(swings: Sequence[Swing]) -> list[_Row]:
    widest = max((abs(end) for one in swings for end in (one.half, one.twice)), default=0.0) or 1.0
    return [
        _Row(
            name=one.name,
            half=f"{one.half * 100:+.2f}",
            twice=f"{one.twice * 100:+.2f}",
            noise=f"{one.noise * 100:.2f}",
            bars=(_bar("half", one.half / widest), _bar("twice", one.twice / widest)),
        )
        for one in swings
    ]


def _bar(key: str, part: float) -> _Bar:
    width = abs(part) * 50
    return _Bar(key=key, left=f"{50 - width if part < 0 else 50:.2f}%", width=f"{width:.2f}%")
