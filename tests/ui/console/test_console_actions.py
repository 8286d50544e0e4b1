"""The actions: each once, recorded with who, and refused if the target has moved on."""

import pytest
import sample_runs
from console_home import open_console, propose

from holdfast.core.errors import BadUse
from holdfast.core.ledger import Attempt


@pytest.fixture
def console(tmp_path):
    with sample_runs.open_home(tmp_path) as ledger:
        sample_runs.faulty_run(ledger, tmp_path)
        going = sample_runs.Scribe(ledger, tmp_path, "going")
        going.begin()
        going.train(30)
        going.journal.close()
        propose(ledger, "going", 1)
    with open_console(tmp_path) as console:
        yield console


def recorded(console):
    return [
        one for one in console.get("/decisions.json").json()["decisions"] if one["from"] == "person"
    ]


@pytest.mark.parametrize(
    ("what", "target", "why"),
    [("stop", "going", ""), ("approve", "going", ""), ("restart", "demo-1", ""), ("confirm", "1", ""),
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


@pytest.mark.parametrize("what", ["stop", "approve"])
def test_a_stale_form_does_nothing(console, what):
    form = console.form(what, "going")
    console.ledger.add_attempt(Attempt(run_id="going", number=2, started_at_s=1_790_000_200.0))
    if what == "approve":
        propose(console.ledger, "going", 2, number=8)
    sent = console.act(what, form)
    assert sent.status_code == 409
    assert "moved on" in sent.text
    assert console.orders == []
    assert recorded(console) == []


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
