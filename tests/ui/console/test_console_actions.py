"""The actions: each once, recorded with who, and refused if the target has moved on."""

import queue
import signal
import subprocess
import sys

import pytest
import sample_runs
from console_home import open_console, propose

from holdfast.core.errors import BadUse
from holdfast.core.ledger import ActionRecord, Attempt, Event
from holdfast.ui.console.acting import ACTIONS_LIMIT
from holdfast.ui.console.stream import Hub


@pytest.fixture
def console(home):
    with sample_runs.open_home(home) as ledger:
        ledger.set_run("demo-1", state="failed")
        going = sample_runs.Scribe(ledger, home, "going")
        going.begin()
        going.train(30)
        going.journal.close()
        propose(ledger, "going", 1)
    with open_console(home) as console:
        yield console


def recorded(console):
    return [
        one for one in console.get("/decisions.json").json()["decisions"] if one["from"] == "person"
    ]


@pytest.mark.parametrize(
    ("what", "target", "why"),
    [("stop", "going", ""), ("approve", "going", ""), ("roll-back", "going", "20"),
     ("restart", "demo-1", ""), ("confirm", "1", ""),
     ("correct", "1", "CUDA Error"), ("cordon", "node-3", "It is hot.")],
)  # fmt: skip
def test_an_action_is_carried_out_once_and_recorded_with_who(console, what, target, why):
    form = console.form(what, target)
    sent = console.act(what, form, why=why)
    assert sent.status_code == 303
    again = console.act(what, form, why=why)
    assert again.status_code == 303, "the same form sent twice is one action"
    assert [(name, order.target, order.why, order.by) for name, order in console.orders] == [
        (what, target, why, "ada")
    ]
    (told,) = recorded(console)
    assert (told["who"], told["what"], told["why"]) == ("ada from testclient", what, why)
    assert told["outcome"] == f"done: {what}: done"


def test_the_page_of_an_action_states_its_consequence(console):
    page = console.get("/act/stop?target=going").text
    assert "Every rank saves its state" in page
    assert "attempt 1" in page
    assert "The newest usable checkpoint is of step 20." in page
    assert "Rank 1 is frozen." in console.get("/act/approve?target=going").text


def test_a_roll_back_offers_the_healthy_checkpoints(console):
    assert 'href="/act/roll-back?target=going"' in console.get("/runs/going").text
    page = console.get("/act/roll-back?target=going").text
    assert "<h1>Roll back going?</h1>" in page
    assert "<option>20</option><option>10</option>" in page
    sent = console.act("roll-back", console.form("roll-back", "going"))
    assert (sent.status_code, "Choose a step." in sent.text) == (400, True)
    console.healthy_steps = ()
    page = console.get("/act/roll-back?target=going")
    assert page.status_code == 400
    assert "no healthy checkpoint to go back to" in page.text
    refused = console.get("/act/roll-back?target=demo-1")
    assert refused.status_code == 400
    assert "Only a run that runs and has a checkpoint can go back." in refused.text


@pytest.mark.parametrize("what", ["stop", "approve"])
def test_a_stale_form_does_nothing(console, what):
    form = console.form(what, "going")
    console.ledger.add_attempt(Attempt(run_id="going", number=2, started_at_s=1_790_000_200.0))
    if what == "approve":
        propose(console.ledger, "going", 2, number=8)
    sent = console.act(what, form)
    assert sent.status_code == 409
    assert "has changed since the page was shown" in sent.text
    assert console.orders == []
    assert recorded(console) == []


def test_a_second_stop_says_that_nothing_is_saved_and_needs_a_form_of_its_own(console):
    early = console.form("stop", "going")
    console.ledger.add_event(
        Event(run_id="going", attempt=1, at_s=1_790_000_200.0, kind="stop_asked", data={"by": "grace"})
    )  # fmt: skip
    assert console.act("stop", early).status_code == 409
    assert console.orders == []
    assert "without saving" in console.get("/act/stop?target=going").text
    assert console.act("stop", console.form("stop", "going")).status_code == 303


def test_two_forms_of_a_stop_that_were_open_at_once_stop_once(console):
    first, second = console.form("stop", "going"), console.form("stop", "going")
    console.ledger.add_action(
        ActionRecord(key=first["key"], at_s=1_790_000_900.0, by="grace", address="x", what="stop",
                     target="going", why="", seen=first["seen"])
    )  # fmt: skip
    assert console.act("stop", second).status_code == 409
    assert console.orders == []


