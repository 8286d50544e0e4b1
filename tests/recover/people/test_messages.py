"""Messages to people: their time, their text, and their delivery to a faulty real server."""

import asyncio
import http.server
import json
import threading

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.core.errors import BadUse
from holdfast.core.explanation import explain, explain_recent
from holdfast.core.ledger import Attempt, Event, Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.telemetry import StepJournal, StepRecord
from holdfast.recover.people import notifier, sender
from holdfast.recover.people.messages import (
    STORM_MAX_S,
    STORM_S,
    STUCK_S,
    Known,
    compose,
    due,
    proposal_due_s,
)
from holdfast.recover.people.notifier import Notifier
from holdfast.testing import FakeClock

PATIENCE_S = 120.0


def known(number, detected_at_s, over_at_s=None):
    return Known(incident_id=number, detected_at_s=detected_at_s, over_at_s=over_at_s)


def test_the_first_incident_has_its_message_once_it_is_over():
    assert due([], last_sent_s=None, now_s=9.0, is_over=False) == ((), None)
    ids, due_s = due([known(1, 5.0)], last_sent_s=None, now_s=9.0, is_over=False)
    assert (ids, due_s) == ((), 5.0 + STUCK_S)
    assert due([known(1, 5.0, 8.0)], last_sent_s=None, now_s=9.0, is_over=False) == ((1,), None)
    assert due([known(1, 5.0)], last_sent_s=None, now_s=9.0, is_over=True) == ((1,), None)


@pytest.mark.parametrize("last_sent_s", [None, 1.0])
def test_an_incident_after_which_nothing_trains_has_its_message_all_the_same(last_sent_s):
    stuck = [known(1, 5.0)]
    for_now = {"last_sent_s": last_sent_s, "is_over": False}
    assert due(stuck, now_s=4.0 + STUCK_S, **for_now) == ((), 5.0 + STUCK_S)
    assert due(stuck, now_s=5.0 + STUCK_S, **for_now) == ((1,), None)
    later = [known(1, 5.0, 8.0), known(2, 20.0)]
    assert due(later, now_s=30.0, **for_now) == ((), 20.0 + STUCK_S)
    assert due(later, now_s=20.0 + STUCK_S, **for_now) == ((1, 2), None)


def test_findings_of_one_kind_follow_each_other_at_some_distance():
    assert proposal_due_s("job_frozen", []) == 0.0
    told = [("job_frozen", 5.0), ("job_frozen", 9.0), ("loss_broken", 90.0)]
    assert proposal_due_s("job_frozen", told) == 9.0 + STORM_S
    assert proposal_due_s("rank_failed", told) == 0.0


def test_a_storm_has_one_message_once_it_is_calm():
    storm = [known(2, 20.0, 25.0), known(3, 30.0, 35.0)]
    ids, due_s = due(storm, last_sent_s=9.0, now_s=40.0, is_over=False)
    assert (ids, due_s) == ((), 35.0 + STORM_S)
    assert due(storm, last_sent_s=9.0, now_s=due_s, is_over=False) == ((2, 3), None)
    assert due(storm, last_sent_s=9.0, now_s=40.0, is_over=True) == ((2, 3), None)
    calm = [known(2, 9.0 + STORM_S, 9.0 + STORM_S + 5)]
    assert due(calm, last_sent_s=9.0, now_s=9.0 + STORM_S + 5, is_over=False)[0] == (2,)


