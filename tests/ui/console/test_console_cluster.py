"""The page Cluster: the trace report of the ledger, made again after a change, never in a request."""

import queue
import time

import pytest
from console_home import FILES, FINDINGS, open_console, propose

from holdfast.cli.main import Place
from holdfast.cli.ui import backend_of
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url
from holdfast.ui import ClusterReport
from holdfast.ui.console.cluster_page import TARGET, ClusterPages
from holdfast.ui.console.stream import Hub

TIMEOUT_S = 60.0


@pytest.fixture
def console(home):
    with open_console(home) as console:
        yield console


class Maker:
    """A backend whose reports the test gives, and the pages over the backend."""

    def __init__(self, ledger):
        self.ledger = ledger
        self.began = queue.Queue()
        self.given = queue.Queue()
        self.announced = queue.Queue()
        self.pages = ClusterPages(self, self.announced.put, rest_s=0.0)

    def cluster_report(self):
        self.began.put(True)
        found = self.given.get(timeout=TIMEOUT_S)
        if isinstance(found, Exception):
            raise found
        return ClusterReport(findings={"answer": found}, files={f"{found}.svg": b"<svg/>"})

    def next_page(self):
        assert self.announced.get(timeout=TIMEOUT_S) == TARGET
        return self.pages.page()


@pytest.fixture
def maker(home):
    with Ledger.open(ledger_url(home)) as ledger:
        yield Maker(ledger)


def test_a_report_is_made_once_for_a_state_of_the_ledger(maker):
    first = maker.pages.page()
    assert (first["report"], first["is_current"], first["trouble"]) == (None, False, "")
    maker.pages.page()  # no second report is begun beside the first
    maker.given.put("one")
    found = maker.next_page()
    assert found["report"] == {"answer": "one"}
    assert found["is_current"]
    assert maker.announced.empty()
    assert maker.given.empty()
    assert maker.pages.file("one.svg") == b"<svg/>"
    assert maker.pages.file("../one.svg") is None


def test_the_report_before_stays_while_the_next_is_made(maker):
    maker.pages.page()
    maker.given.put("one")
    maker.next_page()
    propose(maker.ledger, "demo-1", 1)
    stale = maker.pages.page()
    assert (stale["report"], stale["is_current"]) == ({"answer": "one"}, False)
    maker.given.put("two")
    found = maker.next_page()
    assert (found["report"], found["is_current"]) == ({"answer": "two"}, True)


def test_a_change_during_a_report_makes_another_report(maker):
    maker.pages.page()
    maker.began.get(timeout=TIMEOUT_S)
    propose(maker.ledger, "demo-1", 1)
    maker.given.put("one")
    found = maker.next_page()
    assert (found["report"], found["is_current"]) == ({"answer": "one"}, False)
    maker.given.put("two")
    assert maker.next_page()["report"] == {"answer": "two"}


def test_a_failed_report_states_the_reason_beside_the_report_before(maker):
    maker.pages.page()
    maker.given.put(HoldfastError("It holds no run that was started."))
    failed = maker.next_page()
    assert failed["trouble"] == "It holds no run that was started."
    assert (failed["report"], failed["made_at_s"]) == (None, None)
    propose(maker.ledger, "demo-1", 1)
    maker.pages.page()
    maker.given.put("one")
    found = maker.next_page()
    assert (found["trouble"], found["report"]) == ("", {"answer": "one"})
    propose(maker.ledger, "demo-1", 1)
    maker.pages.page()
    maker.given.put(ZeroDivisionError("a bug"))
    failed = maker.next_page()
    assert failed["report"] == {"answer": "one"}
    assert failed["made_at_s"] == found["made_at_s"]
    assert "ZeroDivisionError" in failed["trouble"]


def test_a_report_rests_after_a_report(maker):
    maker.pages._rest_s = 3600.0
    maker.pages.page()
    maker.given.put("one")
    maker.next_page()
    propose(maker.ledger, "demo-1", 1)
    maker.given.put("two")
    assert not maker.pages.page()["is_current"]
    assert maker.pages._next_at_s - time.monotonic() > 1800
    assert maker.given.qsize() == 1


def test_a_new_report_reaches_the_browsers(maker):
    hub = Hub(maker.ledger)
    hub._look()
    hub.announce(TARGET)
    assert hub._look().targets == {TARGET}
    assert hub._look() is None


def until_reported(console):
    console.get("/cluster")
    while (page := console.get("/cluster.json").json())["report"] is None and not page["trouble"]:
        time.sleep(0.01)
    return page


def test_the_page_shows_the_report_its_figures_and_their_numbers(console):
    assert "being made" in console.get("/cluster").text
    page = until_reported(console)
    assert page["report"] == FINDINGS
    text = console.get("/cluster").text
    for one in (
        "holdfast gave 7 GPU-hours",
        "Test the nodes.",
        "NVLink Error",
        "How long jobs run",
        "No telemetry.",
    ):
        assert one in text
    assert "1 &lt;b&gt;failure&lt;/b&gt;." in text
    assert 'src="/cluster/durations.svg?at=' in text
    drawing = console.get("/cluster/durations.svg")
    assert (drawing.content, drawing.headers["content-type"]) == (
        FILES["durations.svg"],
        "image/svg+xml",
    )
    assert console.get("/cluster/durations.csv").text == "a,b\n"
    for name in ("power.svg", "%2e%2e%2fledger.db", "..%2f..%2fledger.db"):
        assert console.get(f"/cluster/{name}").status_code == 404


def test_the_page_states_why_there_is_no_report(console):
    console.report = HoldfastError("This needs duckdb. Run: pip install 'holdfast[trace]'")
    until_reported(console)
    assert "This needs duckdb." in console.get("/cluster").text


def test_the_report_and_its_files_need_a_session(home):
    with open_console(home, signed_in=False) as console:
        assert console.get("/cluster.json").status_code == 401
        assert "Sign in" in console.get("/cluster/durations.svg").text


def test_the_reason_of_the_trace_report_reaches_the_page(tmp_path):
    place = Place(tmp_path, ledger_url(tmp_path))
    with Ledger.open(place.ledger) as ledger:
        report = backend_of(place, ledger).cluster_report
        with pytest.raises(HoldfastError, match="no run that was started"):
            report()
