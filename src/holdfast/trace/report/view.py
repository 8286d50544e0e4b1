"""Compute everything that the template shows, from the report."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core import words
from holdfast.trace.analyses import SECTIONS
from holdfast.trace.analyses.result import Result
from holdfast.trace.analyses.selection import slug
from holdfast.trace.checks import NO_GPUS
from holdfast.trace.figures import export as drawing
from holdfast.trace.findings import Finding
from holdfast.trace.notes import Note
from holdfast.trace.report.embedded import embedded
from holdfast.trace.report.model import Entry, Progress, Read, Report
from holdfast.trace.report.overview import Overview, overviews
from holdfast.trace.report.tables import TableView, number, table_view

_YEAR_S = 365.25 * 86400


def answer(report: Report) -> str:
    """Return a sentence that states where the GPU time of each cluster went."""
    numbers = report.numbers
    said = [_sentence(read, numbers) for read in report.clusters if not read.compared]
    return " ".join(said) or "No job was read."


def _sentence(read: Read, numbers: Mapping[str, float]) -> str:
    key = slug(read.cluster.name)
    median_s = numbers.get(f"{key}.med_run_time_gpu_s", math.nan)
    completed = numbers.get(f"{key}.complete_rate_gpu_time", math.nan)
    jobs = words.plainly(read.gpu_jobs, "job")
    subject = f"{read.cluster.name} gave {_gpu_years(read.gpu_time_s)} of GPU time to {jobs}"
    parts = []
    if math.isfinite(median_s):
        parts.append(f"half of them ended within {words.duration(median_s)}")
    if math.isfinite(completed):
        parts.append(f"{words.percent(completed)} of that time went to jobs that completed")
    return f"{subject}; {', and '.join(parts)}." if parts else f"{subject}."


def _gpu_years(gpu_time_s: float) -> str:
    years = gpu_time_s / _YEAR_S
    if years < 0.1:
        return f"{gpu_time_s / 3600:,.3g}{words.NBSP}GPU-hours"
    return (
        f"{years:,.0f}{words.NBSP}GPU-years"
        if years >= 100
        else f"{years:,.2g}{words.NBSP}GPU-years"
    )


@dataclass(frozen=True)
class PanelView:
    """A panel as shown on the page."""

    key: str
    svg: str
    explorable: bool
    wide: bool


@dataclass(frozen=True)
class FigureView:
    """An analysis as shown on the page."""

    name: str
    title: str
    source: str
    caption: str = ""
    panels: list[PanelView] = field(default_factory=list)
    columns: int = 1
    drawing: str = ""
    """The whole figure as one SVG element, to be written as a file."""
    table: TableView | None = None
    left_out: str = ""


@dataclass(frozen=True)
class FindingView:
    """A finding as shown on the page."""

    key: str
    sentence: str
    value: str
    study: str
    verdict: str
    mark: str
    why: str
    source: str


@dataclass(frozen=True)
class ClusterView:
    """A cluster as shown on the page, with the facts about its records."""

    name: str
    compared: bool
    facts: list[tuple[str, str]]


@dataclass(frozen=True)
class SectionView:
    """A section of the page."""

    key: str
    name: str
    figures: list[FigureView]
    left_out: dict[str, list[FigureView]]
    """The figures that are left out, by reason."""


@dataclass(frozen=True)
class TraceView:
    """The content of the page."""

    title: str
    answer: str
    warnings: list[str]
    """Reasons to doubt the whole page; shown first."""
    overviews: list[Overview]
    clusters: list[ClusterView]
    notes_summary: str
    notes: list[Note]
    findings: list[FindingView]
    untold: list[FindingView]
    """Findings that this trace cannot answer."""
    findings_summary: str
    sections: list["SectionView"]
    methods: list[tuple[str, str]]
    data: str
    """The data of the explorable panels as JSON, escaped for a script element."""

    @property
    def drawings(self) -> dict[str, str]:
        """Return the drawing of each figure, by the figure's name."""
        return {
            figure.name: figure.drawing
            for section in self.sections
            for figure in section.figures
            if figure.drawing
        }


def page_view(report: Report, *, progress: Progress | None = None) -> TraceView:
    """Compute the content of the page for a report, and draw every figure.

    Raises:
        HoldfastError: matplotlib is not installed.
    """
    data: dict[str, Any] = {}
    figures: dict[str, list[FigureView]] = {section: [] for section in SECTIONS}
    for done, entry in enumerate(report.entries):
        if progress is not None:
            progress(f"drawing: {entry.analysis.title}", done, len(report.entries))
        figures.setdefault(entry.analysis.section, []).append(_figure(entry, data))
    return TraceView(
        title=report.title,
        answer=answer(report),
        warnings=[note.sentence for note in report.notes if note.check == NO_GPUS],
        overviews=overviews(report),
        clusters=[
            _cluster(read) for read in sorted(report.clusters, key=lambda read: read.compared)
        ],
        notes_summary=notes_summary(report.notes),
        notes=sorted(
            report.notes, key=lambda note: ("dropped", "mended", "kept").index(note.action)
        ),
        findings=[_finding(finding) for finding in report.findings if finding.holds is not None],
        untold=[_finding(finding) for finding in report.findings if finding.holds is None],
        findings_summary=_findings_summary(report.findings),
        sections=[
            _section(f"section-{place}", *found)
            for place, found in enumerate(figures.items(), 1)
            if found[1]
        ],
        methods=[*_methods(report), *report.parameters.items()],
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    )


