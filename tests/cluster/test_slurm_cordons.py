"""Test drains of cordoned nodes, on a real Slurm and on one that refuses."""

import pytest

from holdfast.cluster.cordons import NotMarked, cordons_here
from holdfast.cluster.slurm_cordons import SlurmCordons, slurm_is_here
from holdfast.cluster.slurm_nodes import read_slurm_nodes
from holdfast.core.errors import HoldfastError
from holdfast.testing.slurm import PrivateSlurm


@pytest.mark.skipif(PrivateSlurm.missing() is not None, reason=str(PrivateSlurm.missing()))
def test_a_node_is_drained_with_the_reason_and_only_holdfasts_drain_is_taken_back(tmp_path_factory):
    with PrivateSlurm(tmp_path_factory.mktemp("s"), nodes=2) as slurm:
        cordons = SlurmCordons(slurm.run)
        reason = 'a matrix product is "wrong"\nat 3'
        cordons.cordon("n1", reason=reason, by="r-1")
        slurm.run(["scontrol", "update", "nodename=n2", "state=drain", "reason=fan broken"])
        cordons.cordon("n2", reason="failed a test", by="r-1")
        drained = read_slurm_nodes(command=slurm.run)
        assert drained["n1"].is_drained
        assert drained["n1"].reason == "holdfast: a matrix product is  wrong  at 3 (run r-1)"
        assert drained["n2"].reason == "fan broken", "the reason of the administrator stays"
        assert cordons.uncordon("n1") is True
        assert cordons.uncordon("n1") is False
        assert cordons.uncordon("n2") is False
        now = read_slurm_nodes(command=slurm.run)
        assert [now["n1"].is_drained, now["n2"].is_drained] == [False, True]


class Refusing:
    """A Slurm in which this user may change nothing."""

    def __call__(self, argv):
        if "update" in argv:
            raise HoldfastError("scontrol failed: slurm_update error: Invalid user id")
        if argv[-1] == "zz":
            raise HoldfastError("scontrol failed: Node zz not found")
        return "NodeName=n1 State=IDLE\n"


def test_without_the_right_the_command_for_an_administrator_is_told():
    cordons = SlurmCordons(Refusing())
    with pytest.raises(NotMarked) as error:
        cordons.cordon("n1", reason="failed a test", by="r-1")
    command = "scontrol update nodename=n1 state=drain 'reason=holdfast: failed a test (run r-1)'"
    assert command in str(error.value)
    assert "Invalid user id" in str(error.value)


def test_a_node_that_slurm_does_not_have():
    cordons = SlurmCordons(Refusing())
    with pytest.raises(NotMarked, match="Slurm has no node zz"):
        cordons.cordon("zz", reason="x", by="r-1")
    assert cordons.uncordon("zz") is False


def test_a_controller_that_is_away_is_told_with_the_next_step():
    def away(_argv):
        raise HoldfastError("scontrol failed: Unable to contact slurm controller.")

    with pytest.raises(NotMarked, match="See it by: scontrol show node n1"):
        SlurmCordons(away).uncordon("n1")


def test_slurm_is_recognised_by_its_job():
    assert slurm_is_here({"SLURM_JOB_ID": "7"})
    here = cordons_here({"SLURM_JOB_ID": "7"})
    assert here is not None
    assert here.scheduler == "Slurm"