def test_a_storm_that_does_not_end_has_a_message_each_hour():
    storm = [known(2, 20.0, 25.0), known(3, 3000.0, 3010.0), known(4, 3600.0)]
    assert due(storm, last_sent_s=9.0, now_s=3601.0, is_over=False) == ((), 25.0 + STORM_MAX_S)
    assert due(storm, last_sent_s=9.0, now_s=25.0 + STORM_MAX_S, is_over=False) == ((2, 3), None)


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.none() | st.floats(0, 1e3)), max_size=6),
    st.none() | st.floats(0, 1e4),
    st.floats(0, 2e4),
)
# The first incident to be over is not the first incident.
@example([(0.0, None), (0.0, 0.0), (3001.0, None)], None, 600.0)
def test_every_incident_that_is_over_is_sent_within_the_longest_storm(moments, last_sent_s, now_s):
    moments.sort(key=lambda one: one[0])
    unsent = [
        known(number, at_s, None if lasts_s is None else at_s + lasts_s)
        for number, (at_s, lasts_s) in enumerate(moments)
    ]
    ids, due_s = due(unsent, last_sent_s=last_sent_s, now_s=now_s, is_over=False)
    over = [one for one in unsent if one.over_at_s is not None]
    stuck = [
        one for one in unsent if one.over_at_s is None and one.detected_at_s + STUCK_S <= now_s
    ]
    assert set(ids) <= {one.incident_id for one in over + stuck}
    if over and not ids:
        assert due_s is not None
        assert now_s < due_s <= over[0].over_at_s + STORM_MAX_S
    if unsent and not ids:
        assert due_s > now_s
    everything, _ = due(unsent, last_sent_s=last_sent_s, now_s=now_s, is_over=True)
    assert list(everything) == [one.incident_id for one in unsent]


DIAGNOSIS = {
    "reason": "Others",
    "decided_by": ["observer-killed"],
    "confidence": 0.9,
    "root_line": {"file": "f", "line": 1, "text": "holdfast: rank 1 was killed by SIGKILL"},
    "evidence": [{"role": "root", "file": "f", "line": 1, "text": "rank 1 was killed by SIGKILL"}],
    "mitigation": "",
}


@pytest.fixture
def run(tmp_path):
    """A run whose first attempt has failed and whose second one trains: its ledger and paths."""
    paths = RunPaths(tmp_path, "r")
    paths.logs.mkdir(parents=True)
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        ledger.add_run(
            Run(
                run_id="r",
                state="running",
                command=["python"],
                options={"nproc": 2},
                cwd="/",
                host="h",
                pid=1,
                started_at_s=1000.0,
            )
        )
        for number, at_s in ((1, 1000.0), (2, 1022.0)):
            ledger.add_attempt(
                Attempt(run_id="r", number=number, started_at_s=at_s, ended_at_s=at_s + 21)
            )
        with StepJournal(paths.steps) as journal:
            for number, step, at_s in ((1, 9, 1019.0), (2, 6, 1025.0)):
                record = {"at_s": at_s, "step_s": 1.0, "loss": None, "metrics": {}}
                journal.append(StepRecord(attempt=number, rank=0, step=step, **record))
        yield ledger, paths


def fail(ledger, attempt=1, at_s=1020.0, **more):
    usual = {"action": "restart", "resumed_at_s": at_s + 5, "restored_step": 5}
    return ledger.add_incident(
        Incident(
            run_id="r",
            attempt=attempt,
            kind="exit",
            rank=1,
            step=9,
            fault_at_s=at_s,
            detected_at_s=at_s,
            diagnosis=DIAGNOSIS,
            **(usual | more),
        )
    )


def test_a_message_has_cause_evidence_action_and_cost(run):
    ledger, paths = run
    fail(ledger)
    ledger.add_event(
        Event(run_id="r", attempt=1, at_s=1020.0, kind="rank_exited", rank=1, data={"signal": 9})
    )
    story = explain(ledger, paths.home, "r")
    title, body = compose(story, [1], ["Rank 0 is frozen."])
    assert title == "Holdfast: run r: Rank 1 was killed (SIGKILL)"
    assert body.splitlines()[0] == "Rank 0 is frozen. Approve it by: holdfast runs approve r"
    for said in (
        "Cause: rank 1 was killed by SIGKILL.",
        "Evidence: f:1: rank 1 was killed by SIGKILL",
        "Done: Every process of the job was ended, and the job went on from step 5.",
        "Effect: Training resumed at step 6, 5.0 s after the detection",
        "GPU-hours: ",
        "More: holdfast explain r",
    ):
        assert said in body


