"""Write the HTML page of a recording, and build its JSON object."""

from pathlib import Path
from typing import Any

from holdfast.core.page import template, write_page
from holdfast.profile.report import charts, view
from holdfast.profile.report.summary import ProfileSummary

TEMPLATES = Path(__file__).parent / "templates"
CLOSE_UP_STEPS = 2
"""The number of steps that the close-up chart shows."""


def write_report(
    path: Path, summary: ProfileSummary, compared: ProfileSummary | None = None
) -> None:
    """Write an HTML page about a recording, and optionally compare a second recording with it.

    The page is self-contained: it loads nothing from the network and runs no script. Equal
    recordings give equal bytes.

    Args:
        path: the file to write; its folder is created if needed.
        summary: the recording.
        compared: a second recording to compare; None for a page about one recording.

    Raises:
        HoldfastError: jinja2 or matplotlib is not installed.
        OSError: the page could not be written; an earlier file at `path` is unchanged.
    """
    write_page(path, render(summary, compared))


def render(summary: ProfileSummary, compared: ProfileSummary | None = None) -> str:
    """Return the HTML page as text; see `write_report`."""
    other = None
    if compared is not None:
        other = {
            "name": compared.name,
            "rows": view.comparison(summary, compared),
            "charts": _both(charts.side_by_side, "beside", summary, compared),
            "missing": compared.missing,
            "memory": _both(charts.memory_by_rank, "memory-other", compared),
        }
    close_up = close_up_ns(summary)
    return template(TEMPLATES / "profile.html.j2").render(
        summary=summary,
        headline=view.headline(summary),
        context=view.context(summary),
        key_figures=view.key_figures(summary),
        activity=_both(charts.activity, "activity", summary),
        close_up=_both(charts.activity, "close-up", summary, window_ns=close_up)
        if close_up
        else [],
        legend=charts.legend(summary),
        valleys=view.valley_bars(summary),
        longest=view.longest_valleys(summary),
        phases=view.phase_bars(summary),
        memory_time=_both(charts.memory_over_time, "memory-time", summary),
        memory_rank=_both(charts.memory_by_rank, "memory-rank", summary),
        memory_rows=view.memory_rows(summary),
        kinds=[
            (kind, name)
            for kind, name in charts.KINDS.items()
            if any(one.theory and one.theory.by_kind()[kind] for one in summary.memory)
        ],
        formulas=view.formulas(summary),
        sources=view.sources(summary),
        phase_names=charts.PHASE_COLOURS,
        memory_names=list(charts.KINDS),
        other=other,
    )


def close_up_ns(summary: ProfileSummary) -> tuple[int, int] | None:
    """Return the start and end of the middle steps in Unix ns.

    Returns:
        The start and end; None if the run has too few steps for a close-up to add anything.
    """
    steps = summary.steps
    if len(steps) < CLOSE_UP_STEPS + 2:
        return None
    first = (len(steps) - CLOSE_UP_STEPS) // 2
    return steps[first].start_ns, steps[first + CLOSE_UP_STEPS - 1].end_ns


def _both(draw: Any, name: str, *arguments: Any, **options: Any) -> list[tuple[str, Any]]:
    """Draw a chart twice, for a wide and for a narrow screen; empty if there is no data to draw."""
    from markupsafe import Markup

    drawn = []
    for width, narrow in (("wide", False), ("narrow", True)):
        svg = draw(*arguments, name=f"{name}-{width}", narrow=narrow, **options)
        if svg is not None:
            drawn.append((width, Markup(svg)))  # safe: drawn by matplotlib, with an escaped label
    return drawn


def as_json(summary: ProfileSummary) -> dict[str, Any]:
    """Return the object that `profile.schema.json` describes, except `schema` and `version`."""
    speed, use, energy = summary.speed, summary.utilization, summary.energy
    return {
        "name": summary.name,
        "start_s": summary.start_ns / 1e9,
        "wall_s": summary.wall_s,
        "ranks": summary.recording.ranks,
        "speed": speed
        and {
            "steps": speed.steps,
            "median_step_s": speed.median_step_s,
            "tokens_a_step": speed.tokens_a_step,
            "tokens_per_s": speed.tokens_per_s,
            "source": speed.source,
        },
        "utilization": use
        and {
            "mfu_causal": use.mfu_causal,
            "mfu_full": use.mfu_full,
            "hfu_causal": use.hfu_causal,
            "hfu_full": use.hfu_full,
            "tokens_per_s_per_gpu": use.tokens_per_s_per_gpu,
            "peak_tflops": use.peak.tflops,
            "peak_source": use.peak.source,
        },
        "phases": [
            {
                "phase": phase.name,
                "seconds": phase.seconds,
                "share": phase.share,
                "idle_share": phase.idle_share,
            }
            for phase in summary.phases
        ],
        "idle": {
            "metric": summary.valleys.metric,
            "median_percent": summary.valleys.median,
            "watched_s": summary.valleys.watched_s,
            "share": summary.idle_share,
            "seconds_by_cause": summary.valleys.seconds_by_cause(),
            "valleys": [
                {
                    "node": one.node,
                    "device": one.device,
                    "rank": one.rank,
                    "start_s": one.start_ns / 1e9,
                    "seconds": one.seconds,
                    "cause": one.cause,
                    "detail": one.detail,
                    "covered": one.covered,
                }
                for one in summary.valleys.found
            ],
        },
        "memory": [
            {
                "rank": one.rank,
                "stage": one.stage,
                "peak_bytes": one.peak_bytes,
                "reserved_bytes": one.reserved_bytes,
                "theory_bytes": one.theory and one.theory.by_kind(),
                "residual_bytes": one.residual_bytes,
            }
            for one in summary.memory
        ],
        "energy": energy
        and {
            "joules": energy.joules,
            "joules_a_step": energy.joules_a_step,
            "gpus": energy.gpus,
            "source": energy.source,
        },
        "sources": [
            {"metric": metric, "unit": unit, "source": source, "interval_s": float(interval[:-2])}
            for metric, unit, source, interval in view.sources(summary)
        ],
        "missing": list(summary.missing),
    }
