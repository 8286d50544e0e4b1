"""A person with a browser and a real run: an incident live, approved, confirmed; a node; a rollback."""

import json
import shutil

import pytest
from test_broken_loss import NAN_ONCE, training

from holdfast.core.processes import whoami
from holdfast.recover import healthy_steps

CHROMIUM = shutil.which("chromium")
WAIT_MS = 240_000

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]


@pytest.fixture
def tab():
    """A tab of a real browser, its complaints, and the addresses that it asked for."""
    from playwright.sync_api import sync_playwright

    said, asked = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda one: one.type == "error" and said.append(one.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        yield page, said, asked
        browser.close()


def order(page, what):
    """Click the button of an action's page, and wait until the console has taken the action."""
    page.get_by_role("button", name=f"Yes, {what}").click()
    page.wait_for_url(lambda url: "/act/" not in url)


def test_a_person_acts_on_a_real_run_in_a_browser(place, tab):
    page, said, asked = tab
    # The checkpoint that the page shows exists until the button is clicked.
    script = place.job(training(NAN_ONCE, "pathlib.Path('finish').exists()", keep=1000))
    options = ["--name", "r", "--mode", "propose", "--healthy-after", "20"]
    run = place.start("run", *options, "--", "python", script)
    console = place.start("ui", "--port", "0", "--json")
    with run, console:
        link = json.loads(console.stdout.readline())["link"]
        base = link.partition("/enter")[0]
        page.goto(link)
        page.wait_for_url(f"{base}/")
        page.get_by_role("link", name="r", exact=True).first.click()

        page.get_by_text("Waits for an approval").wait_for()
        page.get_by_role("link", name="Approve…").click()
        page.get_by_text("go on from the newest healthy checkpoint").first.wait_for()
        order(page, "approve")
        page.goto(f"{base}/runs/r")
        page.locator("article.incident").wait_for()

        page.get_by_role("link", name="The cause is right…").click()
        order(page, "confirm")
        page.goto(f"{base}/incidents/1")
        page.locator("dd", has_text="confirmed:").wait_for()

        page.goto(f"{base}/nodes")
        page.get_by_label("Name, as the scheduler gives it").fill("node-7")
        page.get_by_role("button", name="Cordon…").click()
        page.get_by_label("The reason").fill("Xid 79")
        order(page, "cordon")
        page.goto(f"{base}/nodes")
        page.get_by_text("✗ cordoned").wait_for()

        with place.ledger() as ledger:
            place.wait_until(lambda: len(ledger.attempts("r")) == 2 and healthy_steps("r", ledger))
        page.goto(f"{base}/runs/r")
        page.get_by_role("link", name="Roll back…").click()
        step = int(page.locator("select[name=why]").input_value())
        order(page, "roll back")
        page.goto(f"{base}/runs/r")
        page.get_by_text(f"had the training go back to the checkpoint of step {step}.").wait_for()

        (place.folder / "finish").touch()
        _, err = run.communicate(timeout=240)
        assert run.returncode == 0, err
        page.locator("#live-head .completed").wait_for()
        console.terminate()
        console.communicate(timeout=60)
    assert said == []
    assert [url for url in asked if not url.startswith(base)] == []
    with place.ledger() as ledger:
        assert ledger.attempts("r")[-1].start_step == step
        (incident,) = ledger.incidents("r")
        assert incident.kind == "anomaly"
        assert [one.name for one in ledger.nodes() if one.cordoned_at_s] == ["node-7"]
        decided = ledger.events("r", kinds=("approved", "rollback_asked"))
    assert [one.kind for one in decided] == ["approved", "rollback_asked"]
    assert decided[-1].data["by"] == whoami()
