"""Check the page's content and its HTML; another file tests the page in a browser."""

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import sample_charts
import sample_report
from hypothesis import given
from hypothesis import strategies as st
from job_tables import made_up, trace_of

from holdfast.trace.analyses.catalogue import catalogue
from holdfast.trace.analyses.result import Analysis, Result
from holdfast.trace.charts import Axis, Figure, Heatmap, Lines, Series
from holdfast.trace.checks import NO_GPUS
from holdfast.trace.errors import LeftOut
from holdfast.trace.figures.export import panels
from holdfast.trace.notes import Note
from holdfast.trace.report.embedded import embedded, packed
from holdfast.trace.report.tables import cell, number, table_view
from holdfast.trace.report.view import page_view
from holdfast.trace.report.write import render
from holdfast.trace.run import characterize
from holdfast.trace.table import Table

SMALL = replace(sample_report.report(), entries=[*sample_report.entries(11)])
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Parse a page: its text, its attributes, and open elements."""

    def __init__(self, source):
        super().__init__()
        self.open, self.words, self.attributes, self.elements = [], [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))

    def values(self, name):
        return [value for _, attribute, value in self.attributes if attribute == name]


@pytest.fixture(scope="module")
def source():
    return render(page_view(SMALL))


@pytest.fixture(scope="module")
def page(source):
    return Page(source)


def test_ids_are_unique_and_links_lead_somewhere(page):
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    for link in page.values("href"):
        assert link.startswith(("data/", "figures/")) or link.removeprefix("#") in ids, link


def test_nothing_is_fetched(page, source):
    assert "src" not in {name for _, name, _ in page.attributes}
    assert not {"link", "img", "iframe", "object"} & set(page.elements)
    assert not re.search(r"@import|url\((?!#)", source)
    policy = next(value for value in page.values("content") if "default-src" in value)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_hostile_words_are_seen_and_not_obeyed(page, source):
    assert "<script>alert" not in source
    assert "\u202e" not in source
    assert "\x1b" not in source
    assert "<script>alert('x')</script> & red \\u202etxt.exe" in page.text
    assert page.elements.count("script") == 4  # two of values, uPlot, and the page's own


def test_counts_come_first_and_what_is_clean_is_said(page):
    assert "12 rows dropped, 7 rows mended, 3,141 rows kept as they are and counted." in page.text
    assert page.text.index("3,141 rows kept") < page.text.index("end-before-start")
    clean = Page(render(page_view(replace(SMALL, notes=[], entries=[]))))
    assert "Nothing found: every check passed on every row." in clean.text


def test_findings_say_whether_they_hold(page):
    assert (
        "3\N{NO-BREAK SPACE}findings of the study that were tested on this trace, 1 holds here, 1 "
        "does not, 1 cannot" in ("".join(page.words))
    )
    assert re.search(
        r"holds here Half of the GPU jobs .* Here 2 min 02 s · study.s 2 min 00 s", page.text
    )
    assert re.search(
        r"does not hold here .* Here 1.4 % · study.s under 2 % · More than the study has.",
        page.text,
    )
    assert re.search(
        r"Cannot be determined from this trace section 3.1. GPUs idle at 60 W. No telemetry was given",
        page.text,
    )


def test_the_study_comes_last_and_is_folded(page, source):
    assert page.text.rindex("What was read") < page.text.rindex("Beside the study")
    assert source.index('<details class="study">') > source.index('id="section-1"')
    assert source.index('<details class="study">') < source.index('class="findings"')


def test_a_trace_without_a_gpu_says_so_first():
    sentence = "No job has a GPU, so all figures about GPUs are missing."
    note = Note(cluster="Seren", check=NO_GPUS, sentence=sentence, rows=9, action="kept")
    page = Page(render(page_view(replace(SMALL, notes=[note], entries=[]))))
    assert page.text.index(sentence) < page.text.index("GPU-hours")


def test_headings_are_words_and_values_have_units():
    table = Table(
        {
            "gpu_time_h": np.array([1.5]),
            "complete_gpu_time_s": np.array([7200.0]),
            "med_run_time_gpu_s": np.array([122.0]),
            "fail_rate_gpu_time": np.array([0.124]),
            "fail_rate_gpu": np.array([0.429]),
            "share_of_jobs": np.array([0.00123]),
            "mean_power_w": np.array([314.159]),
            "avg_gpu_num": np.array([5.678]),
            "cpu_job_num": np.array([3.0]),
        }
    )
    view = table_view(table, alone=False)
    assert view.head == [
        "GPU-hours", "Completed GPU-hours", "Median run time of GPU jobs", "Failed, share of GPU time",
        "Failed, share of GPU jobs", "Share of jobs", "Mean power (W)", "Mean GPUs", "CPU jobs",
    ]  # fmt: skip
    said = ["1.5", "2", "2 min 02 s", "12.4 %", "42.9 %", "0.123 %", "314", "5.68", "3"]
    assert [text.replace("\N{NO-BREAK SPACE}", " ") for text in view.rows[0]] == said


@pytest.mark.parametrize("analysis", catalogue(), ids=lambda analysis: analysis.name)
def test_no_heading_has_an_underscore(analysis):
    frame = made_up(rows=300)
    with trace_of(frame) as trace:
        try:
            table = analysis.run(trace).table
        except LeftOut:
            pytest.skip("needs more than jobs")
    assert not [head for head in table_view(table, alone=True).head if "_" in head]


def test_the_answer_and_the_key_figures(page):
    # 3.1e10 GPU seconds of 450,590 jobs: 982.3 years of 365.25 days, 8,611,111 hours.
    assert (
        "Seren gave 982 GPU-years of GPU time to 450,590 jobs; half of them ended within 2 min 02 "
        "s, and 21 %" in page.text
    )
    assert "GPU-hours 8,610,000 held by jobs" in page.text
    assert "Idle while allocated unknown" in page.text
    assert page.text.index("GPU-hours 8,610,000") < page.text.rindex("What was read")


def test_what_was_read_left_out_and_assumed_is_there(page):
    assert "818,327, 450,590 of them with GPUs" in page.text
    assert "2023-03-01 to 2023-08-31, UTC" in page.text
    assert "Hu et al., NSDI 2024; CC-BY-4.0" in page.text
    assert "Restarts, Nodes. Left out: the trace has no reason." in page.text
    assert page.text.count("Left out: the trace has no reason.") == 1
    assert "PUE1.25" in page.text


def test_tables_are_bounded_and_say_so(page):
    rows = len(SMALL.entries[1].result.table)
    assert f"The first 24 rows; {rows - 24:,} more are in the CSV file." in page.text
    tall = table_view(
        Table({"a": np.arange(100), "b": np.array(["x"] * 100, dtype=object)}), alone=True
    )
    assert (len(tall.rows), tall.more, tall.numeric) == (60, 40, [True, False])


def test_a_table_of_few_rows_and_many_columns_lies_on_its_side():
    table = Table(
        {"cluster": np.array(["a", "b"], dtype=object)}
        | {f"c{n}": np.array([n, n + 0.5]) for n in range(9)}
    )
    turned = table_view(table, alone=True)
    assert turned.head == ["Cluster", "a", "b"]
    assert turned.rows[8] == ["C8", "8", "8.5"]
    assert turned.more == 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1234567, "1,234,567"), (0.000123456, "0.000123"), (12345.678, "12,346"), (float("nan"), ""), (None, ""),
        (-3.5, "\N{MINUS SIGN}3.5"), (True, "yes"), ("a\x1b[1mb", "ab"), (np.datetime64("NaT"), ""), (1e300, "1e+300"),
    ],
)  # fmt: skip
def test_a_cell(value, said):
    assert cell(value) == said


def test_a_number_that_is_none():
    assert number(float("inf")) == "∞"


def unpacked(found):
    at, values = 0, []
    for step in found["steps"]:
        at += step or 0
        values.append(
            np.nan
            if step is None
            else 10 ** (at * found["unit"])
            if found["log"]
            else at * found["unit"]
        )
    return np.array(values)


@given(st.lists(st.floats(min_value=-1e12, max_value=1e12) | st.just(float("nan")), max_size=40))
def test_values_embedded_are_right_to_a_hundred_thousandth_of_their_range(values):
    values = np.array(values, dtype=float)
    back = unpacked(packed(values, log=False))
    finite = values[np.isfinite(values)]
    span = (np.ptp(finite) or np.abs(finite).max()) if len(finite) else 0
    assert np.array_equal(np.isnan(back), np.isnan(values))
    assert np.allclose(back, values, rtol=1e-9, atol=span * 1e-5 + 1e-300, equal_nan=True)


@given(st.lists(st.floats(min_value=1e-9, max_value=1e15), min_size=1, max_size=40))
def test_logarithms_embedded_are_right_to_a_hundredth_of_a_per_cent(values):
    assert np.allclose(unpacked(packed(np.array(values), log=True)), values, rtol=1e-4)


def test_what_is_embedded_is_what_was_drawn(source):
    data = json.loads(re.search(r'id="panel-data">(.*?)</script>', source, re.DOTALL)[1])
    result = next(entry.result for entry in SMALL.entries if entry.analysis.name == "durations_0")
    series = result.chart.panels[0].series[0]
    found = data["durations_0-0"]["series"][0]
    positive = series.x > 0
    assert np.allclose(unpacked(found["x"])[positive], series.x[positive], rtol=1e-4)
    assert np.allclose(unpacked(found["y"]), series.y, atol=1e-5)
    assert data["week_8-0"]["rows"][0] == "Mon"


def test_several_values_at_one_x_are_not_explorable():
    scatter = Lines(
        x=Axis(label="x"),
        y=Axis(label="y"),
        series=[Series(label="", x=np.array([1.0, 1, 2]), y=np.array([1.0, 2, 3]), style="points")],
    )
    drawn = panels(Figure(panels=[scatter]), "n", "n")
    assert embedded(scatter, drawn[0]) is None


def test_a_map_of_nothing_is_embedded_as_nothing():
    blank = Heatmap(x=Axis(label=""), y=Axis(label=""), values=np.full((2, 2), np.nan), unit="")
    drawn = panels(Figure(panels=[blank]), "n", "n")
    assert embedded(blank, drawn[0])["values"] is None


def test_every_edge_is_rendered():
    edges = [sample_report.entry("edges", "Another section", sample_charts.edges(), "Edges")]
    page = Page(render(page_view(replace(SMALL, entries=edges))))
    assert "Another section" in page.text
    assert page.elements.count("svg") == 14


class NoJobs:
    """A trace without jobs, for `characterize`."""

    clusters, compared, notes, duration = {}, frozenset(), [], "run"

    def prepare(self, name):
        raise LeftOut(f"Left out: no {name}.")


def test_what_a_trace_lacks_stops_nothing_and_a_bug_is_not_hidden():
    done = []
    result = Result(
        table=Table({"a": np.array([1])}), chart=None, caption="c", numbers={"a.b_s": 2.0}
    )

    def lacks(trace):
        raise LeftOut("Left out: no state.")

    analyses = [
        Analysis(name=name, section="s", title=name, run=run)
        for name, run in (("x", lacks), ("y", lambda trace: result))
    ]
    found = characterize(NoJobs(), analyses=analyses, progress=lambda *now: done.append(now))
    assert [entry.left_out for entry in found.entries] == ["Left out: no state.", ""]
    assert found.entries[1].result is result
    assert list(found.findings) == []  # without a cluster there is no finding
    assert found.numbers == {"a.b_s": 2.0}
    assert done == [("x", 0, 2), ("y", 1, 2)]
    broken = Analysis(name="z", section="s", title="z", run=lambda trace: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        characterize(NoJobs(), analyses=[broken])


def test_markup_in_a_title_is_text():
    page = Page(render(page_view(replace(SMALL, title="<b>&", entries=[]))))
    assert "<b>&" in page.text
    assert html.escape("<b>&") not in page.text


def test_moments_are_dates():
    table = Table({"at_s": np.array([0.0, np.nan]), "gpus": np.array([1.0, 2.0])})
    assert table_view(table, alone=True).rows == [["1970-01-01 00:00", "1"], ["", "2"]]
