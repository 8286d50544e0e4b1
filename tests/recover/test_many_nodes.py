"""Runs of several nodes: an agent a node, here all on one host, which meet at one port."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from holdfast.core.link import ENV_ATTEMPT
from holdfast.recover.agent.rendezvous import loopback_listener
from holdfast.testing.slurm import PrivateSlurm

HOLDFAST = [sys.executable, "-m", "holdfast.cli.main"]

UNTIL_FINISHED = f"""
import os, pathlib, time
import holdfast

run = holdfast.attach()
step = 1000 * int(os.environ["{ENV_ATTEMPT}"])
name = os.environ["HOLDFAST_NODE_NAME"]
told = pathlib.Path(f"rank-{{os.environ['RANK']}}")
told.with_suffix(f".{{os.getpid()}}").write_text(f"{{name}} {{os.getpid()}}")
told.with_suffix(f".{{os.getpid()}}").replace(told)
while not pathlib.Path("finish").exists():
    step += 1
    time.sleep(0.02)
    run.step(step)
"""
"""Ranks that do not wait for each other; each attempt gets further than the one before."""


class Cluster:
    """Nodes of one run, on this host."""

    def __init__(self, place, *arguments):
        with loopback_listener() as probe:
            port = probe.getsockname()[1]
        meeting = ["--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}"]
        self.place = place
        self.command = ["run", "--name", "r", *meeting, *arguments]
        self.nodes = {}

    def start(self, name):
        environment = {**self.place.environment, "HOLDFAST_NODE_NAME": name}
        if name in self.nodes:
            self.nodes[name].communicate()
        self.nodes[name] = self.place.start(*self.command, environment=environment)
        return self.nodes[name]

    def rank(self, number):
        """Return the node and the process of a rank."""
        name, pid = (self.place.folder / f"rank-{number}").read_text().split()
        return name, int(pid)

    def finish(self):
        """End the training; return the exit codes and what the nodes have said."""
        (self.place.folder / "finish").touch()
        ends = {name: (node.communicate(timeout=60)[1], node) for name, node in self.nodes.items()}
        return {name: (node.returncode, err) for name, (err, node) in ends.items()}


@pytest.fixture
def cluster(place):
    """Two nodes whose ranks train."""
    cluster = Cluster(place, "--", "python", place.job(UNTIL_FINISHED))
    cluster.start("n1")
    place.wait_until(lambda: list((place.home / "rendezvous").glob("*.json")))
    cluster.start("n2")
    place.wait_until(lambda: all((place.folder / f"rank-{rank}").exists() for rank in range(2)))
    place.wait_for_step("r", 1003)
    yield cluster
    for node in cluster.nodes.values():
        node.kill()
        node.communicate()


def incidents(place):
    with place.ledger() as ledger:
        return ledger.incidents()


def test_ranks_of_all_nodes_restart_in_place_and_a_spare_replaces_a_lost_node(place, cluster):
    assert [cluster.rank(number)[0] for number in range(2)] == ["n1", "n2"]
    os.kill(cluster.rank(1)[1], signal.SIGKILL)
    place.wait_for_step("r", 2003)
    (killed,) = incidents(place)
    assert (killed.kind, killed.rank, killed.action) == ("exit", 1, "restart")
    cluster.start("n3")
    place.wait_until(lambda: cluster.nodes["n3"].poll() is not None or _has_joined(place, 3))
    cluster.nodes["n2"].kill()
    place.wait_until(lambda: [cluster.rank(number)[0] for number in range(2)] == ["n1", "n3"])
    place.wait_for_step("r", 3003)
    ends = cluster.finish()
    assert ends["n1"][0] == 0, ends["n1"][1]
    assert ends["n3"][0] == 0, ends["n3"][1]
    assert "node n2 is lost" in ends["n1"][1]
    assert "n3 takes part in run r" in ends["n3"][1]
    lost = incidents(place)[1]
    assert lost.diagnosis["decided_by"] == ["observer-node"]
    assert (lost.rank, lost.action) == (None, "restart")
    assert not list((place.home / "rendezvous").glob("*.json"))


def _has_joined(place, count):
    return len(list((place.paths("r").root / "nodes").glob("*.lock"))) >= count - 1


def test_without_a_spare_a_lost_node_is_waited_for(place, cluster):
    cluster.nodes["n2"].kill()
    cluster.nodes["n2"].communicate()
    place.wait_until(lambda: incidents(place))
    cluster.start("n2")
    place.wait_for_step("r", 2003)
    ends = cluster.finish()
    assert [code for code, _ in ends.values()] == [0, 0], ends
    assert "waiting for nodes: 1 of 2 are there" in ends["n1"][1]


def test_a_killed_supervisor_or_agent_of_any_node_ends_no_rank(place, cluster):
    ranks = [cluster.rank(number) for number in range(2)]
    for step, (name, module) in enumerate(
        [("n2", "agent"), ("n1", "supervisor_process"), ("n1", "agent")], 1
    ):
        place.child(cluster.nodes[name], module).kill()
        place.wait_for_step("r", 1003 + 100 * step)
    ends = cluster.finish()
    assert [code for code, _ in ends.values()] == [0, 0], ends
    assert [cluster.rank(number) for number in range(2)] == ranks
    assert incidents(place) == []
    with place.ledger() as ledger:
        assert len(ledger.attempts("r")) == 1


@pytest.mark.parametrize("by", ["Ctrl-C on the second node", "holdfast runs stop"])
def test_a_run_is_stopped_from_any_node(place, cluster, by):
    if by == "holdfast runs stop":
        code, _, err = place.holdfast("runs", "stop", "r")
        assert code == 0, err
    else:
        cluster.nodes["n2"].send_signal(signal.SIGINT)
    ends = {name: node.communicate(timeout=60) for name, node in cluster.nodes.items()}
    assert [node.returncode for node in cluster.nodes.values()] == [4, 4], ends
    assert "Stopped by" in ends["n1"][1]
    assert "Stopped by" in ends["n2"][1]


@pytest.mark.slow
@pytest.mark.skipif(PrivateSlurm.missing() is not None, reason=str(PrivateSlurm.missing()))
def test_in_a_slurm_job_a_spare_replaces_a_node_that_died(place, tmp_path_factory):
    """`srun holdfast run` and nothing more; a job that is queued again goes on with its run."""
    script = UNTIL_FINISHED.replace("HOLDFAST_NODE_NAME", "SLURMD_NODENAME")
    batch = place.folder / "batch.sh"
    batch.write_text(
        "#!/bin/bash\n"
        "srun --no-kill --kill-on-bad-exit=0 holdfast run --spares 1 -- "
        f"python {place.job(script)} || exit 1\n"
    )
    options = ["--nodes=3", "--ntasks-per-node=1", "--no-kill", "--parsable"]
    output = place.folder / "output"
    ranks = [place.folder / f"rank-{rank}" for rank in range(2)]
    with PrivateSlurm(tmp_path_factory.mktemp("s"), nodes=3) as slurm:
        environment = {**slurm.environment, **place.environment}
        submitted = ["sbatch", *options, f"--output={output}", f"--chdir={place.folder}", batch]
        job = subprocess.run(
            submitted, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        run = f"job-{job}.0"
        place.wait_until(lambda: all(rank.exists() for rank in ranks))
        place.wait_for_step(run, 1003)
        assert [rank.read_text().split()[0] for rank in ranks] == ["n1", "n2"]
        slurm.kill_node("n2")
        place.wait_until(lambda: [rank.read_text().split()[0] for rank in ranks] == ["n1", "n3"])
        place.wait_for_step(run, 2003)
        (place.folder / "finish").touch()
        place.wait_until(lambda: not slurm.run(["squeue", "--noheader"]).strip())
    assert "The job completed." in output.read_text()
    (incident,) = incidents(place)
    assert incident.diagnosis["scope"] == {"node": "n2"}


def test_another_node_takes_over_when_the_first_one_is_gone(place, cluster):
    cluster.start("n3")
    place.wait_until(lambda: _has_joined(place, 3))
    cluster.nodes["n1"].kill()
    place.wait_until(lambda: {cluster.rank(number)[0] for number in range(2)} == {"n2", "n3"})
    place.wait_for_step("r", 2003)
    cluster.start("n1")  # it was the first one, and is a spare now
    place.wait_until(lambda: _has_joined(place, 4))
    ends = cluster.finish()
    assert [ends[name][0] for name in ("n1", "n2", "n3")] == [0, 0, 0], ends
    assert sum("takes over from the first node" in err for _, err in ends.values()) == 1
    (incident,) = incidents(place)
    assert incident.diagnosis["scope"] == {"node": "n1"}
    with place.ledger() as ledger:
        assert ledger.run("r").state == "completed"


class Namespaces:
    """Two hosts with addresses of their own, on one cable."""

    def __init__(self):
        self.names = [f"hf{os.getpid()}-{number}" for number in (1, 2)]

    def __enter__(self):
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = self.names
        _ip("link", "add", "c0", "netns", first, "type", "veth", "peer", "c0", "netns", second)
        for number, name in enumerate(self.names, 1):
            _ip("-n", name, "address", "add", f"10.99.0.{number}/24", "dev", "c0")
            _ip("-n", name, "link", "set", "c0", "up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            _ip("netns", "delete", name)

    def cut(self, state):
        _ip("-n", self.names[1], "link", "set", "c0", state)


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _no_namespaces():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    probe = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    return "no network namespaces here" if probe.returncode != 0 else None


@pytest.mark.slow
@pytest.mark.skipif(_no_namespaces() is not None, reason=str(_no_namespaces()))
def test_a_cut_cable_of_the_control_channel_loses_nothing(place):
    """Ranks that do not need each other go on; what they report arrives once the cable is back."""
    meeting = ["--nnodes", "2", "--rendezvous", "10.99.0.1:29500"]
    command = [*HOLDFAST, "run", "--name", "r", *meeting, "--", "python", place.job(UNTIL_FINISHED)]
    options = {"cwd": place.folder, "stderr": subprocess.PIPE, "text": True}
    with Namespaces() as hosts:
        nodes = []
        for number, name in enumerate(hosts.names, 1):
            environment = {**place.environment, "HOLDFAST_NODE_NAME": f"n{number}"}
            inside = ["ip", "netns", "exec", name, *command]
            nodes.append(subprocess.Popen(inside, env=environment, **options))
        try:
            place.wait_for_step("r", 1003)
            place.wait_until(
                lambda: all((place.folder / f"rank-{rank}").exists() for rank in range(2))
            )
            hosts.cut("down")
            time.sleep(20.0)
            hosts.cut("up")
            (place.folder / "finish").touch()
            ends = [node.communicate(timeout=90)[1] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
                node.communicate()
    assert [node.returncode for node in nodes] == [0, 0], ends
    assert incidents(place) == []
    with place.ledger() as ledger:
        (attempt,) = ledger.attempts("r")
    assert attempt.last_step > 1300, "also in the time of the cut"


ELASTIC = """
import os, pathlib, time
import torch
import torch.distributed as dist
import holdfast

