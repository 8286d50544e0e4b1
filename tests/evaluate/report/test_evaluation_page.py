import html
import re
from dataclasses import replace
from pathlib import Path

import pytest
from sample_evaluations import NUMERICS, WHY_NOT, made_evaluation, made_timeline

from holdfast.core import words
from holdfast.evaluate.report.page import render, write_page
from holdfast.evaluate.report.view import page_view, sample_times, slowest
from holdfast.evaluate.types.timeline import JudgeSpan, MetricSpan, RequestSpan, timeline_of

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def timeline():
    return made_timeline()


@pytest.fixture(scope="module")
def evaluation(timeline):
    return made_evaluation(timeline)


@pytest.fixture(scope="module")
def page(evaluation, timeline, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "made" / "report.html"
    write_page(path, evaluation, timeline)
    return path


@pytest.fixture(scope="module")
def text(page):
    body = re.sub(r"<style>.*?</style>", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def test_the_answer_comes_first(page, evaluation):
    answer = f"4 tasks in {words.duration(evaluation.makespan_s)}, 1.08 times the lower bound; 1 task failed"
    assert f"<h1>{answer.replace(words.NBSP, ' ')}</h1>" in page.read_text()


def test_it_contains_every_score_and_every_reason(text, evaluation):
    expected = [
        WHY_NOT,
        NUMERICS,
        "abc123",
        "lm-eval 0.4.13",
        "2 GB at 350 MB/s",
        "exact, bit for bit",
    ]
    expected += [f"{score.value:.4f}" for score in evaluation.scores]
    expected += [f"{score.stderr:.4f}" for score in evaluation.scores if score.stderr is not None]
    expected += [
        f"{term.seconds / words.unit_of_time(evaluation.makespan_s)[1]:.2f}"
        for term in evaluation.bound
    ]
    assert [part for part in expected if part not in text] == []


def test_the_page_says_that_all_answers_were_known(evaluation, timeline):
    said = "Nothing had to be run: all answers were known."
    assert page_view(replace(evaluation, requests=0), timeline).context.endswith(f". {said}")
    assert said not in page_view(evaluation, timeline).context


def test_names_are_text_and_nothing_else(page):
    source = page.read_text()
    assert "first&lt;script&gt;" in source
    assert "wiki&lt;b&gt;text" in source
    assert "<script" not in source
    assert "<b>" not in source


def test_it_needs_no_network(page):
    assert "default-src 'none'" in page.read_text()
    assert not re.search(r"(?:src|href)=|@import|https?:", page.read_text())


def test_what_the_engine_seconds_went_to_adds_up_as_printed(page):
    table = page.read_text().split("Where the engine-seconds went")[1].split("</table>")[0]
    body, foot = table.split("<tfoot>")
    cells = [float(cell) for cell in re.findall(r'<td class="number">([\d.]+)</td>', body)]
    total, percent = map(float, re.findall(r'<td class="number">([\d.]+)</td>', foot))
    assert sum(cells[::2]) == pytest.approx(total)
    assert sum(cells[1::2]) == pytest.approx(percent) == 100


def test_without_an_account_the_timeline_says_it(evaluation, timeline):
    source = render(replace(evaluation, account={}), timeline)
    table = source.split("Where the engine-seconds went")[1].split("</table>")[0]
    assert re.findall(r'<th scope="row">(\w+)', table)[:3] == ["Answering", "Starting", "Swapping"]


def test_an_evaluation_of_nothing_is_a_page_too(evaluation):
    bare = replace(
        evaluation,
        state="stopped",
        results={},
        scores=(),
        errors={},
        bound=(),
        account={},
        critical_path=(),
        samples=0,
    )
    source = render(bare, timeline_of([]))
    assert "Stopped: 0 tasks in" in source
    for sentence in (
        "No task has scores.",
        "No lower bound is known.",
        "No engine did anything.",
        "No engine was there.",
    ):
        assert sentence in source


def test_a_plan_says_that_it_predicts(evaluation, timeline):
    assert "<h1>Predicted: 120 samples in" in render(
        replace(evaluation, state="planned", errors={}), timeline
    )


def test_equal_evaluations_give_equal_bytes(evaluation, timeline):
    assert render(evaluation, timeline) == render(evaluation, timeline)


def test_a_samples_time_is_from_its_first_request_to_its_last_judgement():
    timeline = timeline_of(
        [
            RequestSpan(engine=0, task=0, sample=7, new_tokens=3, t0=10.0, t1=12.0),
            RequestSpan(engine=1, task=0, sample=7, new_tokens=4, t0=11.0, t1=12.5),
            MetricSpan(node=0, task=0, sample=7, t0=12.5, t1=14.0),
            JudgeSpan(task=0, sample=7, t0=18.0, t1=20.0, waited_s=3.0),
            RequestSpan(engine=0, task=0, sample=8, t0=0.0, t1=9.0),
            RequestSpan(engine=0, model=1, task=0, sample=7, t0=0.0, t1=1.0),
        ]
    )
    first, second, third = slowest(timeline)
    assert (first.sample, first.t0, first.t1, first.requests, first.new_tokens) == (
        7,
        10.0,
        20.0,
        2,
        7,
    )
    assert (first.engine_s, first.metric_s, first.judge_s) == (3.5, 1.5, 5.0)
    assert (second.sample, third.model) == (8, 1)
    assert len(list(sample_times(timeline))) == 3
    assert len(slowest(timeline, shown=1)) == 1


@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_without_a_complaint(page, scheme, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM))
        for width in (1100, 390):
            shown = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            said, asked = [], []
            shown.on("console", lambda message, said=said: said.append(message.text))
            shown.on("request", lambda request, asked=asked: asked.append(request.url))
            shown.goto(page.as_uri())
            shown.screenshot(path=tmp_path / "page.png", full_page=True)
            assert (said, asked) == ([], [page.as_uri()])
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            paper = shown.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            assert paper == {"light": "rgb(252, 252, 250)", "dark": "rgb(21, 23, 26)"}[scheme]
            fills = shown.evaluate(
                "[...document.querySelectorAll('.gantt path.s1')].map(e => "
                "getComputedStyle(e).fill)"
            )
            assert set(fills) == {
                {"light": "rgb(0, 114, 178)", "dark": "rgb(78, 168, 230)"}[scheme]
            }
        browser.close()
