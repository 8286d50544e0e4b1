"""Signals of nodes: faulty nodes, suspect nodes, and nodes about to be taken away."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.diagnose import CATEGORIES
from holdfast.recover.detectors import external, node
from holdfast.recover.detectors.liveness import BLIND_S, Liveness, Looks, blind
from holdfast.recover.detectors.node import MEANINGS, RECENT_S, Meaning, Seen, look, meaning_of
from holdfast.recover.signals.facts import NodeSignal, Notice


def xid(code, rest="pid=7301, name=python, Ch 00000008"):
    text = f"NVRM: Xid (PCI:0000:4e:00): {code}, {rest}"
    return NodeSignal(source="the kernel's log", name=f"xid-{code}", where="0000:4e:00", text=text)


def signal(name, source="the network links", where=""):
    return NodeSignal(source=source, name=name, where=where, text=f"text of {name}")


def seen(node_name, one, at_s=0.0):
    return Seen(node=node_name, signal=one, meaning=meaning_of(one), at_s=at_s)


@pytest.mark.parametrize("code", [13, 31, 32, 43, 45, 69])
def test_xids_that_a_program_can_cause_are_recorded_only(code):
    assert meaning_of(xid(code)).weight == "record"


@pytest.mark.parametrize(
    ("code", "reason"),
    [(48, "ECCError"), (63, "ECCError"), (64, "ECCError"), (74, "NVLinkError"), (79, "NodeFailure"),
     (95, "ECCError"), (119, "CUDAError"), (120, "CUDAError"), (140, "ECCError"), (149, "NVLinkError")],
)  # fmt: skip
def test_xids_after_which_the_gpu_needs_a_reset_or_a_repair_are_decisive(code, reason):
    assert meaning_of(xid(code)) == Meaning("decisive", reason)


def test_a_contained_memory_error_corroborates_and_notices_of_wear_do_not():
    assert meaning_of(xid(94)) == Meaning("hardware", "ECCError")
    assert meaning_of(xid(92)).weight == "record"


def test_every_signal_has_a_reason_of_the_diagnosis_and_unknown_ones_are_recorded():
    assert {meaning.reason for meaning in MEANINGS.values()} <= set(CATEGORIES)
    assert meaning_of(signal("of-a-later-version")).weight == "record"
    assert meaning_of(xid(9999)).weight == "record"


def test_a_second_source_confirms_and_a_second_line_of_one_source_does_not():
    lost = xid(79, "GPU has fallen off the bus.")
    (alone,) = look([seen("n2", lost), seen("n2", xid(48)), seen("n1", xid(31))], 1.0)
    assert (alone.culprit, alone.kind, alone.is_confirmed) == ("n2", "faulty", False)
    assert alone.evidence[0].startswith("the kernel's log: NVRM: Xid (PCI:0000:4e:00): 79")
    (both,) = look([seen("n2", signal("link-down")), seen("n2", lost)], 1.0)
    assert (both.is_confirmed, both.reason, len(both.sources)) == (True, "NodeFailure", 2)
    (weak,) = look([seen("n2", signal("link-down")), seen("n2", signal("disk-error", "x"))], 1.0)
    assert (weak.kind, weak.is_confirmed) == ("suspect", False)


def test_an_xid_by_two_ways_is_one_source():
    by_event = NodeSignal(
        source="the state of the GPUs", name="xid-79", text=xid(79).text, where="0000:4e:00"
    )
    (alone,) = look([seen("n2", by_event)], 1.0)
    assert (alone.kind, alone.is_confirmed) == ("faulty", False)
    (both,) = look([seen("n2", by_event), seen("n2", xid(79))], 1.0)
    assert (both.is_confirmed, both.sources) == (False, ("the kernel's log",))
    (gone,) = look([seen("n2", xid(79)), seen("n2", signal("gpu-lost", by_event.source))], 1.0)
    assert gone.is_confirmed  # the GPU itself does not answer


def test_old_signals_count_no_more():
    assert look([seen("n2", xid(79))], RECENT_S + 1) == ()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["n1", "n2", "n3"]),
            st.sampled_from([*MEANINGS, "xid-79", "xid-31", "garbage"]),
            st.sampled_from("abc"),
            st.floats(0, 2 * RECENT_S),
        )
    )
)
def test_a_node_is_confirmed_only_by_two_sources_with_recent_signals_of_its_hardware(told):
    all_seen = [
        Seen(node=name, signal=one, meaning=MEANINGS.get(kind, node._RECORD), at_s=at_s)
        for name, kind, source, at_s in told
        for one in [signal(kind, source)]
    ]
    now_s = 2 * RECENT_S
    for finding in look(all_seen, now_s):
        own = [
            one
            for one in all_seen
            if one.node == finding.culprit
            and one.meaning.weight != "record"
            and now_s - one.at_s <= RECENT_S
        ]
        assert finding.kind == (
            "faulty" if any(one.meaning.weight == "decisive" for one in own) else "suspect"
        )
        if finding.is_confirmed:
            assert finding.kind == "faulty"
            assert len({one.signal.source for one in own}) >= 2


def test_the_notice_that_comes_first_counts():
    drain = Notice(source="Slurm", kind="drain", text="fan")
    soon = Notice(source="x", kind="maintenance", text="reboot", until_s=50.0)
    late = Notice(source="y", kind="preemption", text="spot", until_s=90.0)
    drained, leaving = external.look({"n2": [drain, late, soon], "n1": [drain], "n3": []}, 20.0)
    assert (drained.culprit, drained.kind, drained.left_s) == ("n1", "drain", None)
    assert (leaving.culprit, leaving.kind, leaving.left_s) == ("n2", "maintenance", 30.0)
    assert leaving.evidence == ("x: reboot", "y: spot", "Slurm: fan")


def test_a_detector_without_a_sign_for_long_is_blind_and_one_in_a_section_is_not():
    assert blind(Looks(launched_s=0.0), BLIND_S) == {}
    assert blind(Looks(launched_s=0.0), BLIND_S + 1) == {"hangs": "no rank reports steps"}
    now_s = 3 * BLIND_S
    sees = Looks(launched_s=0.0, steps_s=now_s, losses_s=now_s, collectives_s=now_s)
    assert blind(sees, now_s) == {}
    assert blind(Looks(launched_s=0.0, in_section=True), now_s) == {}
    steps = Looks(launched_s=0.0, steps_s=now_s)
    assert set(blind(steps, now_s)) == {"losses", "slow ranks"}
    alone = Looks(launched_s=0.0, steps_s=now_s, watches_losses=False, several_ranks=False)
    assert blind(alone, now_s) == {}


def test_blindness_is_told_once_and_its_end_too():
    liveness = Liveness()
    assert liveness.changes({"hangs": "why"}) == {"hangs": "why"}
    assert liveness.changes({"hangs": "another why"}) == {}
    assert liveness.changes({}) == {"hangs": ""}
    assert liveness.changes({}) == {}
