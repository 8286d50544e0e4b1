"""Test the Ray places on a real Ray of this machine, with three emulated nodes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster_tasks import (
    OWNER_THAT_LINGERS,
    agent_command,
    agent_note,
    await_true,
    is_in_a_file,
    is_on_a_command_line,
    none_lives,
    started,
    states,
)

from deferred import Deferred, needs
from holdfast.cluster import places
from holdfast.cluster.places_ray import _Leashed
from holdfast.core.errors import BadUse
from holdfast.core.sockets import free_ports

pytestmark = [
    pytest.mark.slow,  # a whole cluster is started
    needs("ray", "Ray is not installed (pip install 'holdfast[ray]')"),
]

ray = Deferred("ray")

RUNNING = ("running", None)
SECRET = {"SECRET": "open-sesame"}


PATIENT = {"agent_register_timeout_ms": 600_000, "health_check_timeout_ms": 600_000}
"""Settings of Ray with which the head does not give up a node that a busy machine holds up.

A killed node refuses the health check, which Ray still notices at once.
"""


def node():
    """Return the arguments of a node.

    The ports are fixed, because a node ends if its agents take longer than 15 s to choose theirs.
    """
    names = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    return {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 * 2**20, **ports}


@pytest.fixture(scope="module")
def cluster():
    """Start a head that is a node like the others, so that three nodes need three of Ray's."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={**node(), "include_dashboard": False, "_system_config": PATIENT},
    )
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def complete(cluster):
    """Replace the nodes that are lost, for example by an earlier test that failed."""
    for one in list(cluster.worker_nodes):
        if not one.remaining_processes_alive():
            cluster.remove_node(one, allow_graceful=False)
    while len(cluster.worker_nodes) < 2:
        cluster.add_node(**node(), wait=False)
    cluster.wait_for_nodes(timeout=240)


@pytest.fixture
def standing(cluster, monkeypatch):
    complete(cluster)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    return cluster


def test_three_nodes_of_which_one_dies_and_one_agent_is_killed(standing, tmp_path):
    here = places("ray", nodes=3, gpus_per_node=1, cpus_per_node=2)
    assert here.address_host() == standing.head_node.node_ip_address
    folder = tmp_path / "f"
    placement = here.start(agent_command(tmp_path), environment=SECRET, folder=folder)
    try:
        notes = [agent_note(tmp_path, index) for index in range(3)]
        pids = [noted for noted, _ in notes]
        assert {secret for _, secret in notes} == {"open-sesame"}
        await_true(lambda: states(placement) == [RUNNING] * 3)
        assert not is_on_a_command_line("open-sesame")
        assert not is_in_a_file("open-sesame", folder)
        await_true(lambda: (folder / "place-2.log").read_text() == "agent 2 is here\n")

        os.kill(pids[1][0], signal.SIGKILL)
        await_true(lambda: states(placement)[1] == ("ended", -signal.SIGKILL))
        assert none_lives(pids[1])
        assert placement.restart(1)
        again, _ = agent_note(tmp_path, 1)
        await_true(lambda: states(placement) == [RUNNING] * 3)

        here = (
            ray.get_runtime_context().get_node_id()
        )  # all are of this machine, and Ray joined any of them
        victim = next(one for one in standing.worker_nodes if one.node_id != here)
        standing.remove_node(victim, allow_graceful=False)
        await_true(lambda: [state for state, _ in states(placement)].count("ended") == 1)
        [dead] = [place for place in placement.poll() if place.state == "ended"]
        assert dead.exit_code is None
        assert dead.why
        alive = [again if index == 1 else pids[index] for index in range(3) if index != dead.index]
        assert not any(none_lives(noted[:1]) for noted in alive)
        await_true(lambda: none_lives(again if dead.index == 1 else pids[dead.index]))

        # The place returns with another node. Until Ray has noticed the death of the node, the
        # place ends again.
        why = "Ray has 2 nodes with {'CPU': 2, 'GPU': 1}, free or not; 3 are requested"
        await_true(
            lambda: not placement.restart(dead.index) and placement.poll()[dead.index].why == why
        )
        complete(standing)
        await_true(
            lambda: not placement.restart(dead.index) and states(placement) == [RUNNING] * 3,
            timeout_s=120,
        )
        back, _ = agent_note(tmp_path, dead.index)
    finally:
        placement.stop()
    await_true(lambda: none_lives([*again, *back, *(pid for noted in pids for pid in noted)]))
    assert {state for state, _ in states(placement)} == {"ended"}
    placement.stop()


