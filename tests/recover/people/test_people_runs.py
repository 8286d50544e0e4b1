"""Real runs of two ranks: what a person learns of their faults, and what waits for the person."""

import contextlib
import http.server
import json
import os
import signal
import threading

import pytest
from test_supervised_runs import QUICK_HANG, TRAIN

pytestmark = pytest.mark.slow


def train(faults):
    """Return the job with a fault of rank 1 after a step of an attempt each."""
    lines = "".join(
        f"    if (os.environ['HOLDFAST_ATTEMPT'], rank, step) == ('{attempt}', 1, {step}):\n        {fault}\n"
        for attempt, step, fault in faults
    )
    return TRAIN.replace("    if fault(step):\n        FAULT\n", lines)


# Rank 0 has made the step by then: what the run records does not depend on which rank is quicker.
KILL = """while not (at := pathlib.Path(f"at-{attempt}-0").read_text()) or int(at) < step:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)"""
FREEZE = "pathlib.Path('frozen').write_text(str(os.getpid())); os.kill(os.getpid(), signal.SIGSTOP)"


def events(place, kind, run="r"):
    with place.ledger() as ledger:
        return ledger.events(run, kind=kind)


@pytest.fixture
def inbox():
    """Return the URL of a real server for Apprise, its received requests, and its on/off flag."""
    received, answers = [], threading.Event()
    answers.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answers.wait(120)
            with contextlib.suppress(OSError):  # whoever sent it may be gone
                self.send_response(200)
                self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"json://127.0.0.1:{server.server_port}/hush-hush?rto=120", received, answers
    answers.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_run_with_faults_is_explained_accounted_for_and_told_of(place, inbox):
    url, received, _ = inbox
    script = place.job(train([(1, 8, KILL), (2, 13, FREEZE)]))
    command = ["run", "--name", "r", *QUICK_HANG, "--", *place.ranks(2, script)]
    environment = {**place.environment, "HOLDFAST_NOTIFY": url}
    with place.start(*command, environment=environment) as process:
        out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    told = place.json("explain")
    assert [one["what"] for one in told["chain"] if one["kind"] == "incident"] == [
        "Rank 1 was killed (SIGKILL)",
        "Rank 1 froze",
    ]
    for one in (one for one in told["chain"] if one["kind"] == "incident"):
        assert one["check"].startswith("Training resumed at step ")
        assert [decision["finding"]["kind"] for decision in one["decisions"]][-1] == "diagnosed"
        assert "the steps of all ranks" in one["signals"]["looked_at"]
        assert {"detection", "teardown", "diagnosis", "start", "steps_again"} <= set(one["lost"])
    assert told["lost_time"]["unexplained_share"] < 0.01
    assert told["lost_time"]["rank_s"] == pytest.approx(2 * told["wall_s"])
    titles = [one["title"] for one in received]
    assert titles == [
        "Holdfast: run r: Rank 1 was killed (SIGKILL)",
        "Holdfast: run r: Rank 1 froze",
    ]
    assert "GPU-hours" in received[0]["message"]
    assert "hush-hush" not in out + err
    kept = [path for path in place.home.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"hush-hush" in path.read_bytes()]


def test_a_message_of_a_supervisor_that_is_killed_is_sent_by_the_next_one(place, inbox):
    url, received, answers = inbox
    answers.clear()
    wait = "while not pathlib.Path('finish').exists(): time.sleep(0.01)"
    script = place.job(train([(1, 8, KILL), (2, 10, wait)]))
    command = ["run", "--name", "r", "--", *place.ranks(2, script)]
    environment = {**place.environment, "HOLDFAST_NOTIFY": url}
    with place.start(*command, environment=environment) as process:
        place.wait_until(lambda: len(received) == 1)
        assert events(place, "notified") == []
        place.child(process, "supervisor_process").kill()
        answers.set()
        place.wait_until(lambda: events(place, "notified"))
        (place.folder / "finish").touch()
        _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert [one["title"] for one in received] == [
        "Holdfast: run r: Rank 1 was killed (SIGKILL)"
    ] * 2
    assert [one.data["incidents"] for one in events(place, "notified")] == [[1]]


def test_a_frozen_job_is_ended_only_once_a_person_approves_it(place):
    script = place.job(train([(1, 8, FREEZE)]))
    command = ["run", "--name", "r", "--mode", "propose", *QUICK_HANG]
    with place.start(*command, "--", *place.ranks(2, script)) as process:
        place.wait_until(lambda: events(place, "proposal"))
        pid = int((place.folder / "frozen").read_text())
        os.kill(pid, 0)  # the rank is still there
        assert "This waits for `holdfast runs approve r`." in place.look("explain")[1]
        code, out, err = place.look("runs", "approve", "r")
        assert code == 0, err
        assert out.startswith("Approved: Rank 1 is frozen: ")
        _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert "Approve it by: holdfast runs approve r" in err
    with place.ledger() as ledger:
        (incident,) = ledger.incidents("r")
        assert len(ledger.attempts("r")) == 2
    assert (incident.kind, incident.rank, incident.action) == ("hang", 1, "restart")
    assert [one.data["plan"]["rule"] for one in events(place, "decision")] == [
        "propose",
        "approved",
        "restart",
    ]


def test_a_run_that_is_only_observed_goes_on_by_itself_and_ends_as_its_job_ends(place):
    script = place.job(train([(1, 8, FREEZE), (1, 13, KILL)]))
    command = ["run", "--name", "r", "--mode", "observe", *QUICK_HANG]
    with place.start(*command, "--", *place.ranks(2, script)) as process:
        place.wait_until(lambda: events(place, "observed"))
        os.kill(int((place.folder / "frozen").read_text()), signal.SIGCONT)
        _, err = process.communicate(timeout=180)
    assert process.returncode == 1, err
    with place.ledger() as ledger:
        (incident,) = ledger.incidents("r")
        assert len(ledger.attempts("r")) == 1
        assert ledger.run("r").state == "failed"
    assert (incident.kind, incident.step, incident.action) == ("exit", 13, "stop")
    assert "In the mode observe nothing is restarted." in incident.explanation
    rules = [one.data["plan"]["rule"] for one in events(place, "decision")]
    assert rules == ["note", "await-teardown", "observe"]


LEAVES = """
import os, pathlib, sys, time
import holdfast

run = holdfast.attach()
step = 0
while not pathlib.Path("finish").exists():
    step += 1
    time.sleep(0.05)
    run.step(step, loss=1 / step)
    if (os.environ["RANK"], step) == ("1", 8):
        sys.exit(0)
"""


def test_the_others_go_on_without_a_rank_that_left_unless_a_person_decides(place):
    script = place.job(LEAVES)
    command = ["run", "--name", "r", "--mode", "propose", "--", *place.ranks(2, script)]
    with place.start(*command) as process:
        place.wait_until(lambda: events(place, "proposal"))
        (place.folder / "finish").touch()
        _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    (held,) = events(place, "proposal")
    assert held.data["text"].startswith("Rank 1 has ended with code 0 in the middle")
    assert held.data["text"] in err
    with place.ledger() as ledger:
        assert ledger.run("r").state == "completed"
        assert ledger.incidents("r") == []
        assert len(ledger.attempts("r")) == 1