def test_a_storm_is_summed_up_in_one_message_of_bounded_length(run):
    ledger, paths = run
    ids = [fail(ledger, at_s=1020.0 + number) for number in range(40)]
    title, body = compose(explain(ledger, paths.home, "r"), ids, [])
    assert title == "Holdfast: run r: 40 incidents"
    assert "40 times: rank 1 was killed by SIGKILL." in body
    assert "Lost in all: " in body
    assert len(body) <= 4000


def test_a_message_from_a_part_of_the_journal_has_the_same_costs_or_none(run):
    ledger, paths = run
    with StepJournal(paths.steps) as journal:
        for step in range(7, 200):
            record = {"step_s": 0.1, "loss": None, "metrics": {}}
            journal.append(
                StepRecord(attempt=2, rank=0, step=step, at_s=1025 + step / 10, **record)
            )
        size_bytes = paths.steps.stat().st_size
        fail(ledger, attempt=2, at_s=1045.0, resumed_at_s=1050.0, restored_step=150)
    fail(ledger, attempt=2, at_s=1046.0, resumed_at_s=1051.0, restored_step=5)
    whole, _ = explain_recent(ledger, paths.home, "r", [1], journal_bytes=size_bytes)
    for journal_bytes, incident, is_right in (
        (size_bytes, 1, True),
        (size_bytes, 2, True),
        (size_bytes // 2, 1, True),
        (size_bytes // 2, 2, False),
        (0, 1, False),
    ):
        story, has_costs = explain_recent(
            ledger, paths.home, "r", [incident], journal_bytes=journal_bytes
        )
        assert has_costs is is_right, (journal_bytes, incident)
        if has_costs:
            assert story.incidents[incident - 1].lost == pytest.approx(
                whole.incidents[incident - 1].lost
            )
    _, body = compose(story, [1], [], has_costs=False)
    assert "Lost: not computed here, since the run has too many steps" in body
    assert "GPU-hours" not in body


def test_a_finding_that_is_only_observed_says_that_nothing_was_done(run):
    ledger, paths = run
    title, body = compose(explain(ledger, paths.home, "r"), [], [], notes=["Rank 0 is frozen."])
    assert title == "Holdfast: run r: a finding, and nothing was done"
    assert body.splitlines()[0] == "Rank 0 is frozen. Nothing was done, since the mode is observe."


def test_a_message_about_saves_alone_says_so_in_its_title(run):
    ledger, paths = run
    title, body = compose(explain(ledger, paths.home, "r"), [], [], alerts=["/c is full"])
    assert title == "Holdfast: run r: a checkpoint could not be saved as planned"
    assert body.splitlines()[0] == "Checkpoints: /c is full."


class Server:
    """A real HTTP server with prepared answers."""

    def __init__(self):
        self.received, self.status = [], 200
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.received.append(json.loads(body))
                self.send_response(server.status)
                self.end_headers()

            def log_message(self, *_):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://127.0.0.1:{self._http.server_port}/secret-path"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def order(ledger, paths, *urls):
    return {
        "ledger": ledger.url,
        "home": str(paths.home),
        "run": "r",
        "incidents": [1],
        "proposals": [],
        "notes": [],
        "alerts": [],
        "journal_bytes": notifier.JOURNAL_BYTES,
        "urls": list(urls),
    }


def test_a_process_of_its_own_sends_to_each_service_and_names_those_that_fail(run, server):
    ledger, paths = run
    fail(ledger)
    closed = Server()
    closed.close()
    answer = asyncio.run(notifier.send_in_process(order(ledger, paths, server.url, closed.url)))
    assert answer["failed"] == [1]
    assert answer["why"] == "URL 2 (json://…): the service refused it or cannot be reached"
    (message,) = server.received
    assert message["title"] == "Holdfast: run r: Rank 1 failed"
    assert "More: holdfast explain r" in message["message"]


def test_a_sender_that_does_not_end_is_killed_and_one_that_fails_is_told(run, monkeypatch):
    ledger, paths = run
    monkeypatch.setattr(notifier, "SEND_LIMIT_S", 0.0)
    answer = asyncio.run(notifier.send_in_process(order(ledger, paths, "json://x")))
    assert answer == {"failed": [0], "why": "no answer within 0 s", "is_late": True}
    monkeypatch.setattr(notifier, "SEND_LIMIT_S", PATIENCE_S)
    unreadable = {**order(ledger, paths, "json://x"), "ledger": "nonsense://"}
    assert asyncio.run(notifier.send_in_process(unreadable))["failed"] == [0]


@pytest.mark.filterwarnings("ignore:'imghdr':DeprecationWarning")  # of Apprise's own imports
@pytest.mark.parametrize("url", ["nonsense://secret@x", "secret", "://", "json:/secret"])
def test_a_wrong_url_is_refused_with_a_sentence_that_keeps_its_secret(url):
    with pytest.raises(BadUse, match="--notify: URL 2") as error:
        sender.check_urls(["json://localhost", url])
    assert "secret" not in str(error.value)


class Outbox:
    """A sender with prepared results, which keeps its messages."""

    def __init__(self, *failures):
        self.orders, self._failures = [], list(failures)

    async def __call__(self, order):
        self.orders.append(order)
        failed = self._failures.pop(0) if self._failures else []
        return {"failed": failed, "why": "it is away" if failed else ""}


def notify(run, outbox, *, urls=("json://a", "json://b"), anew=True, clock=None, then=lambda: None):
    """Run a notifier from its start over `then` to the end of the run; return its complaints."""
    ledger, paths = run
    complaints = []

    async def live():
        told = Notifier(
            urls,
            paths,
            ledger,
            lambda kind, data: complaints.append(data["text"]),
            clock=clock or FakeClock(1010.0),
            send=outbox,
        )
        told.start(anew=anew)
        then()
        for kind in ("resolved", "resumed", "step", "ended"):
            told.observed(kind)
        async with asyncio.timeout(PATIENCE_S):
            await told.close(leads=True)

    asyncio.run(live())
    return complaints


def kinds(run):
    return [(one.kind, one.data) for one in run[0].events("r") if one.kind.startswith("noti")]


def test_a_message_goes_to_all_and_is_recorded_once(run):
    outbox = Outbox()
    assert notify(run, outbox, then=lambda: fail(run[0])) == []
    (sent,) = outbox.orders
    assert (sent["incidents"], sent["urls"]) == ([1], ["json://a", "json://b"])
    assert kinds(run) == [("notify_on", {}), ("notified", {"incidents": [1], "proposals": []})]
    assert "json" not in json.dumps(kinds(run))
    notify(run, outbox, anew=False)
    assert len(outbox.orders) == 1


def test_the_message_about_a_broken_loss_waits_for_the_replay(run):
    ledger, paths = run
    incident_id = fail(ledger)
    told = Notifier(("json://a",), paths, ledger, lambda *_: None, clock=FakeClock(1030.0))

    def event(kind, **data):
        ledger.add_event(Event(run_id="r", attempt=1, at_s=1020.0, kind=kind, data=data))

    event("replay", incident_id=incident_id)
    assert told._due(False)[0] == ()
    event("anomaly_class", incidents=[incident_id])
    assert told._due(False)[0] == (incident_id,)


def test_only_the_services_that_failed_are_tried_again_and_not_for_ever(run, monkeypatch):
    monkeypatch.setattr(notifier, "RETRIES_S", (0.0, 0.0))
    outbox = Outbox([1], [0], [0])
    complaints = notify(run, outbox, then=lambda: fail(run[0]))
    assert [one["urls"] for one in outbox.orders] == [
        ["json://a", "json://b"],
        ["json://b"],
        ["json://b"],
    ]
    assert complaints == ["A message could not be sent: it is away."]
    assert kinds(run)[-1] == (
        "notify_failed",
        {"incidents": [1], "proposals": [], "why": "it is away"},
    )


def test_the_supervisor_after_a_killed_one_sends_what_that_one_has_not_sent(run):
    outbox = Outbox()
    run[0].add_event(Event(run_id="r", attempt=1, at_s=1010.0, kind="notify_on"))
    fail(run[0])
    notify(run, outbox, anew=False)
    assert [one["incidents"] for one in outbox.orders] == [[1]]


def test_what_happened_before_a_person_started_the_run_is_not_sent(run):
    fail(run[0])
    outbox = Outbox()
    notify(run, outbox, clock=FakeClock(1500.0))
    assert outbox.orders == []
    notify(run, outbox, urls=(), then=lambda: fail(run[0], at_s=1600.0))
    assert outbox.orders == []


def test_a_proposal_is_sent_at_once_and_once(run):
    ledger, paths = run
    outbox = Outbox()

    async def live():
        told = Notifier(["json://a"], paths, ledger, pytest.fail, clock=FakeClock(), send=outbox)
        told.start(anew=True)
        data = {"number": 1, "text": "Rank 1 is frozen."}
        ledger.add_event(Event(run_id="r", attempt=2, at_s=1.0, kind="proposal", data=data))
        told.observed("proposal")
        async with asyncio.timeout(PATIENCE_S):
            while len(ledger.events("r", kind="notified")) == 0:
                await asyncio.sleep(0.01)
            await told.close(leads=True)

    asyncio.run(live())
    assert [one["proposals"] for one in outbox.orders] == [["Rank 1 is frozen."]]


def test_a_service_that_hangs_at_the_end_is_given_up_and_the_run_ends(run, monkeypatch):
    # Long enough for the first try, also on a machine that stands still for seconds.
    monkeypatch.setattr(notifier, "CLOSE_S", 5.0)

    async def hang(order):
        await asyncio.Event().wait()

    complaints = notify(run, hang, then=lambda: fail(run[0]))
    assert len(complaints) == 1
    assert "no answer yet; the run has ended, and there is no more time" in complaints[0]
    assert kinds(run)[-1][0] == "notify_failed"


def test_the_last_reason_is_kept_where_there_is_no_more_time(run, monkeypatch):
    # Long enough for the first answer, also on a machine that stands still for seconds.
    monkeypatch.setattr(notifier, "CLOSE_S", 5.0)
    outbox = Outbox([0, 1], [0, 1], [0, 1])
    monkeypatch.setattr(notifier, "LAST_WAIT_S", PATIENCE_S)
    complaints = notify(run, outbox, then=lambda: fail(run[0]))
    (complaint,) = complaints
    assert complaint.startswith("A message could not be sent: it is away; the run has ended")
    assert kinds(run)[-1][1]["why"].startswith("it is away; ")


def test_a_run_that_has_ended_waits_only_a_little_before_another_try(run, monkeypatch):
    monkeypatch.setattr(notifier, "RETRIES_S", (PATIENCE_S * 10, PATIENCE_S * 10))
    monkeypatch.setattr(notifier, "CLOSE_S", PATIENCE_S)
    monkeypatch.setattr(notifier, "LAST_WAIT_S", 0.0)
    outbox = Outbox([0, 1], [1])
    assert notify(run, outbox, then=lambda: fail(run[0])) == []
    assert [len(one["urls"]) for one in outbox.orders] == [2, 2, 1]


def test_after_a_try_that_took_too_long_the_journal_is_not_read(run, monkeypatch):
    monkeypatch.setattr(notifier, "RETRIES_S", (0.0,))
    seen = []

    async def late(order):
        seen.append(order["journal_bytes"])
        return {"failed": [0], "why": "no answer", "is_late": True}

    notify(run, late, urls=["json://a"], then=lambda: fail(run[0]))
    assert seen == [notifier.JOURNAL_BYTES, 0]


@pytest.mark.parametrize(
    ("kind", "key", "finding", "sent"),
    [
        ("proposal", "proposals", "job_frozen", 1),
        ("proposal", "proposals", "loss_broken", 2),
        ("observed", "notes", "job_frozen", 1),
    ],
)
def test_a_job_that_stands_still_again_and_again_is_one_message(run, kind, key, finding, sent):
    ledger, paths = run
    outbox, clock = Outbox(), FakeClock(2000.0)

    def add(number, finding):
        data = {"number": number, "text": f"Finding {number}.", "finding": finding}
        at_s = clock.now_s()
        ledger.add_event(Event(run_id="r", attempt=2, at_s=at_s, kind=kind, data=data))

    async def live():
        told = Notifier(["json://a"], paths, ledger, pytest.fail, clock=clock, send=outbox)
        add(1, "job_frozen")
        told.start(anew=True)
        async with asyncio.timeout(PATIENCE_S):
            while not ledger.events("r", kind="notified"):
                await asyncio.sleep(0.01)
            add(2, finding)
            await told.close(leads=True)

    asyncio.run(live())
    assert [one[key] for one in outbox.orders] == [["Finding 1."], ["Finding 2."]][:sent]


FULL = {"folder": "/c", "deleted": "/c/step-10", "size_bytes": 9}
FAILED = {"step": 20, "reason": "No space left.", "errno": 28}


def test_saves_that_fail_have_a_message_at_once_and_then_one_in_a_while(run):
    ledger, paths = run
    outbox, clock = Outbox(), FakeClock(2000.0)

    def add(kind, data):
        ledger.add_event(Event(run_id="r", attempt=2, at_s=clock.now_s(), kind=kind, data=data))

    async def live():
        told = Notifier(["json://a"], paths, ledger, pytest.fail, clock=clock, send=outbox)
        told.start(anew=True)
        clock.advance(1.0)
        add("disk_full", FULL)
        told.observed("disk_full")
        async with asyncio.timeout(PATIENCE_S):
            while not ledger.events("r", kind="notified"):
                await asyncio.sleep(0.01)
            clock.advance(1.0)
            for _ in range(2):
                add("save_failed", FAILED)
            told._wake.set()
            assert told._due(False)[1].alerts == (), "within STORM_S"
            assert told._due(False)[2] == 2001.0 + STORM_S
            assert len(outbox.orders) == 1
            await told.close(leads=True)

    asyncio.run(live())
    assert [one["alerts"] for one in outbox.orders] == [
        ["/c is full: /c/step-10 was deleted to make room"],
        ["2 times, the last time: training goes on after a failed save: No space left."],
    ]
    notify(run, outbox, anew=False, clock=clock)
    assert len(outbox.orders) == 2


def test_an_event_of_the_script_with_the_kind_of_a_failed_save_is_a_message_too(run):
    ledger, _ = run
    outbox, clock = Outbox(), FakeClock(2000.0)

    def emit():
        clock.advance(1.0)
        event = Event(run_id="r", attempt=2, at_s=clock.now_s(), kind="save_failed", data={"x": 1})
        ledger.add_event(event)

    assert notify(run, outbox, urls=["json://a"], clock=clock, then=emit) == []
    assert [one["alerts"] for one in outbox.orders] == [["the script reported save_failed"]]


def test_a_notifier_that_breaks_is_a_complaint_and_nothing_more(run):
    async def broken(order):
        raise ValueError("odd answer")

    complaints = notify(run, broken, then=lambda: fail(run[0]))
    assert complaints == ["A message could not be sent: ValueError('odd answer')."]
