"""A real browser on a real console: a live incident, its confirmation, no outside request."""

import contextlib
import json
import shutil
import subprocess
import sys

import pytest
import sample_runs

import json_schemas
from holdfast.core.ledger import Ledger
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries

CHROMIUM = shutil.which("chromium")
WAIT_MS = 60_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]


@pytest.fixture
def link(tmp_path, monkeypatch):
    with sample_runs.open_home(tmp_path) as ledger:
        sample_runs.faulty_run(ledger, tmp_path)
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    with served() as link:
        yield link


@contextlib.contextmanager
def served(*options):
    """Serve a console in a process of its own, and yield the link that signs in."""
    command = [sys.executable, "-m", "holdfast.cli.main", *options, "ui", "--port", "0", "--json"]
    console = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield json_schemas.check(json.loads(console.stdout.readline()))["link"]
    finally:
        console.terminate()
        console.wait()
        console.stdout.close()


def test_an_incident_appears_live_and_is_confirmed(link, tmp_path):
    from playwright.sync_api import sync_playwright

    base, said, asked = link.partition("/enter")[0], [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(WAIT_MS)
        page.on(
            "console",
            lambda message: said.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(link)
        page.wait_for_url(f"{base}/")
        page.goto(f"{base}/runs/demo-1")
        page.wait_for_selector("#loss-chart canvas")
        before = page.locator("article.incident").count()
        page.locator("article.incident h3 a").first.focus()
        with sample_runs.open_home(tmp_path) as ledger:
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
        for width, colours in ((390, "dark"), (390, "light"), (1280, "dark"), (1280, "light")):
            page.emulate_media(color_scheme=colours)
            page.set_viewport_size({"width": width, "height": 900})
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"the page is {wide} pixels wide on {width}"
        page.get_by_role("link", name="The cause is right…").first.click()
        page.get_by_role("button", name="Yes, confirm").click()
        page.get_by_text("confirmed: ConnectionError").wait_for()
        browser.close()
    assert said == []
    assert [url for url in asked if not url.startswith(base)] == []


@pytest.mark.skipif(postgresql_binaries() is None, reason="no PostgreSQL is installed")
def test_pages_state_that_the_database_is_away_and_come_back_by_themselves(tmp_path, monkeypatch):
    from playwright.sync_api import sync_playwright

    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    with PrivatePostgreSQL() as server, sync_playwright() as playwright:
        url = server.new_database()
        with Ledger.open(url) as ledger:
            sample_runs.faulty_run(ledger, tmp_path)
        with served("--ledger", url) as link:
            base = link.partition("/enter")[0]
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
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
            browser.close()
