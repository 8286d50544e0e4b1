"""`holdfast nodes` in process: its output and its exit codes."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from holdfast.cli.main import cli
from holdfast.core.errors import BadUse, LedgerError, NotFound
from holdfast.core.ledger import Ledger, Verdict
from holdfast.core.paths import ledger_url
from holdfast.recover.localise import solo


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_NODE_NAME", "n1")
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        yield ledger


def answer(*arguments):
    result = CliRunner().invoke(cli, ["nodes", *arguments], standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.return_value, result.output


def test_nodes_are_listed_cordoned_and_returned(ledger):
    assert "holdfast nodes check" in answer("ls")[1]
    assert "n7 is cordoned" in answer("cordon", "n7", "--why", "fan")[1]
    assert "fan" in answer("ls")[1]
    (node,) = json.loads(answer("ls", "--json")[1])["nodes"]
    assert (node["id"], node["why"], node["verdicts"]) == ("n7", "fan", [])
    with pytest.raises(BadUse, match=r"n7 has passed no test since it was cordoned \(fan\)"):
        answer("return", "n7")
    assert ledger.node("n7").is_cordoned
    assert "may use n7 again" in answer("return", "n7", "--force")[1]
    assert not ledger.node("n7").is_cordoned
    with pytest.raises(NotFound, match="There is no node 'n8'"):
        answer("return", "n8", "--force")


def test_a_node_that_passed_a_test_since_is_returned(ledger):
    verdict = Verdict(name="n7", outcome="good", probability=0.001, evidence="n7 failed 0 of 7.")
    ledger.add_verdicts([verdict], at_s=50.0, by="me")
    ledger.cordon("n7", at_s=100.0, by="me", why="fan")
    with pytest.raises(BadUse):
        answer("return", "n7")
    ledger.add_verdicts([verdict], at_s=150.0, by="me")
    answer("return", "n7")
    assert not ledger.node("n7").is_cordoned


def test_a_cordoned_node_is_listed_with_the_reason_and_the_findings(ledger):
    alone = Verdict(name="n7", outcome="suspect", probability=0.05, evidence="No other node.")
    ledger.add_verdicts([alone], at_s=50.0, by="me")
    ledger.cordon("n7", at_s=100.0, by="ada", why="fan")
    words = " ".join(answer("ls")[1].split())
    for word in ("ada", "fan", "not settled", "No other node."):
        assert word in words


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 256])
def test_names_and_reasons_that_are_no_line_are_refused(ledger, name):
    with pytest.raises(BadUse, match="Give one line of 1 to 255 printable characters"):
        answer("cordon", name, "--why", "fan")
    with pytest.raises(BadUse, match="--why is"):
        answer("cordon", "n1", "--why", name)
    with pytest.raises(BadUse, match="NODE is"):
        answer("return", name)
    assert ledger.nodes() == []


def test_a_report_is_printed_also_where_the_ledger_cannot_be_written(ledger, monkeypatch):
    async def carry_out(*_):
        fine = solo.CheckResult(name="memory", outcome="passed", evidence="all bytes")
        return {"solo": [fine.to_json()], "ports": [], "has_gpu": False}

    def refuse(*_, **__):
        raise LedgerError("The ledger is read-only.")

    monkeypatch.setattr("holdfast.recover.localise.tester.NodeTester.carry_out", carry_out)
    monkeypatch.setattr(Ledger, "add_verdicts", refuse)
    result = CliRunner().invoke(cli, ["nodes", "check", "--cordon"], standalone_mode=False)
    assert "all bytes" in result.output
    assert isinstance(result.exception, LedgerError)
    assert str(result.exception) == (
        "The ledger is read-only: no node is cordoned, and the verdicts are not kept. "
        "Repair the ledger, then check again."
    )


def test_two_processes_may_record_a_new_node_at_the_same_time(ledger, tmp_path):
    def record(number):
        with Ledger.open(ledger_url(tmp_path)) as own:
            verdict = Verdict(name="n1", outcome="good", probability=0.001, evidence=str(number))
            own.add_verdicts([verdict], at_s=float(number), by="me")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(record, range(8)))
    assert {one["evidence"] for one in ledger.node("n1").verdicts} == {str(n) for n in range(8)}


@pytest.mark.parametrize("broken", [False, True])
def test_this_host_is_checked(ledger, monkeypatch, broken):
    class Checked:
        async def carry_out(self, order):
            outcome = "failed" if broken else "passed"
            result = solo.CheckResult(name="memory", outcome=outcome, evidence="[bold] bytes")
            return {"solo": [result.to_json()], "ports": [], "has_gpu": False}

        async def ended(self):
            pass

    monkeypatch.setattr("holdfast.recover.localise.across.NodeTester", Checked)
    code, said = answer("check", "--json", "--cordon")
    told = json.loads(said)
    assert (told["schema"], told["version"]) == ("holdfast.nodes_check", 1)
    assert (code, told["cordoned"]) == ((1, ["n1"]) if broken else (0, []))
    assert ledger.node("n1").is_cordoned is broken
    code, said = answer("check")
    assert code == int(broken)
    assert "[bold] bytes" in said
    assert ("Bad: n1." if broken else "No fault was found.") in said


def test_verdicts_are_bounded_and_a_later_cordon_is_of_its_author(ledger):
    for number in range(60):
        verdict = Verdict(name="n1", outcome="bad", probability=0.99, evidence=str(number))
        ledger.add_verdicts([verdict], at_s=float(number), by="run-1", cordons=["n1"])
    node = ledger.node("n1")
    assert [one["evidence"] for one in node.verdicts] == [str(one) for one in range(10, 60)]
    assert (node.cordoned_at_s, node.why, node.is_hard) == (0.0, "0", False)
    ledger.cordon("n1", at_s=99.0, by="me", why="fan")
    assert ledger.node("n1").is_hard, "a person's word stands until that person takes it back"
    later = Verdict(name="n1", outcome="bad", probability=0.99, evidence="later")
    ledger.add_verdicts([later], at_s=100.0, by="me", cordons=["n1"])
    node = ledger.node("n1")
    assert (node.cordon_kind, node.why, node.is_hard) == ("person", "fan", True)


def test_a_cordon_by_the_tests_that_a_person_has_started_is_a_cordon_by_tests(ledger):
    slow = Verdict(name="n1", outcome="bad", probability=0.99, evidence="cut")
    ledger.add_verdicts([slow], at_s=1.0, by="me", cordons=["n1"])
    good = Verdict(name="n1", outcome="suspect", probability=0.5, evidence="fine")
    ledger.add_verdicts([good], at_s=2.0, by="run-1")
    assert (ledger.node("n1").cordon_kind, ledger.node("n1").is_hard) == ("soft", False)
    wrong = Verdict(name="n1", outcome="bad", probability=1.0, evidence="bytes", is_hard=True)
    ledger.add_verdicts([wrong], at_s=3.0, by="run-2", cordons=["n1"])
    node = ledger.node("n1")
    assert (node.cordon_kind, node.cordoned_by, node.why) == ("hard", "run-2", "bytes")


@pytest.mark.parametrize(
    ("is_hard", "passed", "returned"),
    [
        (True, "solo", True),
        (True, "", False),
        (False, "solo", False),
        (False, "all", True),
    ],
)
def test_a_repaired_node_is_returned_after_one_session_that_it_has_passed(
    ledger, is_hard, passed, returned
):
    bad = Verdict(name="n1", outcome="bad", probability=1.0, evidence="e", is_hard=is_hard)
    ledger.add_verdicts([bad], at_s=1.0, by="r", cordons=["n1"])
    fine = Verdict(name="n1", outcome="suspect", probability=0.5, evidence="e", passed=passed)
    ledger.add_verdicts([fine], at_s=2.0, by="me")
    if returned:
        answer("return", "n1")
    else:
        with pytest.raises(BadUse):
            answer("return", "n1")
    assert ledger.node("n1").is_cordoned is not returned
