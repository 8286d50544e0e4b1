"""The events for OpenTelemetry: a real HTTP server decodes them with OpenTelemetry's own schema."""

import http.server
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from holdfast.core.ledger import Event, Ledger
from holdfast.core.paths import ledger_url
from holdfast.ui.console import otlp

LIMIT_S = 240


class Collector:
    """A collector that can refuse, and keeps what it has accepted."""

    def __init__(self):
        self.requests, self.status = [], 200
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if collector.status == 200:
                    collector.requests.append(
                        (self.path, dict(self.headers), ExportLogsServiceRequest.FromString(body))
                    )
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def records(self):
        return [
            record
            for _, _, request in self.requests
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    @property
    def texts(self):
        return [one.body.string_value for one in self.records]


@pytest.fixture
def collector(monkeypatch):
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=mine")
    yield collector
    collector.close()


@pytest.fixture
def ledger(home):
    with Ledger.open(ledger_url(home)) as ledger:
        yield ledger


def add(ledger, text, kind="note"):
    ledger.add_event(
        Event(run_id="demo-1", attempt=2, at_s=1_790_000_500.5, kind=kind, rank=3, data={"text": text})
    )  # fmt: skip


def export(ledger, home, troubles=None):
    return otlp.EventExport(ledger, home, (troubles if troubles is not None else []).append)


def send(exporter):
    """Look twice, since a row waits for the second look, until nothing is left."""
    exporter.send_new()
    while exporter.send_new():
        pass


def test_new_events_and_incidents_are_sent_once_with_names_times_and_labels(
    collector, ledger, home
):
    exporter = export(ledger, home)
    send(exporter)
    assert collector.records == [], "what was there before is history"
    add(ledger, "Rank 3 is \x1b[31mslow.")
    add(ledger, "Rank 1 is frozen. Proposed: end the attempt.", kind="proposal")
    incident = ledger.incidents("demo-1")[0]
    ledger.add_incident(incident)
    send(exporter)
    send(exporter)
    path, headers, request = collector.requests[0]
    assert (path, headers["x-team"]) == ("/v1/logs", "mine")
    (resource,) = request.resource_logs
    named = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert named["service.name"] == "holdfast"
    note, proposal, failure = collector.records
    labels = {one.key: one.value for one in note.attributes}
    assert note.event_name == "holdfast.note"
    assert note.time_unix_nano == 1_790_000_500_500_000_000
    assert note.body.string_value == "Rank 3 is slow."
    assert labels["holdfast.run.id"].string_value == "demo-1"
    assert (labels["holdfast.attempt"].int_value, labels["holdfast.rank"].int_value) == (2, 3)
    assert (note.severity_text, proposal.severity_text, failure.severity_text) == (
        "INFO",
        "WARN",
        "ERROR",
    )
    assert failure.event_name == "holdfast.incident"
    assert incident.explanation in failure.body.string_value
    reasons = {one.key: one.value.string_value for one in failure.attributes}
    assert reasons["holdfast.incident.reason"] == incident.diagnosis["reason"]


def test_what_a_collector_refuses_is_sent_later_and_reported_once(collector, ledger, home):
    troubles = []
    exporter = export(ledger, home, troubles)
    send(exporter)
    add(ledger, "first")
    collector.status = 400
    send(exporter)
    send(exporter)
    assert len(troubles) == 1
    assert "sent later" in troubles[0]
    collector.status = 200
    send(exporter)
    assert collector.texts == ["first"]


def test_another_console_goes_on_where_the_first_was_ended(collector, ledger, home):
    send(export(ledger, home))
    add(ledger, "while no console was running")
    send(export(ledger, home))
    assert collector.texts == ["while no console was running"]


def test_more_events_than_a_batch_are_all_sent(collector, ledger, home):
    exporter = export(ledger, home)
    send(exporter)
    texts = [str(number) for number in range(otlp.BATCH_LIMIT + 7)]
    ledger.add_events(
        [Event(run_id="demo-1", attempt=1, at_s=1.0, kind="note", data={"text": text}) for text in texts]
    )  # fmt: skip
    send(exporter)
    assert collector.texts == texts
    assert len(collector.requests) == 2


def test_a_row_that_appears_below_a_newer_one_is_not_missed(collector, ledger, home):
    """In PostgreSQL the transaction with the lower id may end last."""
    exporter = export(ledger, home)
    send(exporter)
    add(ledger, "low")
    add(ledger, "high")
    low, high = (row[0] for row in rows(ledger)[-2:])
    hidden = rows(ledger, low)[0]
    with ledger._write() as connection:
        connection.exec_driver_sql("DELETE FROM events WHERE event_id = ?", (low,))
    exporter.send_new()  # sees `high`
    with ledger._write() as connection:
        marks = ",".join("?" * len(hidden))
        connection.exec_driver_sql(f"INSERT INTO events VALUES ({marks})", tuple(hidden))
    exporter.send_new()
    assert high > low
    assert collector.texts == ["low", "high"]


def rows(ledger, event_id=None):
    where = "" if event_id is None else f" WHERE event_id = {event_id}"
    with ledger.bounded_reading(60.0) as connection:
        return connection.exec_driver_sql(f"SELECT * FROM events{where} ORDER BY event_id").all()


@pytest.mark.parametrize("position", ["", "garbage", "999999 999999"])
def test_a_damaged_or_foreign_position_begins_at_the_present(collector, ledger, home, position):
    (home / otlp.POSITION_FILE).write_text(position)
    exporter = export(ledger, home)
    send(exporter)
    add(ledger, "new")
    send(exporter)
    assert collector.texts == ["new"]


def test_a_real_console_that_is_killed_goes_on_after_its_restart(collector, ledger, home, tmp_path):
    seen = []
    for text in ("before the kill", "after the kill"):
        with console(home, tmp_path / "console.log") as process:
            wait_for((home / otlp.POSITION_FILE).exists, process, tmp_path)
            add(ledger, text)
            wait_for(lambda text=text: text in collector.texts, process, tmp_path)
            seen.append(text)
            process.send_signal(signal.SIGKILL)
            process.wait()
    # At least once: the kill may have come before the position was written.
    assert list(dict.fromkeys(collector.texts)) == seen


def test_a_console_without_the_extra_says_so_and_serves(collector, home, tmp_path):
    log = tmp_path / "console.log"
    hidden = (
        "import sys; sys.modules['opentelemetry.exporter.otlp.proto.http._log_exporter'] = None\n"
    )
    code = f"{hidden}sys.argv = ['holdfast', 'ui', '--port', '0']\nfrom holdfast.cli.main import main\nmain()"
    with console(home, log, "-c", code) as process:
        wait_for(lambda: "enter#" in log.read_text(), process, tmp_path)
        assert re.search(r"pip install 'holdfast\[otel\]'", log.read_text())


class console:  # noqa: N801 - used as a function
    """A real console as a process, its output in a file."""

    def __init__(self, home, log, *arguments):
        self._arguments = arguments or ("-m", "holdfast.cli.main", "ui", "--port", "0")
        self._home, self._log = home, log

    def __enter__(self):
        env = {**os.environ, "HOLDFAST_HOME": str(self._home)}
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *self._arguments], stdout=output, stderr=output, env=env
            )
        return self.process

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def wait_for(is_true, process, tmp_path):
    for _ in range(LIMIT_S * 10):
        if is_true():
            return
        assert process.poll() is None, (tmp_path / "console.log").read_text()
        time.sleep(0.1)
    raise AssertionError((tmp_path / "console.log").read_text())
