"""Runs of several nodes: an agent a node, here all on one host, which meet at one port."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from holdfast.core.ledger import Ledger
from holdfast.core.link import ENV_ATTEMPT
from holdfast.recover.agent.rendezvous import loopback_listener
from holdfast.testing.hosts import Hosts
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries
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


UNTESTED = ("--test-nodes", "never")
"""For runs that lose a node. Each node would import torch for its tests."""


class Cluster:
    """Nodes of one run, on this host."""

    def __init__(self, place, *arguments):
        with loopback_listener() as probe:
            port = probe.getsockname()[1]
        meeting = ["--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}"]
        self.place = place
        self.command = ["run", "--name", "r", *meeting, *arguments]
        self.nodes = {}

    def start(self, name, **variables):
        environment = {**self.place.environment, "HOLDFAST_NODE_NAME": name, **variables}
        if name in self.nodes:
            self.nodes[name].communicate()
        self.nodes[name] = self.place.start(*self.command, environment=environment)
        return self.nodes[name]

    def rank(self, number):
        """Return the node and the process of a rank."""
        name, pid = (self.place.folder / f"rank-{number}").read_text().split()
        return name, int(pid)

    def finish(self):
        """End the training; return the exit codes and the output of the nodes."""
        (self.place.folder / "finish").touch()
        ends = {name: (node.communicate(timeout=240)[1], node) for name, node in self.nodes.items()}
        return {name: (node.returncode, err) for name, (err, node) in ends.items()}

    def kill(self):
        """Kill what runs, also after a wait that failed: pipes left open would fail a later test."""
        for node in self.nodes.values():
            node.kill()
            node.communicate()


@pytest.fixture
def cluster(place):
    """Two nodes whose ranks train."""
    cluster = Cluster(place, *UNTESTED, "--", *place.ranks(1, place.job(UNTIL_FINISHED)))
    try:
        cluster.start("n1")
        place.wait_until(lambda: list((place.home / "rendezvous").glob("*.json")))
        cluster.start("n2")
        place.wait_until(lambda: all((place.folder / f"rank-{rank}").exists() for rank in range(2)))
        place.wait_for_step("r", 1003)
        yield cluster
    finally:
        cluster.kill()


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


FAKE_HOST = """
import io, os

FAKES = {"/dev/kmsg": "kmsg", "/run/systemd/shutdown/scheduled": "scheduled"}

def faking(real):
    def opened(path, *arguments, **options):
        fake = FAKES.get(path if isinstance(path, int) else os.fspath(path))
        return real(f"{os.environ['FAKE_HOST']}/{fake}" if fake else path, *arguments, **options)
    return opened

