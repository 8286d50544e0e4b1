import html
import re
from dataclasses import replace
from pathlib import Path

import pytest
from sample_evaluations import NUMERICS, WHY_NOT, made_evaluation, made_timeline

from holdfast.core import words
from holdfast.core.ledger import EvaluationRecord
from holdfast.evaluate.report.compare import previous_of
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


def test_scores_come_first_and_the_time_below(page, text, evaluation):
    assert "<h1>4 tasks; 1 task failed</h1>" in page.read_text()
    time_ = f"4 tasks in {words.duration(evaluation.makespan_s)}, 1.08 times the lower bound; 1 task failed"
    order = ["Scores", "Tasks that failed", time_.replace(words.NBSP, " "), "Makespan"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def before(step, scores, **other):
    fields = {"suite": "nightly", "model": "m", "family": "f", "state": "done", "folder": ""}
    fields |= {"evaluation_id": f"e-{step}", "started_at_s": float(step or 0), "step": step} | other
    return EvaluationRecord(**fields, scores=scores)


PREVIOUS = before(
    11000,
    {
        "mmlu_b": {"acc,none": [0.59, 0.02, True]},
        "mmlu_a": {"acc,none": [0.3, 0.02, True]},
        "gsm8k": {"exact_match,strict-match": [0.41, 0.012, True]},
        "wikitext": {"word_perplexity,none": [13.0, None, False]},
    },
)


def test_each_score_has_its_difference_to_the_last_checkpoint(evaluation, timeline):
    source = render(evaluation, timeline, previous=PREVIOUS)
    assert "<h1>4 tasks: 1 score better and 1 worse than step 11,000; 1 task failed</h1>" in source
    cells = re.findall(r'class="number (better|worse|)">([^<]*)<', source)
    assert ("better", "+0.1000") in cells  # 0.3 to 0.4, with a standard error of 0.028
    assert ("worse", "\N{MINUS SIGN}0.1000") in cells
    assert ("", "+0.0100") in cells  # less than chance
    assert ("", "\N{MINUS SIGN}0.6544") in cells  # without a standard error, no verdict
    assert "Difference" not in render(evaluation, timeline)


@pytest.mark.parametrize(
    ("step", "run_id", "expected"),
    [(3000, "r", 2000), (1000, "r", None), (2500, "r", 2000), (3000, "other", None)],
)
def test_the_last_checkpoint_is_the_one_before_in_the_same_run(evaluation, step, run_id, expected):
    known = [
        before(at, {"t": {"acc,none": [0.5, None, True]}}, run_id="r", started_at_s=9e9 - at)
        for at in (2000, 1000, 4000)
    ]
    empty = before(2900, {}, run_id="r")
    found = previous_of(replace(evaluation, step=step, run_id=run_id), [*known, empty])
    assert (None if found is None else found.step) == expected


def test_without_steps_the_last_checkpoint_is_the_newest_before(evaluation):
    scores = {"t": {"acc,none": [0.5, None, True]}}
    known = [before(None, scores, started_at_s=at) for at in (1.0, 1.78e9, 1.8e9)]
    assert previous_of(replace(evaluation, step=None), known).started_at_s == 1.78e9


def test_samples_are_a_link_away(evaluation, timeline, tmp_path):
    logged = tmp_path / "samples" / "a" / "samples_gsm8k_2026-11-01T10-00-00.jsonl"
    logged.parent.mkdir(parents=True)
    logged.touch()
    page = tmp_path / "report.html"
    write_page(page, evaluation, timeline)
    links = re.findall(r'<a href="([^"]+)">([^<]*)</a>', page.read_text())
    assert links == [(logged.relative_to(tmp_path).as_posix(), "1,319")]
    assert (tmp_path / links[0][0]).exists()


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
    alone = {"previous": None, "samples": {}}
    known = page_view(replace(evaluation, requests=0), timeline, **alone)
    assert known.context.endswith(f". {said}")
    assert said not in page_view(evaluation, timeline, **alone).context


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
            # The value stands on the screen without scrolling to the side.
            right = shown.locator(".scores .value").evaluate_all(
                "all => Math.max(...all.map(cell => cell.getBoundingClientRect().right))"
            )
            assert right <= width
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
