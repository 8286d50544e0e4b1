"""Test the Slurm places on a real Slurm, private to this file."""

import os
import signal
import sys
from pathlib import Path

import pytest
from cluster_tasks import (
    agent_command,
    agent_note,
    await_true,
    is_in_a_file,
    is_on_a_command_line,
    none_lives,
    started,
    states,
)

from holdfast.cluster import places
from holdfast.core.errors import BadUse
from holdfast.testing.slurm import PrivateSlurm

pytestmark = pytest.mark.slow  # a whole cluster is started

if reason := PrivateSlurm.missing():
    pytest.skip(reason, allow_module_level=True)

RUNNING = ("running", None)
SECRET = {"SECRET": "open-sesame"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with PrivateSlurm(tmp_path_factory.mktemp("s"), nodes=4, cpus=2, gpus_per_node=2) as slurm:
        yield slurm


@pytest.fixture
def slurm(cluster, monkeypatch):
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    # Variables of a surrounding job and place, which must not reach the new place.
    monkeypatch.setenv("SLURM_NTASKS", "77")
    monkeypatch.setenv("HOLDFAST_PLACE", "88")
    yield cluster
    await_true(
        lambda: cluster.run(["squeue", "--noheader"]) == ""
    )  # no test leaves jobs to the next


def lose_node(slurm, name: str) -> None:
    slurm.kill_node(name)
    slurm.run(["scontrol", "update", f"nodename={name}", "state=down", "reason=dead"])


def test_four_nodes_of_which_two_die_and_one_agent_is_killed(slurm, tmp_path):
    folder = tmp_path / "f"
    here = places("slurm", nodes=4, gpus_per_node=1, cpus_per_node=2)
    assert here.address_host() == "127.0.0.1", "every node of this cluster is this machine"
    placement = here.start(agent_command(tmp_path), environment=SECRET, folder=folder)
    try:
        notes = [agent_note(tmp_path, index) for index in range(4)]
        pids = [noted for noted, _ in notes]
        assert {secret for _, secret in notes} == {"open-sesame"}
        await_true(lambda: states(placement) == [RUNNING] * 4)
        hosts = [place.host for place in placement.poll()]
        assert sorted(hosts) == ["n1", "n2", "n3", "n4"]
        assert not is_on_a_command_line("open-sesame")
        assert not is_in_a_file("open-sesame", folder)
        await_true(lambda: (folder / "place-3.log").read_text() == "agent 3 is here\n")
        [job] = slurm.run(["squeue", "--noheader", "--format=%i"]).split()
        assert "gres:gpu:1" in slurm.run(["scontrol", "show", "job", job])

        os.kill(pids[1][0], signal.SIGKILL)
        await_true(lambda: states(placement)[1] == ("ended", -signal.SIGKILL))
        assert none_lives(pids[1])
        assert placement.restart(1)
        assert states(placement)[1] == ("waiting", None)
        again, _ = agent_note(tmp_path, 1)
        await_true(lambda: states(placement) == [RUNNING] * 4)

        lost = (2, 0)  # finally the node that runs the batch script
        assert slurm.run(["squeue", "--noheader", "--format=%B"]).strip() == hosts[0]
        for index in lost:
            lose_node(slurm, hosts[index])
            await_true(lambda index=index: states(placement)[index] == ("ended", None))
            assert hosts[index] in placement.poll()[index].why
            assert not placement.restart(index)
        assert states(placement) == [("ended", None), RUNNING, ("ended", None), RUNNING]
        assert not none_lives(again[:1])
        assert not none_lives(pids[3][:1])
    finally:
        placement.stop()
    for node in slurm.node_names:
        if node in (hosts[0], hosts[2]):
            slurm.restart_node(node)
    await_true(lambda: none_lives(again + [pid for noted in pids for pid in noted]))
    assert {state for state, _ in states(placement)} == {"ended"}
    assert not list(folder.glob("slurm-*"))
    placement.stop()


def test_the_others_go_on_when_one_ends_by_itself_and_the_allocation_ends_with_the_last(
    slurm, tmp_path
):
    (tmp_path / "end-0").write_text("0")
    placement = places("slurm", nodes=2).start(
        agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f"
    )
    try:
        agent_note(tmp_path, 0)
        agent_note(tmp_path, 1)
        await_true(lambda: states(placement) == [("ended", 0), RUNNING])
        assert not placement.restart(0), "it ended as it wanted to"
        (tmp_path / "end-1").write_text("0")
        await_true(lambda: states(placement) == [("ended", 0)] * 2)
        await_true(lambda: slurm.run(["squeue", "--noheader"]) == "")
    finally:
        placement.stop()


def test_a_cancelled_allocation_is_reported_with_what_slurm_and_the_job_say(slurm, tmp_path):
    placement = places("slurm", nodes=2).start(
        agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f"
    )
    try:
        for index in range(2):
            agent_note(tmp_path, index)
        await_true(lambda: states(placement) == [RUNNING] * 2)
        slurm.run(["scancel", *slurm.run(["squeue", "--noheader", "--format=%i"]).split()])
        await_true(lambda: states(placement) == [("ended", None)] * 2)
        why = placement.poll()[0].why
        assert "JobState=CANCELLED" in why
        assert "CANCELLED AT" in why, "what srun said is missing"
    finally:
        placement.stop()


def test_what_a_killed_owner_left_is_cancelled_by_the_next_start(slurm, tmp_path):
    script = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nfrom cluster_tasks import agent_command\nfrom holdfast.cluster import places\n"
        f"place = Path({str(tmp_path)!r})\n"
        "kept = places('slurm', nodes=1).start(agent_command(place), environment={'SECRET': 's'}, folder=place / 'f')\n"
        "time.sleep(600)"
    )
    with started([sys.executable, "-c", script], env=dict(os.environ)) as owner:
        pids, _ = agent_note(tmp_path, 0)
        owner.kill()
        owner.wait(timeout=90)
    assert not none_lives(pids)
    placement = places("slurm", nodes=1).start(
        agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f"
    )
    try:
        again, secret = agent_note(tmp_path, 0)
        assert secret == "open-sesame"
        await_true(lambda: none_lives(pids))
    finally:
        placement.stop()
    await_true(lambda: none_lives(again))


def test_more_nodes_than_there_are_wait_and_an_unknown_partition_is_bad_use(slurm, tmp_path):
    placement = places("slurm", nodes=5).start(
        agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f"
    )
    try:
        assert states(placement) == [("waiting", None)] * 5
        await_true(lambda: "Slurm says PENDING: PartitionNodeLimit" in placement.poll()[4].why)
    finally:
        placement.stop()
    unknown = places("slurm", nodes=1, sbatch_options=["--partition=nosuch"])
    with pytest.raises(BadUse, match="invalid partition"):
        unknown.start(agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f")
    assert not list((tmp_path / "f").glob("slurm-*"))