os.open, io.open = faking(os.open), faking(io.open)
"""
"""A module that Python imports at its start: the node's sources of signals are files of the test.
"""


class WithSpare(Cluster):
    """Two nodes whose ranks train, and a spare, n3.

    The sources of their signals are files in `hosts`.
    """

    def __init__(self, place, hosts):
        super().__init__(place, "--", *place.ranks(1, place.job(UNTIL_FINISHED)))
        self.hosts = hosts
        (hosts / "sitecustomize.py").write_text(FAKE_HOST)

    def begin(self):
        """Start the nodes, and wait until the ranks train and the spare is there."""
        for name in ("n1", "n2", "n3"):
            self.start_host(name)
            self.place.wait_until(lambda: list((self.place.home / "rendezvous").glob("*.json")))
            if name == "n2":
                self.place.wait_until(lambda: len(list(self.place.folder.glob("rank-?"))) == 2)
        self.place.wait_for_step("r", 1003)
        self.place.wait_until(lambda: _has_joined(self.place, 3))

    def start_host(self, name):
        """Start a node on a host of its own."""
        paths = os.pathsep.join(filter(None, [str(self.hosts), os.environ.get("PYTHONPATH", "")]))
        (self.hosts / name).mkdir()
        (self.hosts / name / "kmsg").touch()
        self.start(name, PYTHONPATH=paths, FAKE_HOST=str(self.hosts / name))

    def wait_for(self, *names, step):
        """Wait until these nodes have the ranks, and train."""
        self.place.wait_until(lambda: [self.rank(rank)[0] for rank in range(2)] == [*names])
        self.place.wait_for_step("r", step)


@pytest.fixture
def with_spare(place, tmp_path_factory):
    cluster = WithSpare(place, tmp_path_factory.mktemp("hosts"))
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.kill()


def test_spares_replace_a_node_that_is_to_be_shut_down_and_one_with_an_xid(place, with_spare):
    """The first one is left without an incident, the second one when a rank has failed."""
    scheduled = with_spare.hosts / "n2" / "scheduled"
    scheduled.with_suffix(".new").write_text(
        f"USEC={int(time.time() + 3600) * 10**6}\nMODE=reboot\n"
    )
    scheduled.with_suffix(".new").rename(scheduled)
    with_spare.wait_for("n1", "n3", step=2003)
    assert incidents(place) == []
    with place.ledger() as ledger:
        assert ledger.nodes() == []
    assert not [one for one in place.commands() if "warm_launcher" in one], "it would be of no use"

    with_spare.start_host("n4")
    place.wait_until(lambda: _has_joined(place, 4))
    lost = "NVRM: Xid (PCI:0000:4e:00): 79, pid=7, name=python, GPU has fallen off the bus."
    with (with_spare.hosts / "n3" / "kmsg").open("a") as log:
        log.write(f"4,9,{time.monotonic_ns() // 1000},-;{lost}\n")
    place.wait_until(lambda: "NodeFailure" in [one.data["reason"] for one in _signals(place)])
    os.kill(with_spare.rank(0)[1], signal.SIGKILL)
    with_spare.wait_for("n1", "n4", step=3003)
    ends = with_spare.finish()
    assert [code for code, _ in ends.values()] == [0, 0, 0, 0], ends
    (incident,) = incidents(place)
    assert "Node n3 is faulty (the kernel's log: NVRM: Xid" in incident.explanation
    with place.ledger() as ledger:
        assert [one.outcome for one in ledger.attempts("r")] == ["stopped", "failed", "completed"]
        assert [node.name for node in ledger.nodes() if node.is_cordoned] == ["n3"]
        decisions = ledger.events("r", "decision")
    decision = next(one for one in decisions if "signals" in one.data)
    (found,) = [one for one in _signals(place) if one.data["reason"] == "NodeFailure"]
    assert found.data["node"] == "n3"
    assert "the kernel's log on all nodes" in decision.data["signals"]["looked_at"]
    told = place.look("explain", "r")[1]
    assert "Node n2 is to be taken away: reboot is planned, in" in told
    assert "Node n2 was left out from then on" in told
    assert "(the kernel's log)" in told


def _signals(place):
    with place.ledger() as ledger:
        return ledger.events("r", "node_signal")


def _has_joined(place, count):
    return len(list((place.paths("r").root / "nodes").glob("*.lock"))) >= count - 1


def test_without_a_spare_a_lost_node_is_waited_for_and_a_later_node_stops_the_run(place, cluster):
    cluster.nodes["n2"].kill()
    cluster.nodes["n2"].communicate()
    place.wait_until(lambda: incidents(place))
    cluster.start("n2")
    place.wait_for_step("r", 2003)
    cluster.nodes["n2"].send_signal(signal.SIGINT)
    said = assert_both_stop(cluster)
    assert "waiting for nodes: 1 of 2 are there" in said["n1"]


def assert_both_stop(cluster):
    """Return the output of the nodes, which a stop ends."""
    said = {name: node.communicate(timeout=240)[1] for name, node in cluster.nodes.items()}
    assert [node.returncode for node in cluster.nodes.values()] == [4, 4], said
    assert all("Stopped by" in text for text in said.values())
    return said


def test_a_killed_supervisor_or_agent_of_any_node_ends_no_rank_but_a_stop_does(place, cluster):
    """The stop comes from a command, and reaches both nodes by the processes that have followed."""
    ranks = [cluster.rank(number) for number in range(2)]
    for step, (name, module) in enumerate(
        [("n2", "agent"), ("n1", "supervisor_process"), ("n1", "agent")], 1
    ):
        place.child(cluster.nodes[name], module).kill()
        place.wait_for_step("r", 1003 + 100 * step)
    code, _, err = place.holdfast("runs", "stop", "r")
    assert code == 0, err
    assert_both_stop(cluster)
    assert [cluster.rank(number) for number in range(2)] == ranks
    assert incidents(place) == []
    with place.ledger() as ledger:
        assert len(ledger.attempts("r")) == 1


@pytest.mark.slow
@pytest.mark.skipif(PrivateSlurm.missing() is not None, reason=str(PrivateSlurm.missing()))
def test_in_a_slurm_job_a_spare_replaces_a_node_that_died(place, tmp_path_factory):
    """`srun holdfast run` and nothing more; a job that is queued again goes on with its run."""
    script = UNTIL_FINISHED.replace("HOLDFAST_NODE_NAME", "SLURMD_NODENAME")
    batch = place.folder / "batch.sh"
    batch.write_text(
        "#!/bin/bash\n"
        "srun --no-kill --kill-on-bad-exit=0 holdfast run --spares 1 -- "
        f"{' '.join(place.ranks(1, place.job(script)))} || exit 1\n"
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
        # The nodes train that have come first. The batch script runs on n1, which must live.
        first = {rank.read_text().split()[0] for rank in ranks}
        lost = max(first)
        slurm.kill_node(lost)
        left = {"n1", "n2", "n3"} - {lost}
        place.wait_until(lambda: {rank.read_text().split()[0] for rank in ranks} == left)
        place.wait_for_step(run, 2003)
        # Slurm itself would notice a minute later, and until then wait for the node's end of the
        # job.
        slurm.run(["scontrol", "update", f"nodename={lost}", "state=down", "reason=dead"])
        (place.folder / "finish").touch()
        place.wait_until(lambda: not slurm.run(["squeue", "--noheader"]).strip())
    assert "The job completed." in output.read_text()
    (incident,) = incidents(place)
    assert incident.diagnosis["scope"] == {"node": lost}


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


@pytest.mark.slow
@pytest.mark.skipif(postgresql_binaries() is None, reason="no PostgreSQL server is installed")
def test_with_a_postgresql_another_node_takes_over_though_no_folder_is_shared(place):
    pytest.importorskip("psycopg")
    with PrivatePostgreSQL() as server:
        url = server.new_database()
        cluster = Cluster(place, *UNTESTED, "--", *place.ranks(1, place.job(UNTIL_FINISHED)))
        cluster.command = ["--ledger", url, *cluster.command]
        try:
            for name in ("n1", "n2", "n3"):
                cluster.start(name, HOLDFAST_HOME=str(place.folder / name))
                with Ledger.open(url) as ledger:
                    place.wait_until(lambda: any(one.run_id == "r" for one in ledger.runs()))
            place.wait_until(
                lambda: all((place.folder / f"rank-{rank}").exists() for rank in (0, 1))
            )
            place.wait_until(lambda: "n1" in {cluster.rank(rank)[0] for rank in (0, 1)})
            # A node that has yet to join would lead the run as one that was lost.
            place.wait_until(lambda: len(list(place.folder.glob("n?/runs/r/nodes/*.lock"))) == 2)
            with Ledger.open(url) as ledger:
                place.wait_until(lambda: ledger.lead("r").beats > 1)
                place.wait_until(lambda: ledger.attempts("r")[-1].first_step_at_s is not None)
                started = psutil.Process(cluster.nodes["n1"].pid)
                for process in (started, *started.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                place.wait_until(lambda: {cluster.rank(rank)[0] for rank in (0, 1)} == {"n2", "n3"})
                assert ledger.lead("r").generation > 1
            ends = cluster.finish()
            assert [ends[name][0] for name in ("n2", "n3")] == [0, 0], ends
            with Ledger.open(url) as ledger:
                assert ledger.run("r").state == "completed"
                (incident,) = ledger.incidents("r")
                assert incident.diagnosis["scope"] == {"node": "n1"}
            assert not (place.folder / "n1" / "rendezvous").exists()
        finally:
            for node in cluster.nodes.values():
                node.kill()
                node.communicate()


@pytest.mark.slow
@pytest.mark.skipif(Hosts.missing() is not None, reason=str(Hosts.missing()))
def test_a_cut_cable_of_the_control_channel_loses_nothing(place):
    """Independent ranks go on; their reports arrive once the cable is back."""
    options = {"cwd": place.folder, "stderr": subprocess.PIPE, "text": True}
    with Hosts.made(["n1", "n2"]) as hosts:
        meeting = ["--nnodes", "2", "--rendezvous", f"{hosts.addresses['n1']}:29500"]
        job = place.ranks(1, place.job(UNTIL_FINISHED))
        run = [*HOLDFAST, "run", "--name", "r", *meeting, "--", *job]
        nodes = []
        for name in hosts.addresses:
            environment = {**place.environment, **hosts.environment(name)}
            command = hosts.command(name, run)
            nodes.append(subprocess.Popen(command, env=environment, **options))
        try:
            place.wait_for_step("r", 1003)
            place.wait_until(
                lambda: all((place.folder / f"rank-{rank}").exists() for rank in range(2))
            )
            hosts.cut("n2")
            time.sleep(30.0)
            hosts.mend("n2")
            (place.folder / "finish").touch()
            ends = [node.communicate(timeout=240)[1] for node in nodes]
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
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_job_goes_on_with_fewer_nodes_and_is_whole_again_once_they_are_back(place):
    """With torchrun, which starts the ranks of a smaller job in another way."""
    job = ["python", place.job(ELASTIC)]
    cluster = Cluster(place, *UNTESTED, "--min-nodes", "1", "--", *job)

    def runs_as(world, accumulation):
        told = place.folder / "place"
        return told.exists() and told.read_text() == f"{world} {accumulation}"

    try:
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
    finally:
        cluster.kill()
    with place.ledger() as ledger:
        _, alone, whole = ledger.attempts("r")
        (lost,) = ledger.incidents("r")
    assert lost.diagnosis["decided_by"] == ["observer-node"]
    assert (alone.outcome, whole.outcome) == ("stopped", "completed")
    assert whole.start_step == alone.last_step, "what was saved for the launch is gone on from"
    assert alone.start_step % 20 == 0
