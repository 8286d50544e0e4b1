"""Test states of nodes from recorded outputs of `scontrol show node`.

test_slurm_cordons.py uses a real Slurm.
"""

import pytest

from holdfast.cluster.slurm_nodes import parse_nodes, read_slurm_nodes
from holdfast.core.errors import HoldfastError

OUTPUT = (
    "NodeName=a1 Arch=x86_64 CoresPerSocket=1 CPUAlloc=0 NodeHostName=vm State={state} Partitions=main "
    "ExtSensorsTemp=n/s {rest}\n"
)


def node(state, rest=""):
    (found,) = parse_nodes(OUTPUT.format(state=state, rest=rest)).values()
    return found


@pytest.mark.parametrize(
    ("state", "is_lost", "is_leaving", "is_drained"),
    [
        ("IDLE", False, False, False),
        ("MIXED", False, False, False),
        ("ALLOCATED+DRAIN", False, True, True),
        ("IDLE+DRAIN", False, True, True),
        ("DOWN*+DRAIN", True, True, True),
        ("DOWN*", True, False, False),
        ("IDLE*", False, False, False),
        ("IDLE+NOT_RESPONDING", False, False, False),
        ("IDLE+CLOUD+POWERED_DOWN", True, False, False),
        ("IDLE~", True, False, False),
        ("MIXED+MAINTENANCE+RESERVED", False, True, False),
        ("ALLOCATED$", False, True, False),
        ("DOWN+REBOOT_ISSUED", True, False, False),
        ("FAILING", False, True, False),
    ],
)
def test_the_words_and_signs_of_a_state_say_whether_a_node_is_of_use(
    state, is_lost, is_leaving, is_drained
):
    found = node(state)
    assert (found.is_lost, found.is_leaving, found.is_drained) == (is_lost, is_leaving, is_drained)


@pytest.mark.parametrize(
    ("told", "reason", "set_by", "source"),
    [
        ("", "", "", ""),
        (
            "Reason=fan = broken [x] State=DOWN [root@2026-11-27T04:19:11]",
            "fan = broken [x] State=DOWN",
            "root",
            "person",
        ),
        (
            "Reason=Not responding [slurm@2026-11-27T04:19:11]",
            "Not responding",
            "slurm",
            "person",
        ),
        (
            "Reason=k8s: cordon: gpu-xid-79 [slurm@2026-11-27T04:19:11] Comment=rack 7",
            "k8s: cordon: gpu-xid-79",
            "slurm",
            "kubernetes",
        ),
        (
            "Reason=k8s: pod terminated: cordon: node-drain [root@2026-01-01T00:00:00]",
            "k8s: pod terminated: cordon: node-drain",
            "root",
            "kubernetes",
        ),
        (
            "Reason=holdfast: failed an allgather (run r) [ann@2026-01-01T00:00:00]",
            "holdfast: failed an allgather (run r)",
            "ann",
            "holdfast",
        ),
        ("Reason=of an old version", "of an old version", "", "person"),
    ],
)
def test_the_reason_tells_who_has_taken_the_node_out(told, reason, set_by, source):
    found = node("IDLE+DRAIN", told)
    assert (found.reason, found.set_by, found.source) == (reason, set_by, source)


def test_the_reservation_is_read():
    assert node("IDLE+RESERVED", "ReservationName=maint-7 Reason=x [a@b]").reservation == "maint-7"
    assert node("IDLE").reservation == ""


def test_lines_that_are_no_nodes_are_passed_over():
    assert parse_nodes("slurm_load_node error: x\n\nNodeName=b State=IDLE\n").keys() == {"b"}


def test_an_unknown_name_does_not_hide_the_others():
    asked = []

    def command(argv):
        asked.append(argv[-1])
        if argv[-1] != "node":
            raise HoldfastError("scontrol failed: Node zz not found")
        return "NodeName=a State=IDLE\nNodeName=b State=IDLE\n"

    assert read_slurm_nodes(["a", "zz"], command).keys() == {"a"}
    assert asked == ["a,zz", "node"]


def test_a_slurm_that_does_not_answer_is_an_error():
    def command(_argv):
        raise HoldfastError("scontrol failed: Unable to contact slurm controller")

    with pytest.raises(HoldfastError, match="Unable to contact"):
        read_slurm_nodes(["a"], command)
