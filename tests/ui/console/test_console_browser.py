"""A real browser on a real console: live pages, the rules of WCAG, no outside request.

All tests share one browser, signed in once, and all but the last one share one console.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import sample_runs
from console_home import add_log, propose

import json_schemas
from holdfast.core.ledger import EvaluationRecord, Ledger
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries

CHROMIUM = shutil.which("chromium")
WAIT_MS = 60_000
REPORT_MS = 240_000
WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
LOOKS = [(width, colours) for width in (1280, 390) for colours in ("dark", "light")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]


@contextlib.contextmanager
def served(home, *options):
    """Serve a console in a process of its own, and yield the link that signs in."""
    command = [sys.executable, "-m", "holdfast.cli.main", *options, "ui", "--port", "0", "--json"]
    environment = {**os.environ, "HOLDFAST_HOME": str(home)}
    console = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield json_schemas.check(json.loads(console.stdout.readline()))["link"]
    finally:
        console.terminate()
        console.wait()
        console.stdout.close()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("browser")
    with sample_runs.open_home(home) as ledger:
        sample_runs.faulty_run(ledger, home)
        going = sample_runs.Scribe(ledger, home, "going")
        going.begin()
        going.train(30)
        going.journal.close()
        propose(ledger, "going", 1)
        ledger.cordon("node-9", at_s=1_790_000_000.0, by="ada", why="Xid 79")
        ledger.add_evaluation(
            EvaluationRecord(
                evaluation_id="eval-1", suite="mine", model="m", family="f", state="done",
                started_at_s=1_790_000_000.0, folder="/e", makespan_s=10.0, bound_s=9.0,
                scores={"gsm8k": {"exact_match,strict": [0.5, 0.01]}}, run_id="going", step=20,
            )
        )  # fmt: skip
    add_log(home, "demo-1", 1, 0, "".join(f"line {number}\n" for number in range(1, 200)))
    return home


class Tab:
    """A tab of the signed-in browser, and what it complained of."""

    def __init__(self, context, base):
        self.base, self.said, self.asked = base, [], []
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("console", lambda one: one.type == "error" and self.said.append(one.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def goto(self, path):
        return self.page.goto(f"{self.base}{path}")

    def close(self):
        self.page.close()
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(self.base)] == []


@pytest.fixture(scope="module")
def signed_in(browser, home):
    """The browser's context, signed in, and the console's address."""
    with served(home) as link:
        base = link.partition("/enter")[0]
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(link)
        page.wait_for_url(f"{base}/")
        page.close()
        yield context, base
        context.close()


@pytest.fixture
def tab(signed_in):
    tab = Tab(*signed_in)
    yield tab
    tab.close()


def test_an_incident_appears_live_and_is_confirmed(tab, home):
    page = tab.page
    tab.goto("/runs/demo-1")
    page.wait_for_selector("#loss-chart canvas")
    before = page.locator("article.incident").count()
    page.locator("article.incident h3 a").first.focus()
    with sample_runs.open_home(home) as ledger:
        job = sample_runs.Scribe.__new__(sample_runs.Scribe)
        job.ledger, job.run_id, job.attempt = ledger, "demo-1", 3
        job.step, job.now_s = 300, 1_790_000_500.0
        found = sample_runs.diagnosis(
            "ConnectionError", "Infrastructure", [("rank-0.log", 1, "x", "root")]
        )
        job.fail("exit", 0, 0.1, found, "restart", "Another restart.")
    page.wait_for_function(
        "count => document.querySelectorAll('article.incident').length > count", arg=before
    )
    assert page.evaluate("document.activeElement.closest('#live-chain') !== null"), (
        "the keyboard stays where it was"
    )
    page.get_by_role("link", name="The cause is right…").first.click()
    incident = page.url.partition("target=")[2]
    page.get_by_role("button", name="Yes, confirm").click()
    page.wait_for_url(lambda url: "/act/" not in url)
    tab.goto("/decisions")
    page.get_by_role("cell", name="done: ").first.wait_for()
    tab.goto(f"/incidents/{incident}")
    page.get_by_text("confirmed: ConnectionError").wait_for()


def test_the_trace_report_appears_by_itself(tab):
    page = tab.page
    tab.goto("/cluster")
    drawing = page.locator("img.drawing").first
    drawing.wait_for(timeout=REPORT_MS)
    assert "GPU-hours lost" in page.locator("dl.figures").first.inner_text()
    drawing.scroll_into_view_if_needed()
    page.wait_for_function("document.querySelector('img.drawing').naturalWidth > 0")


@pytest.mark.parametrize(
    "path",
    ["/", "/runs", "/runs/demo-1", "/runs/going", "/runs/demo-1/logs", "/incidents/1", "/nodes", "/evaluations",
     "/cluster", "/decisions", "/act/cordon?target=node-3", "/act/correct?target=1"],
)  # fmt: skip
def test_pages_keep_the_rules_of_wcag_and_the_width_of_the_window(tab, path):
    from axe_playwright_python.sync_playwright import Axe

    page = tab.page
    tab.goto(path)
    if path == "/cluster":
        page.locator("img.drawing").first.wait_for(timeout=REPORT_MS)
    for width, colours in LOOKS:
        page.emulate_media(color_scheme=colours, reduced_motion="reduce")
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("width => innerWidth === width", arg=width)
        # The charts take their new width in the resize event, which precedes the next frame.
        page.evaluate("() => new Promise(requestAnimationFrame)")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"the page is {wide} pixels wide on {width}"
        found = Axe().run(page, options={"runOnly": WCAG})
        assert found.response["passes"], "the rules were applied"
        assert found.violations_count == 0, f"{width} {colours}: {found.generate_report()}"


@pytest.mark.skipif(postgresql_binaries() is None, reason="no PostgreSQL is installed")
def test_pages_state_that_the_database_is_away_and_come_back_by_themselves(browser, tmp_path):
    with PrivatePostgreSQL() as server:
        url = server.new_database()
        with Ledger.open(url) as ledger:
            sample_runs.faulty_run(ledger, tmp_path)
        with served(tmp_path, "--ledger", url) as link:
            base = link.partition("/enter")[0]
            context = browser.new_context()
            context.set_default_timeout(WAIT_MS)
            now, runs = context.new_page(), context.new_page()
            now.goto(link)
            now.wait_for_url(f"{base}/")
            now.bring_to_front()
            server.kill()
            now.get_by_text("(the ledger does not answer)").wait_for()
            runs.goto(f"{base}/runs")
            runs.get_by_role("heading", name="The ledger does not answer").wait_for()
            server.start()
            runs.get_by_role("link", name="demo-1").first.wait_for()
            now.bring_to_front()
            now.locator(".asof:not(.down)").wait_for()
            assert "does not answer" not in now.locator(".asof").inner_text()
            context.close()