def test_nothing_outlives_an_owner_that_is_killed_and_another_has_the_nodes(standing, tmp_path):
    script = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nfrom cluster_tasks import agent_command\nfrom holdfast.cluster import places\n"
        f"place = Path({str(tmp_path)!r})\n"
        "kept = places('ray', nodes=3, cpus_per_node=2).start(\n"
        "    agent_command(place), environment={'SECRET': 's'}, folder=place / 'f')\n"
        "time.sleep(600)"
    )
    with started([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as owner:
        pids = [pid for index in range(3) for pid in agent_note(tmp_path, index)[0]]
        owner.kill()
        owner.wait(timeout=90)
    await_true(lambda: none_lives(pids))
    placement = places("ray", nodes=3, cpus_per_node=2).start(
        agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f"
    )
    try:
        assert [agent_note(tmp_path, index)[1] for index in range(3)] == ["open-sesame"] * 3
    finally:
        placement.stop()


@pytest.mark.parametrize("dies", [True, False])
def test_with_a_linger_what_is_placed_outlives_a_killed_owner_but_no_stop(standing, tmp_path, dies):
    argv = [sys.executable, "-c", OWNER_THAT_LINGERS, str(tmp_path), "ray"]
    with started(argv, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as owner:
        await_true(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        pid = int((tmp_path / "pid").read_text())
        if dies:
            owner.kill()
        else:
            owner.stdin.close()
        owner.wait(timeout=240)
    await_true(lambda: none_lives([pid]))
    assert (tmp_path / "ended").exists() == dies


@pytest.mark.parametrize("dies", [True, False])
def test_what_is_placed_lingers_also_where_ray_kills_the_leash_before_the_actor(tmp_path, dies):
    """Ray kills all children of an actor that it ends, and the actor may still see their end."""
    agent = (
        "import os, sys, time\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n"
        "(folder / 'pid').write_text(str(os.getpid()))\n"
        "until_s = time.monotonic() + 60\n"
        "while not (folder / 'go').exists() and time.monotonic() < until_s: time.sleep(0.02)\n"
        "(folder / 'ended').touch()"
    )
    with socket.create_server(("127.0.0.1", 0)) as owner:
        address = f"127.0.0.1:{owner.getsockname()[1]}"
        actor = _Leashed()
        actor.start(
            [sys.executable, "-c", agent, str(tmp_path)],
            {},
            str(tmp_path / "log"),
            False,
            3600.0,
            address,
        )
        await_true(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        pid = int((tmp_path / "pid").read_text())
        if dies:
            owner.close()
        actor._leashed.kill()
        assert actor.wait() == -signal.SIGKILL
        if dies:
            (tmp_path / "go").touch()
        await_true(lambda: none_lives([pid]))
    assert (tmp_path / "ended").exists() == dies


def test_with_a_linger_no_agent_outlives_its_actor_alone(standing, tmp_path):
    placement = places("ray", nodes=1, linger_s=3600.0).start(
        agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f"
    )
    try:
        pids, _ = agent_note(tmp_path, 0)
        actor = next(
            parent
            for parent in psutil.Process(pids[0]).parents()
            if parent.cmdline()[0].startswith("ray::")
        )
        actor.kill()
        await_true(lambda: none_lives(pids))
        await_true(lambda: placement.restart(0))
        again, _ = agent_note(tmp_path, 0)
    finally:
        placement.stop()
    await_true(lambda: none_lives(again))


def test_more_nodes_than_there_are_wait_and_say_so(standing, tmp_path):
    placement = places("ray", nodes=4, cpus_per_node=2).start(
        agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f"
    )
    try:
        assert states(placement) == [("waiting", None)] * 4
        assert "Ray has 3 nodes with {'CPU': 2}" in placement.poll()[3].why
    finally:
        placement.stop()


def test_without_a_cluster_there_is_one_node_of_its_own_which_is_gone_afterwards(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(BadUse, match="Set RAY_ADDRESS"):
        places("ray", nodes=2).start(
            agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f"
        )
    here = places("ray", nodes=1)
    assert here.address_host() == "127.0.0.1"
    placement = here.start(agent_command(tmp_path), environment=SECRET, folder=tmp_path / "f")
    try:
        pids, secret = agent_note(tmp_path, 0)
        assert secret == "open-sesame"
        await_true(lambda: states(placement) == [RUNNING])
    finally:
        placement.stop()
    await_true(lambda: none_lives(pids))
    assert not ray.is_initialized()
