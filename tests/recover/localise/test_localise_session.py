"""A session over hosts with prepared results: no process is started."""

import asyncio
import threading

import pytest

from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url
from holdfast.recover.localise.orders import Orders
from holdfast.recover.localise.pairing import BASE_PRIOR, Pairing
from holdfast.recover.localise.session import localise
from holdfast.recover.localise.verdicts import keep_verdicts, priors_of
from holdfast.testing import FakeClock

GOOD = {"name": "memory", "outcome": "passed", "evidence": "fine", "seconds": 0.1}
BROKEN = {**GOOD, "outcome": "failed", "evidence": "other bytes"}
GOOD_SOLO = {"solo": [GOOD], "ports": [*range(9)], "has_gpu": False}
ALL_WELL = {"group": {"passed": True, "reason": "", "mb_per_s": 100.0}}


class Hosts:
    """Nodes that pass all tests except those that the test names."""

    def __init__(self, names, *, bad=(), broken=(), silent=(), gone=(), garbage=()):
        self.names, self.bad, self.broken = names, bad, broken
        self.silent, self.gone, self.garbage = silent, gone, garbage
        self.worlds = {}
        self.ports = set()

    async def ask(self, name, order, timeout_s):
        if name in self.gone:
            return None
        if name in self.silent:
            raise TimeoutError
        if name in self.garbage:
            return {"solo": 7, "group": [], "ports": "x"}
        if order["what"] == "solo":
            checks = [BROKEN if name in self.broken else GOOD]
            return {"solo": checks, "ports": [*range(9)], "has_gpu": False}
        members = self.worlds.setdefault((order["address"], order["port"]), [])
        members.append(name)
        await asyncio.sleep(0)  # so that the others have come
        assert len(members) == order["world_size"]
        failed = any(one in self.bad for one in members)
        return {"group": {"passed": not failed, "reason": "cut" * failed, "mb_per_s": 100.0}}

    def address_of(self, name):
        return name


def report_of(hosts, **options):
    priors = dict.fromkeys(hosts.names, BASE_PRIOR)
    return asyncio.run(localise(hosts, priors, FakeClock(), **options))


def test_a_node_that_fails_with_others_is_named_with_its_evidence():
    report = report_of(Hosts("abcde", bad="c"))
    assert report.judgement.bad == report.judgement.cordon == ("c",)
    assert report.evidence("c").startswith("failed 2 of 2 tests with other nodes (cut)")
    assert report.is_complete
    told = report.to_json()
    assert [one["node"] for one in told["nodes"] if one["outcome"] == "bad"] == ["c"]


def test_a_node_that_fails_a_check_by_itself_is_paired_with_nobody():
    hosts = Hosts("abcd", broken="b")
    report = report_of(hosts)
    assert report.judgement.bad == ("b",)
    assert not any("b" in world for world in hosts.worlds.values())
    assert report.evidence("b") == "fails its check of memory (other bytes)"


def test_a_node_without_an_answer_fails_and_one_whose_agent_ended_is_not_judged():
    report = report_of(Hosts("abcdef", silent="b", gone="d"))
    assert report.judgement.bad == ("b",)
    assert report.unanswered == ["d"]
    assert "d" not in report.judgement.outcomes


def test_a_node_that_is_lost_during_the_group_tests_is_asked_no_more_and_not_judged():
    asked = []

    class Leaving(Hosts):
        async def ask(self, name, order, timeout_s):
            if order["what"] == "solo":
                return GOOD_SOLO
            if name == "b":
                asked.append(order)
                return None
            return ALL_WELL

    report = report_of(Leaving("abcde"))
    assert (report.unanswered, len(asked)) == (["b"], 1)
    assert "b" not in report.judgement.outcomes
    assert set(report.judgement.outcomes.values()) == {"good"}
    assert report.judgement.cordon == ()