@pytest.mark.parametrize(
    ("what", "target", "state"),
    [("restart", "going", "running"), ("restart", "demo-1", "completed"), ("stop", "demo-1", "failed")],
)  # fmt: skip
def test_an_action_that_the_state_does_not_allow_is_refused(console, what, target, state):
    allowed = console.form(
        "stop" if what == "restart" else "restart", "going" if what == "restart" else "demo-1"
    )
    console.ledger.set_run(target, state=state)
    assert console.get(f"/act/{what}?target={target}").status_code == 400
    sent = console.act(what, {**allowed, "target": target})
    assert sent.status_code == 400
    assert f"Run {target} is {state}." in sent.text
    assert console.orders == []


def test_an_action_whose_console_was_killed_is_not_known_to_be_carried_out(console):
    # The child is a console that records the action and is killed before the result.
    code = (
        "import os, signal, sys\n"
        "from holdfast.core.ledger import ActionRecord, Ledger\n"
        "ledger = Ledger.open(sys.argv[1])\n"
        "ledger.add_action(ActionRecord(key='b' * 32, at_s=1.0, by='ada', address='x', what='cordon',\n"
        "                               target='node-1', why='hot', seen=''))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, console.ledger.url], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert recorded(console)[0]["outcome"].startswith("unknown whether it was carried out")


def test_long_actions_delay_no_page_and_have_a_limit(console, monkeypatch):
    monkeypatch.setattr("holdfast.ui.console.acting.ANSWER_S", 0.0)
    with console.held():
        for number in range(ACTIONS_LIMIT):
            form = console.form("cordon", f"node-{number}")
            assert console.act("cordon", form, why="hot").headers["location"] == "/decisions"
        assert console.get("/").status_code == 200
        assert {one["outcome"] for one in recorded(console)} == {"under way"}
        form = console.form("cordon", "one-more")
        assert "are under way" in console.act("cordon", form, why="hot").text


def test_browsers_receive_the_end_of_a_long_action(home, monkeypatch):
    announced = queue.Queue()
    monkeypatch.setattr("holdfast.ui.console.acting.ANSWER_S", 0.0)
    monkeypatch.setattr(Hub, "announce", lambda _, target: announced.put(target))
    with open_console(home) as console:
        with console.held():
            console.act("cordon", console.form("cordon", "node-3"), why="hot")
            assert announced.empty()
        assert announced.get(timeout=60) == "node-3"
        assert recorded(console)[0]["outcome"] == "done: cordon: done"


def test_a_new_supervisor_makes_a_form_stale(console):
    form = console.form("stop", "going")
    lead = console.ledger.lead("going")
    assert console.ledger.take_lead(lead, "node-b") is not None
    assert console.act("stop", form).status_code == 409
    assert console.orders == []


def test_a_cordon_that_somebody_else_made_meanwhile_is_seen(console):
    form = console.form("cordon", "node-3")
    console.ledger.cordon("node-3", at_s=5.0, by="grace", why="loose cable")
    assert console.act("cordon", form, why="hot").status_code == 409
    assert "grace" in console.get("/act/return?target=node-3").text


def test_a_refused_action_says_why_and_is_recorded(console):
    console.refusal = BadUse("Run going is not going.")
    sent = console.act("stop", console.form("stop", "going"))
    assert sent.status_code == 409
    assert "Run going is not going." in sent.text
    assert recorded(console)[0]["outcome"] == "refused: Run going is not going."


@pytest.mark.parametrize(
    ("what", "change"),
    [("stop", {"key": ""}), ("stop", {"key": "é" * 32}), ("cordon", {"why": ""}), ("cordon", {"why": "a\nb"}),
     ("cordon", {"why": "x" * 300}), ("stop", {"target": ""}), ("confirm", {"target": "1e3"})],
)  # fmt: skip
def test_a_malformed_form_does_nothing(console, what, change):
    target = {"stop": "going", "cordon": "node-3", "confirm": "1"}[what]
    form = {"why": "hot", **console.form(what, target), **change}
    assert console.act(what, form).status_code == 400
    assert console.orders == []


def test_the_audit_is_paged_and_shows_every_entry_once(console):
    for number in range(60):
        propose(console.ledger, "going", 1, number=number, text=f"proposal {number}")
        if number % 3 == 0:
            assert (
                console.act(
                    "cordon", console.form("cordon", f"node-{number}"), why="hot"
                ).status_code
                == 303
            )
    token, seen = "", []
    while token is not None:
        told = console.get("/decisions.json", params={"next": token}).json()
        seen += [(one["from"], one["key"]) for one in told["decisions"]]
        token = told["next"]
    assert len(seen) == len(set(seen)) == 60 + 20 + 1
