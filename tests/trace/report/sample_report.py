"""Make a report by hand, with about as many figures as a real one, every kind of chart, and hostile
texts.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import sample_charts

from holdfast.trace.analyses import SECTIONS
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.charts import Bars, Boxes, Figure, Heatmap
from holdfast.trace.clusters import Cluster
from holdfast.trace.findings import Finding
from holdfast.trace.notes import Note
from holdfast.trace.report import Entry, Read, Report
from holdfast.trace.table import Table

HOSTILE = sample_charts.HOSTILE


def tidy(figure: Figure) -> Table:
    rows = []
    for number, panel in enumerate(figure.panels):
        if isinstance(panel, Bars):
            rows += [
                (number, part, group, float(value))
                for part, column in panel.parts.items()
                for group, value in zip(panel.groups, column, strict=True)
            ]
        elif isinstance(panel, Boxes):
            rows += [
                (number, group, "median", float(five[2]))
                for group, five in zip(panel.groups, panel.five, strict=True)
            ]
        elif isinstance(panel, Heatmap):
            rows += [
                (number, str(row), str(column), float(v))
                for (row, column), v in np.ndenumerate(panel.values)
            ]
        else:
            rows += [
                (number, series.label, f"{x:.6g}", float(y))
                for series in panel.series
                for x, y in zip(series.x, series.y, strict=True)
            ]
    return Table.of_rows(("panel", "series", "x", "value"), rows)


def entry(name: str, section: str, figure: Figure, title: str) -> Entry:
    analysis = Analysis(
        name=name, section=section, title=title, run=lambda trace: None, source="Fig 2a"
    )  # type: ignore[arg-type,return-value]
    caption = f"{title}: half of the 450,590 GPU jobs of Seren ended within 2 min, by job and by GPU time, of {HOSTILE}."  # noqa: E501
    return Entry(
        analysis=analysis,
        result=Result(table=tidy(figure), chart=figure, caption=caption, numbers={}),
    )


def comparison() -> Entry:
    columns = ("cluster", *(f"measure_{number}_s" for number in range(20)))
    rows = [("Seren", *np.arange(20) * 1234.5678), ("Kalos", *np.full(20, np.nan))]
    numbers = {
        "seren.med_run_time_gpu_s": 122.0, "seren.avg_run_time_gpu_s": 1414.0, "seren.med_queue_time_gpu_s": 1.0,
        "seren.avg_queue_time_gpu_s": 446.0, "seren.avg_gpu_num": 5.68, "seren.max_gpu_num": 1024.0,
        "seren.fail_rate_gpu": 0.429, "seren.fail_rate_gpu_time": 0.124, "seren.complete_rate_gpu_time": 0.212,
    }  # fmt: skip
    analysis = Analysis(
        name="comparison",
        section=SECTIONS[0],
        title="The clusters side by side",
        run=lambda trace: None,
    )  # type: ignore[arg-type,return-value]
    result = Result(
        table=Table.of_rows(columns, rows), chart=None, caption="Seren and Kalos.", numbers=numbers
    )
    return Entry(analysis=analysis, result=result)


def entries(number: int = 35) -> list[Entry]:
    drawn = {
        name: figure for name, figure in sample_charts.all_figures().items() if name != "edges"
    }
    names = list(drawn)
    made = [comparison()]
    for place in range(number):
        kind = names[place % len(names)]
        figure = sample_charts.durations(seed=place) if kind == "durations" else drawn[kind]
        title = f"{kind.replace('_', ' ').capitalize()} {place}"
        made.append(
            entry(f"{kind}_{place}", SECTIONS[place * len(SECTIONS) // number], figure, title)
        )
    made.append(entry("edges", SECTIONS[-1], sample_charts.edges(), "What no analysis should make"))
    lacking = Analysis(
        name="restarts", section=SECTIONS[3], title="Restarts", run=lambda trace: None
    )  # type: ignore[arg-type,return-value]
    why = "Left out: the trace has no reason."
    nodes = replace(lacking, name="nodes", title="Nodes")
    return [*made, Entry(analysis=lacking, left_out=why), Entry(analysis=nodes, left_out=why)]


def report(number: int = 35) -> Report:
    seren = Cluster(
        name="Seren", source="acme", node_num=286, gpus_per_node=8, gpu_num=2288, gpu_model="A100-SXM4-80GB",
        citation="Hu et al., NSDI 2024; CC-BY-4.0",
    )  # fmt: skip
    philly = Cluster(name="Philly", source="philly")
    return Report(
        title="Where the GPU time of Seren goes",
        clusters=[
            Read(
                cluster=seren, jobs=818_327, gpu_jobs=450_590, gpu_time_s=3.1e10, first="2023-03-01T00:00:18Z",
                last="2023-08-31T23:59:01Z",
            ),
            Read(cluster=philly, jobs=82_247, gpu_jobs=82_247, gpu_time_s=1e9, first="", last="", compared=True),
        ],
        notes=[
            Note(cluster="Seren", check="duplicate-job-id", sentence="The same id twice.", rows=12, action="dropped"),
            Note(
                cluster="Seren", check="end-before-start", sentence=f"A job of {HOSTILE} ends before it starts.",
                rows=3141, action="kept", examples=(HOSTILE, "4711", "4712", "4713", "4714"),
            ),
            Note(cluster="Philly", check="zone", sentence="Times without a zone.", rows=7, action="mended"),
        ],
        findings=[
            Finding(
                cluster="Seren", source="section 3.1",
                id="short-jobs", sentence="Half of the GPU jobs of Seren end within 2 min 02 s.", value=122.0, unit="s",
                study=120.0, holds=True, why="",
            ),
            Finding(
                cluster="Seren", source="section 3.1",
                id="single-gpu", sentence="Jobs of one GPU take 1.4 % of GPU time.", value=0.014, unit="share",
                study="under 2 %", holds=False, why="More than the study has.",
            ),
            Finding(
                cluster="Seren", source="section 3.1",
                id="idle", sentence="GPUs idle at 60 W.", value=None, unit="W", study=float("nan"), holds=None,
                why=f"No telemetry was given for {HOSTILE}.",
            ),
        ],
        entries=entries(number),
        parameters={"PUE": "1.25", "Carbon intensity": "0.478 tCO2e/MWh"},
    )  # fmt: skip