def test_the_event_loop_serves_others_while_a_large_session_is_judged(monkeypatch):
    judge, entered, left = Pairing.judge, threading.Event(), threading.Event()

    def slow(pairing):
        entered.set()
        assert left.wait(300.0), "the event loop was held up"
        return judge(pairing)

    monkeypatch.setattr(Pairing, "judge", slow)

    async def scenario():
        testing = asyncio.create_task(
            localise(Hosts("abcd"), dict.fromkeys("abcd", BASE_PRIOR), FakeClock())
        )
        while not entered.is_set():
            await asyncio.sleep(0.001)
        left.set()
        return await testing

    assert asyncio.run(scenario()).judgement.bad == ()


def test_garbage_ends_nothing():
    report = report_of(Hosts("abcd", garbage="a"))
    assert report.unanswered == ["a"]
    assert set(report.judgement.outcomes.values()) == {"good"}


def test_what_is_known_at_the_bound_is_judged():
    class Slow(Hosts):
        async def ask(self, name, order, timeout_s):
            if order["what"] == "group":
                await asyncio.Event().wait()
            return await super().ask(name, order, timeout_s)

    report = report_of(Slow("abcd", broken="a"), limit_s=0.2)
    assert not report.is_complete
    assert report.judgement.bad == ("a",)


def test_rounds_may_be_limited_to_those_of_the_study():
    report = report_of(Hosts("abcdef", bad="f"), max_rounds=2)
    assert (report.judgement.bad, report.judgement.rounds) == (("f",), 2)


def test_verdicts_are_kept_and_are_the_next_sessions_priors(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        report = report_of(Hosts("abcd", bad="b"))
        assert keep_verdicts(report, ledger, by="run-1", at_s=100.0, cordons=True) == ["b"]
        bad, good = ledger.node("b"), ledger.node("a")
        assert (bad.cordoned_by, bad.is_cordoned, bad.is_hard) == ("run-1", True, False)
        assert not good.is_cordoned
        priors = priors_of(["a", "b", "new"], ledger.nodes(), 100.0)
        assert priors["b"] > priors["a"] == priors["new"] == BASE_PRIOR
        keep_verdicts(
            report_of(Hosts("ab", broken="a")), ledger, by="run-2", at_s=200.0, cordons=True
        )
        assert ledger.node("a").is_hard
        keep_verdicts(report_of(Hosts("ab")), ledger, by="me", at_s=300.0, cordons=True)
        ledger.return_node("a")
        ledger.return_node("b")
        assert not any(node.is_cordoned for node in ledger.nodes())


def test_a_check_without_an_answer_in_time_is_no_hard_fault(tmp_path):
    slow = {**BROKEN, "evidence": "no answer within 20 s", "is_slow": True}

    class Busy(Hosts):
        async def ask(self, name, order, timeout_s):
            answer = await super().ask(name, order, timeout_s)
            if "solo" in answer and name in "bc":
                answer["solo"] = [slow, BROKEN] if name == "c" else [slow]
            return answer

    report = report_of(Busy("abcdefghij"))
    assert set(report.judgement.bad) == {"b", "c"}
    assert report.hard == ["c"]
    assert report.evidence("c") == "fails its check of memory (other bytes)"
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        keep_verdicts(report, ledger, by="run-1", at_s=1.0, cordons=True)
        kinds = {node.name: node.cordon_kind for node in ledger.nodes() if node.is_cordoned}
    assert kinds == {"b": "soft", "c": "hard"}


def test_an_answer_that_is_late_or_of_an_agent_that_ended_is_told_apart():
    async def scenario():
        orders, sent = Orders(), []
        asking = asyncio.create_task(orders.ask(sent.append, {"what": "solo"}, 30.0))
        await asyncio.sleep(0)
        orders.answered(sent[0]["check"] + 1, {})
        orders.answered(sent[0]["check"], {"x": 1})
        assert await asking == {"x": 1}
        asking = asyncio.create_task(orders.ask(sent.append, {"what": "solo"}, 30.0))
        await asyncio.sleep(0)
        orders.end()
        assert await asking is None
        with pytest.raises(TimeoutError):
            await orders.ask(sent.append, {"what": "solo"}, 0.01)
        orders.end(is_lost=True)
        assert await orders.ask(sent.append, {"what": "solo"}, 1e9) is None

    asyncio.run(scenario())
