"""Signals and notices of a run's nodes: records, cordons, moves, and events for the policy."""

import pytest

from holdfast.recover import policy
from holdfast.recover.detectors.liveness import BLIND_S
from holdfast.recover.detectors.node import RECENT_S
from holdfast.recover.localise.pairing import MAX_PRIOR
from holdfast.recover.signals.facts import NodeSignal
from holdfast.recover.signals.in_run import NodeHealth

XID_79 = NodeSignal(
    source="the kernel's log",
    name="xid-79",
    where="0000:4e:00",
    text="NVRM: Xid (PCI:0000:4e:00): 79, GPU has fallen off the bus.",
)
LOST = NodeSignal(
    source="the state of the GPUs", name="gpu-lost", where="0000:4e:00", text="GPU is lost"
)
LINK = NodeSignal(source="the network links", name="link-down", where="eth0", text="eth0 is down")


def test_one_decisive_signal_touches_no_healthy_job_and_puts_the_node_out_at_the_next_failure(make):
    place = make()
    place.signal("n2", XID_79)
    place.look()
    assert (place.told, place.kinds()) == ([], ["node_signal"])
    assert place.recorded[0][1]["reason"] == "NodeFailure"
    assert place.fail().restart_helps
    assert place.health.must_leave
    assert place.chosen() == ["n1", "n3"]
    node = place.ledger.node("n2")
    assert (node.is_cordoned, node.cordon_kind, node.cordoned_by) == (True, "soft", "r")
    (said,) = place.added
    assert "Node n2 is faulty (the kernel's log: NVRM: Xid" in said


def test_a_second_independent_signal_moves_the_healthy_job_off_the_node_once(make):
    place = make()
    place.signal("n2", XID_79)
    place.signal("n2", NodeSignal(**{**XID_79.to_json(), "count": 9}))
    place.look()
    assert place.told == []
    place.signal("n2", LOST)
    place.look()
    place.look()
    (event,) = place.told
    assert (event.node, event.rule) == ("n2", "node-confirmed")
    assert place.health.must_leave
    assert place.ledger.node("n2").is_cordoned


def test_without_a_spare_a_healthy_job_goes_on_and_in_observe_nothing_is_cordoned(make):
    place = make(spare=False)
    for signal in (XID_79, LOST):
        place.signal("n2", signal)
    place.look()
    assert place.told == []
    observing = make(mode="observe")
    observing.signal("n2", XID_79)
    observing.fail()
    assert observing.ledger.nodes() == []
    (said,) = observing.added
    assert said.endswith("and would be cordoned in the mode act.")


def test_signals_that_corroborate_have_the_nodes_tested_first(make):
    place = make()
    place.signal("n2", LINK)
    assert not place.tests.is_due
    place.fail()
    assert place.tests.is_due
    assert place.health.suspicion() == {"n2": MAX_PRIOR}
    assert place.ledger.nodes() == []
    place = make()
    place.signal("n1", LINK)
    place.signal("n2", LINK)  # a common cause is likelier
    place.fail()
    assert not place.tests.is_due
    place = make(category="Script")
    place.signal("n2", LINK)
    place.fail()
    assert not place.tests.is_due


def test_old_signals_and_those_of_programs_say_nothing_of_a_failure(make):
    place = make()
    text = "NVRM: Xid (PCI:0000:4e:00): 31, pid=81, name=python"
    place.signal("n2", NodeSignal(**{**XID_79.to_json(), "name": "xid-31", "text": text}))
    place.signal("n1", XID_79, age_s=3600.0)
    place.fail()
    assert (place.added, place.tests.is_due, place.health.must_leave) == ([], False, False)


def test_no_more_nodes_are_cordoned_than_the_share(make):
    place = make(nnodes=4)
    for name in ("n1", "n2", "n3"):
        place.signal(name, XID_79)
    place.fail()
    assert [one.name for one in place.ledger.nodes()] == ["n1"]


def test_a_notice_with_a_moment_moves_the_job_to_a_spare_at_once_and_without_one_when_due(make):
    place = make()
    place.notice("n2", 3600.0)
    place.look()
    (event,) = place.told
    assert (event.node, event.why) == ("n2", "s: reboot is planned")
    assert place.ledger.nodes() == []
    assert place.kinds() == ["notice", "node_set_aside"]
    late = make(spare=False)
    late.notice("n2", 3600.0)
    late.look()
    assert late.told == []
    late.clock.advance(3520.0)
    late.look()
    assert [event.node for event in late.told] == ["n2"]


def test_a_notice_without_a_moment_waits_for_the_next_restart_and_ends_with_the_notice(make):
    place = make()
    place.notice("n2", None)
    place.look()
    assert place.told == []
    place.fail()
    assert place.health.must_leave
    assert place.chosen() == ["n1", "n3"]
    place.notice("n2", None, is_over=True)
    assert not place.health.must_leave
    assert place.chosen() == ["n1", "n2"]