dist.init_process_group("gloo")
run = holdfast.attach()
state = {"model": torch.nn.Linear(2, 2)}
with holdfast.Checkpointer("checkpoints", every=20, keep=2) as ckpt:
    step = ckpt.restore(state)
    while True:
        step += 1
        ends = torch.tensor(float(pathlib.Path("finish").exists()))
        dist.all_reduce(ends)
        if dist.get_rank() == 0:
            place = pathlib.Path("place.new")
            place.write_text(f"{dist.get_world_size()} {run.accumulation}")
            place.rename("place")
        time.sleep(0.02)
        run.step(step)
        ckpt.save(step, state)
        if ends:
            break
"""


@pytest.mark.slow
def test_a_job_goes_on_with_fewer_nodes_and_is_whole_again_once_they_are_back(place):
    cluster = Cluster(place, "--min-nodes", "1", "--", "python", place.job(ELASTIC))

    def runs_as(world, accumulation):
        told = place.folder / "place"
        return told.exists() and told.read_text() == f"{world} {accumulation}"

    cluster.start("n1")
    place.wait_until(lambda: list((place.home / "rendezvous").glob("*.json")))
    cluster.start("n2")
    place.wait_until(lambda: runs_as(2, 1))
    place.wait_for_step("r", 25)
    cluster.nodes["n2"].kill()
    cluster.nodes["n2"].communicate()
    place.wait_until(lambda: runs_as(1, 2))
    cluster.start("n2")
    place.wait_until(lambda: runs_as(2, 1))
    ends = cluster.finish()
    assert [code for code, _ in ends.values()] == [0, 0], ends
    with place.ledger() as ledger:
        _, alone, whole = ledger.attempts("r")
        (lost,) = ledger.incidents("r")
    assert lost.diagnosis["decided_by"] == ["observer-node"]
    assert (alone.outcome, whole.outcome) == ("stopped", "completed")
    assert whole.start_step == alone.last_step, "what was saved for the launch is gone on from"
    assert alone.start_step % 20 == 0
