"""Check what the report relies on in every analysis of jobs."""

import importlib
import math

import pytest
from job_tables import kalos, made_up, openb, philly, trace_of

from holdfast.trace import aggregates
from holdfast.trace.analyses import SECTIONS
from holdfast.trace.charts import Bars, Boxes, Heatmap, Lines
from holdfast.trace.errors import LeftOut

MODULES = (
    "arrivals", "capacity", "demand", "durations", "fragmentation", "outcomes", "queues", "summary", "users", "waiting",
    "workloads",
)  # fmt: skip
ANALYSES = [
    analysis
    for module in MODULES
    for analysis in importlib.import_module(f"holdfast.trace.analyses.{module}").ANALYSES
]


def placed():
    frame = made_up()
    nodes = [
        [f"node-{node}" for node in range(number % 5, number % 5 + 2)]
        for number in range(len(frame))
    ]
    return frame.assign(nodes=nodes)


@pytest.fixture(scope="module", params=["made up", "compared", "real"])
def answers(request):
    frames = {
        "made up": [placed()],
        "compared": [placed(), made_up(1, cluster="Other"), made_up(2, rows=50, cluster="Third")],
        "real": [philly, openb, kalos],
    }[request.param]
    frames = [frame() if callable(frame) else frame for frame in frames]
    with trace_of(*frames, compared=["Other", "Third", "Philly"]) as trace:
        found = {}
        for analysis in ANALYSES:
            try:
                found[analysis.name] = analysis.run(trace)
            except LeftOut as why:
                found[analysis.name] = why
        return found


def results(answers):
    return {name: answer for name, answer in answers.items() if not isinstance(answer, LeftOut)}


def test_names_are_one_each_and_sections_those_of_the_report():
    names = [analysis.name for analysis in ANALYSES]
    assert len(set(names)) == len(names)
    assert {analysis.section for analysis in ANALYSES} <= set(SECTIONS)


def test_a_number_under_one_key_is_one_number(answers):
    numbers = {}
    for name, result in results(answers).items():
        for key, value in result.numbers.items():
            assert math.isfinite(value), (name, key)
            assert numbers.setdefault(key, value) == pytest.approx(value), (name, key)


def test_captions_are_sentences_without_gaps(answers):
    for name, result in results(answers).items():
        assert result.caption.endswith("."), name
        assert "nan" not in result.caption.lower().split(), name
        assert "unknown on average" not in result.caption, name
    for why in answers.values():
        if isinstance(why, LeftOut):
            assert str(why).startswith("Left out: ")
            assert str(why).endswith(".")


def test_tables_are_tidy_and_become_csv(answers):
    for name, result in results(answers).items():
        assert len(result.table) > 0, name
        assert "cluster" in result.table, name
        assert len(result.table.csv().splitlines()) == len(result.table) + 1


def test_charts_are_small_and_whole(answers):
    for name, result in results(answers).items():
        for panel in result.chart.panels if result.chart else ():
            if isinstance(panel, Lines):
                assert panel.series, name
                for series in panel.series:
                    assert 0 < len(series.x) == len(series.y) <= 1000, name
            if isinstance(panel, Bars):
                assert all(len(values) == len(panel.groups) for values in panel.parts.values()), (
                    name
                )
            if isinstance(panel, Boxes):
                assert panel.five.shape == (len(panel.groups), 5), name
            if isinstance(panel, Heatmap):
                assert panel.values.shape == (len(panel.y.ticks), len(panel.x.ticks)), name


def test_only_aggregates_read_the_jobs():
    with trace_of(placed()) as trace:
        for name in aggregates.names():
            if name.startswith(("job_", "node_hours")):
                trace.prepare(name)
        trace.connection.execute("DROP VIEW jobs")
        for analysis in ANALYSES:
            try:
                analysis.run(trace)
            except LeftOut:
                assert analysis.name == "waiting_while_free"


def test_types_and_pools_that_nobody_told_leave_what_is_by_them_out():
    frame = placed().assign(type=None, pool=None)
    by_part = [
        "queue_by_type",
        "queue_by_pool",
        "gpu_demand_by_type",
        "workload_shares",
        "final_states_by_type",
    ]
    by_part += ["who_waits_for_whom", "who_waits_for_whom_by_pool", "duration_by_type"]
    with trace_of(frame) as trace:
        for analysis in ANALYSES:
            if analysis.name in by_part:
                with pytest.raises(LeftOut, match=r"(a type|a pool|a duration)\.$"):
                    analysis.run(trace)


def test_a_single_type_is_not_compared_with_itself():
    with trace_of(placed().assign(type="SFT", pool="one")) as trace:
        for analysis in ANALYSES:
            if analysis.name in {"duration_by_type", "queue_by_type", "queue_by_pool"}:
                caption = analysis.run(trace).caption
                assert " longest" in caption
                assert "shortest" not in caption
                assert "least" not in caption