def test_a_node_whose_pod_ends_is_left_for_a_spare_by_its_id_alone(make):
    place = make()
    assert not place.health.leave("n3"), "it does not train"
    assert place.health.leave("n2")
    (event,) = place.told
    assert (event.node, event.rule) == ("n2", "node-leaving_at")
    assert place.health.must_leave
    place.fail()
    assert place.chosen() == ["n1", "n3"]
    assert place.ledger.nodes() == []
    assert place.recorded == [], "another pod on the same node may take part"
    alone = make(spare=False)
    assert not alone.health.leave("n2")
    assert alone.told == []


def test_a_node_whose_launcher_cannot_start_is_left_out_for_a_spare(make):
    place = make()
    ends = policy.Diagnosed(
        fingerprint="f", step=None, summary="s", mitigation="m", restart_helps=False
    )
    place.nodes.launched[1].last_end = (1, 127)
    assert place.fail(ends).restart_helps
    assert place.chosen() == ["n1", "n3"]
    assert place.ledger.nodes() == []
    alone = make(spare=False)
    alone.nodes.launched[1].last_end = (1, 127)
    assert alone.fail(ends) == ends
    everywhere = make()
    for one in everywhere.nodes.launched:
        one.last_end = (1, 127)
    assert everywhere.fail(ends) == ends


def test_a_spare_with_a_signal_stops_nothing(make):
    place = make()
    for signal in (XID_79, LOST):
        place.signal("n3", signal)
    place.notice("n3", 10.0)
    place.look()
    assert place.told == []


def test_what_holds_is_recorded_once_also_by_the_next_supervisor_and_floods_at_each_doubling(make):
    place = make()
    for count in range(1, 1001):
        place.signal("n2", NodeSignal(**{**LINK.to_json(), "count": count}))
    assert len(place.recorded) == 10
    place.health = NodeHealth(
        "r",
        place.health._spec,
        place.nodes,
        place.tests,
        place,
        place.clock,
        place._observe,
        place.told.append,
    )
    place.signal("n2", NodeSignal(**{**LINK.to_json(), "count": 512}))
    assert len(place.recorded) == 10


def test_malformed_messages_change_nothing(make):
    place = make()
    for message in (
        {"kind": "node_signal"},
        {"kind": "node_signal", "is_over": False, "age_s": 0.0, "fact": {"source": 1}},
        {
            "kind": "notice",
            "is_over": False,
            "fact": {"source": "s", "kind": "x", "text": "", "left_s": 1},
        },
        {"kind": "cannot_see", "sources": []},
    ):
        with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
            place.health.signalled("n2", message)
    place.look()
    assert (place.told, place.recorded) == ([], [])


def test_output_that_cannot_be_read_is_no_finding_and_named_in_the_coverage(make):
    place = make()
    place.sources("n1", kernel="", gpu="hangs")
    place.sources("n2", kernel="", gpu="")
    place.look()
    place.fail()
    assert (place.told, place.added) == ([], [])
    assert place.health.coverage() == {
        "looked_at": ["kernel on all nodes", "gpu on n2"],
        "not_seen": ["gpu on n1: hangs"],
    }
    assert make().health.coverage()["not_seen"] == ["the health of n1, n2: no report has come"]


def test_a_source_that_could_be_seen_and_a_detector_without_reports_are_told_as_blind(make):
    place = make()
    place.sources("n1", kernel="", gpu="no driver")
    place.look()
    place.sources("n1", kernel="it hangs")
    place.look()
    place.look()
    assert place.recorded == [("cannot_see", {"detector": "kernel on n1", "why": "it hangs"})]
    place.sources("n1", kernel="")
    place.look()
    assert place.recorded[1] == ("cannot_see", {"detector": "kernel on n1", "why": ""})
    place.clock.advance(BLIND_S + 1)
    place.look()
    assert place.recorded[2] == (
        "cannot_see",
        {"detector": "hangs", "why": "no rank reports steps"},
    )
    assert place.said[-1] == "Hangs cannot be seen: no rank reports steps."


def test_the_next_supervisor_leaves_out_a_node_whose_launcher_could_not_be_started(make):
    place = make()
    place.nodes.launched[0].last_end = (1, 127)
    place.fail()
    place.notice("n1", 3600.0)
    place.notice("n1", 3600.0, is_over=True)
    assert "n1" not in place.chosen(), "the end of a notice starts no launcher"
    following = make()
    following.recorded = list(place.recorded)
    following.health.remember()
    for one in following.nodes.launched:
        one.launched = None
    assert following.chosen() == ["n2", "n3"]
    following.event("begun", {})
    following.health.remember()
    assert following.chosen() == ["n1", "n2"]


def test_a_fault_that_holds_on_counts_at_a_failure_long_after_it_began(make):
    place = make()
    place.signal("n2", LOST)
    place.clock.advance(RECENT_S - 1.0)
    place.signal("n2", LOST)
    place.clock.advance(RECENT_S - 1.0)
    place.fail()
    assert place.kinds().count("node_signal") == 1
    assert place.ledger.node("n2").is_cordoned