def _section(key: str, name: str, figures: Sequence[FigureView]) -> SectionView:
    left_out: dict[str, list[FigureView]] = {}
    for figure in figures:
        if figure.left_out:
            left_out.setdefault(figure.left_out, []).append(figure)
    return SectionView(key, name, [figure for figure in figures if not figure.left_out], left_out)


def _figure(entry: Entry, data: dict[str, Any]) -> FigureView:
    analysis, result = entry.analysis, entry.result
    if result is None:
        return FigureView(analysis.name, analysis.title, analysis.source, left_out=entry.left_out)
    table = table_view(result.table, alone=result.chart is None)
    head = (analysis.name, analysis.title, analysis.source, result.caption)
    return (
        FigureView(*head, table=table)
        if result.chart is None
        else _drawn(head, result, table, data)
    )


def _drawn(
    head: tuple[str, str, str, str], result: Result, table: TableView, data: dict[str, Any]
) -> FigureView:
    name, title, *_ = head
    assert result.chart is not None
    drawn = drawing.panels(result.chart, name, title)
    panels = []
    for number_, (panel, piece) in enumerate(zip(result.chart.panels, drawn, strict=True)):
        key = f"{name}-{number_}"
        values = embedded(panel, piece)
        if values is not None:
            data[key] = values
        panels.append(
            PanelView(key, piece.svg, values is not None and values["kind"] == "lines", piece.wide)
        )
    columns = max(1, min(result.chart.columns, len(drawn)))
    return FigureView(
        *head,
        panels=panels,
        columns=columns,
        drawing=drawing.joined(drawn, columns, title),
        table=table,
    )


def notes_summary(notes: Sequence[Note]) -> str:
    """Summarize how many rows the checks dropped, mended or kept; empty if none."""
    said = []
    for action, what in (
        ("dropped", "dropped"),
        ("mended", "mended"),
        ("kept", "kept as they are and counted"),
    ):
        rows = sum(note.rows for note in notes if note.action == action)
        if rows:
            said.append(f"{rows:,} {'row' if rows == 1 else 'rows'} {what}")
    return ", ".join(said)


def _finding(finding: Finding) -> FindingView:
    verdict, mark = {
        True: ("holds here", "yes"),
        False: ("does not hold here", "no"),
        None: ("cannot be determined", "open"),
    }[finding.holds]
    value = finding.value
    said = "" if value is None or not math.isfinite(value) else _with_unit(value, finding.unit)
    study = finding.study
    if isinstance(study, int | float) and not isinstance(study, bool):
        study = _with_unit(float(study), finding.unit) if math.isfinite(study) else ""
    study = "" if study is None else str(study)
    return FindingView(
        finding.id, finding.sentence, said, study, verdict, mark, finding.why, finding.source
    )


def _with_unit(value: float, unit: str) -> str:
    if unit == "s":
        return words.duration(value)
    if unit == "share":
        return words.percent(value)
    return f"{number(value)}{words.NBSP if unit else ''}{unit}"


def _findings_summary(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    holds = sum(finding.holds is True for finding in findings)
    not_ = sum(finding.holds is False for finding in findings)
    open_ = len(findings) - holds - not_
    said = [
        f"{holds} {'holds' if holds == 1 else 'hold'} here",
        f"{not_} {'does' if not_ == 1 else 'do'} not",
    ]
    if open_:
        said.append(f"{open_} cannot be determined from this trace")
    return (
        f"Of the {words.count(len(findings), 'finding')} of the study that were tested on this trace, "
        + ", ".join(said)
        + "."
    )


def _cluster(read: Read) -> ClusterView:
    cluster = read.cluster
    facts = [
        ("Source", cluster.source),
        ("Jobs", f"{read.jobs:,}, {read.gpu_jobs:,} of them with GPUs"),
    ]
    if read.first:
        facts.append(("Submitted", f"{_day(read.first)} to {_day(read.last)}, UTC"))
    gpus = cluster.gpu_num or (cluster.node_num or 0) * (cluster.gpus_per_node or 0)
    if gpus:
        nodes = f"{words.plainly(cluster.node_num, 'node')}, " if cluster.node_num else ""
        facts.append(
            (
                "Size",
                f"{nodes}{words.plainly(round(gpus), 'GPU')}{f' {cluster.gpu_model}' if cluster.gpu_model else ''}",
            )
        )
    if cluster.citation:
        facts.append(("Citation and licence", cluster.citation))
    return ClusterView(cluster.name, read.compared, facts)


def _day(moment: str) -> str:
    return moment[:10]


def _methods(report: Report) -> list[tuple[str, str]]:
    meaning = {
        "run": "From start to end, whatever the source calls duration.",
        "released": "What the source itself calls duration; in the released file of Kalos that counts the queue.",
    }
    said = meaning.get(report.duration, report.duration)
    if report.duration == "run" and any(
        read.cluster.duration_counts_queue for read in report.clusters
    ):
        said += " What a source here calls duration counts the queue, and is not used."
    return [
        ("Duration", said),
        ("GPU time", "GPUs held, times duration: what was allocated, not what was used."),
        (
            "Two weights",
            "A share of jobs counts each job once; a share of GPU time counts it by what it held.",
        ),
        (
            "Distributions",
            "Counted exactly from all values, neither sampled nor sketched; about 300 corners of a curve are shown.",
        ),
        (
            "Boxes",
            "From the first to the third quartile, with the median; whiskers to the last value within 1.5 IQR.",
        ),
        (
            "Time",
            "UTC; hours of the day are in the cluster's local time, if known.",
        ),
    ]
