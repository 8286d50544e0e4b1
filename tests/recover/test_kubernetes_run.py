"""Test a run in the pods of a JobSet: an emulated API server, and pods that are processes."""

import asyncio
import sys

import pytest
import torch.distributed  # noqa: F401 - compiled once here, so that the ranks start sooner

from holdfast.cluster import end_of_pod
from holdfast.cluster.kubernetes_cordons import TAINT
from holdfast.recover.agent.child import KeptProcess
from holdfast.recover.agent.node import NodeProcess
from holdfast.recover.agent.rendezvous import Meeting
from holdfast.recover.spec import RunSpec
from holdfast.testing.kubernetes import PrivateKubernetes

GLOO = """
import os, pathlib, time
import torch, torch.distributed as dist
import holdfast

run = holdfast.attach()
dist.init_process_group("gloo")
step = 1000 * int(os.environ["HOLDFAST_ATTEMPT"])
finish = pathlib.Path("finish")
told = pathlib.Path(f"rank-{os.environ['RANK']}-{os.environ['HOLDFAST_ATTEMPT']}")
told.write_text(os.environ["HOSTNAME"])
while True:
    step += 1
    over = torch.tensor([float(finish.exists())])
    dist.all_reduce(over)
    run.step(step)
    if over.item() > 0:
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""

ALONE = """
import os, pathlib, time
import holdfast

run = holdfast.attach()
step = 1000 * int(os.environ["HOLDFAST_ATTEMPT"])
told = pathlib.Path(f"rank-{os.environ['RANK']}-{os.environ['HOLDFAST_ATTEMPT']}")
told.write_text(os.environ["HOSTNAME"])
while not pathlib.Path("finish").exists():
    step += 1
    time.sleep(0.02)
    run.step(step)
"""
"""Ranks that do not wait for each other, and import no torch."""


def runs(place):
    with place.ledger() as ledger:
        return ledger.runs()


def has_spare(place):
    """Return True if two nodes have joined the one that leads; each then has a lock of its own."""
    (run,) = runs(place)
    return len(list((place.paths(run.run_id).root / "nodes").glob("*.lock"))) == 2


def field(path):
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def jobset(folder, home, *options, pods):
    labels = "metadata.labels['jobset.sigs.k8s.io/{}']"
    variables = {
        "HOLDFAST_NODE_NAME": field("spec.nodeName"),
        "JOBSET_NAME": field(labels.format("jobset-name")),
        "JOBSET_UID": field(labels.format("jobset-uid")),
        "HOLDFAST_HOME": {"value": str(home)},
    }
    container = {
        "name": "trainer",
        "command": [sys.executable, "-m", "holdfast.cli.main", "run", *options],
        "workingDir": str(folder),
        "env": [{"name": name, **value} for name, value in variables.items()],
    }
    codes = {"operator": "In"}
    rules = [
        {"action": "FailJob", "onExitCodes": {**codes, "values": [1, 2, 3, 4]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [143]}},
    ]
    job = {
        "parallelism": pods,
        "completions": pods,
        "backoffLimit": 6,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "train"},
        "spec": {
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


@pytest.fixture
def kubernetes(place):
    with PrivateKubernetes(place.folder / "kubernetes", nodes=3) as kubernetes:
        yield kubernetes


def test_an_idle_pod_that_is_drained_leaves_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (tmp_path / "x.py").touch()
    spec = RunSpec(command=("python", "x.py"), cwd=str(tmp_path), nnodes=2)

    async def nothing(*_):
        pass

    monkeypatch.setattr(KeptProcess, "keep", nothing)
    monkeypatch.setattr(NodeProcess, "_keep_launcher_ready", nothing)

    async def drained():
        node = NodeProcess(spec, tmp_path, meeting=Meeting(nnodes=2, key="k", is_first=False))
        joining = asyncio.create_task(node.join(ledger_url="sqlite:///none"))
        await asyncio.sleep(0)
        node.stop("SIGTERM")
        return await asyncio.wait_for(joining, 60)

    outcome = asyncio.run(drained())
    assert (outcome.exit_code, outcome.sentence) == (4, "Stopped by SIGTERM.")
    assert end_of_pod(outcome.exit_code, outcome.sentence) == 143


def test_an_evicted_and_a_killed_pod_are_replaced_by_spares_and_a_cordoned_node_takes_no_pod(
    place, kubernetes
):
    # Each node would import torch for its tests.
    untested = ["--test-nodes", "never"]
    command = ["--nnodes", "2", *untested, "--", *place.ranks(1, place.job(ALONE))]
    manifest = jobset(place.folder, place.home, *command, pods=3)
    kubernetes.apply(manifest)
    first, second = place.folder / "rank-1-1", place.folder / "rank-1-2"
    kubernetes.wait_for(lambda: first.exists() and first.read_text())
    kubernetes.wait_for(lambda: has_spare(place))
    kubernetes.evict(first.read_text())
    kubernetes.wait_for(lambda: second.exists() and second.read_text())
    victim = second.read_text()
    assert victim != first.read_text()
    node = kubernetes.pod(victim)["spec"]["nodeName"]
    environment = {**place.environment, **kubernetes.environment}
    words = ["nodes", "cordon", node, "--why", "fan is loud"]
    with place.start(*words, environment=environment) as cordon:
        _, err = cordon.communicate(timeout=240)
    assert f"{node} is cordoned in Kubernetes, too." in err
    spec = kubernetes.get("nodes", node)["spec"]
    assert spec["unschedulable"]
    assert spec["taints"] == [{"key": TAINT, "value": "fan-is-loud", "effect": "NoSchedule"}]

    kubernetes.kill_pod(victim)
    spare = place.folder / "rank-1-3"
    kubernetes.wait_for(lambda: spare.exists() and spare.read_text())
    assert spare.read_text() != victim
    (place.folder / "finish").touch()
    kubernetes.wait_for(lambda: kubernetes.condition("jobsets", "train", "Completed"))
    replacement = kubernetes.pod(victim)
    assert replacement["spec"]["nodeName"] != node, "it waited until another node was free"
    (run,) = runs(place)
    assert run.run_id.startswith("job-train-")
    with place.ledger() as ledger:
        assert ledger.events(run.run_id, kinds=["stop_asked"]) == [], (
            "the eviction ended one pod alone"
        )
    told = kubernetes.pod("train-node-0-0")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert told["message"].startswith("holdfast class=completed code=0: The job completed.")

    words = ["nodes", "return", node, "--force"]
    with place.start(*words, environment=environment) as returned:
        _, err = returned.communicate(timeout=240)
    assert f"{node} may be used in Kubernetes, too." in err
    assert kubernetes.get("nodes", node)["spec"] == {}


def test_the_pod_that_leads_is_evicted_and_another_one_leads_a_training_that_goes_on(
    place, kubernetes
):
    command = ["--nnodes", "2", "--", sys.executable, place.job(GLOO)]
    kubernetes.apply(jobset(place.folder, place.home, *command, pods=3))
    first, second = place.folder / "rank-0-1", place.folder / "rank-0-2"
    kubernetes.wait_for(lambda: first.exists() and first.read_text())
    kubernetes.wait_for(lambda: has_spare(place))
    leader = first.read_text()
    assert leader == "train-node-0-0"
    uid = kubernetes.pod(leader)["metadata"]["uid"]
    kubernetes.evict(leader)
    kubernetes.wait_for(lambda: second.exists() and second.read_text())
    (run,) = runs(place)
    kubernetes.wait_for(lambda: kubernetes.pod(leader)["metadata"]["uid"] != uid)

    def events(kind):
        with place.ledger() as ledger:
            return ledger.events(run.run_id, kind=kind)

    kubernetes.wait_for(lambda: events("supervisor_followed"))
    (place.folder / "finish").touch()
    kubernetes.wait_for(lambda: kubernetes.condition("jobsets", "train", "Completed"))
    (run,) = runs(place)
    assert (run.state, run.exit_code) == ("completed", 0)
    assert len(events("handed_over")) == 1
    assert (events("stop_asked"), events("node_lost")) == ([], [])
    assert not (place.folder / "rank-0-3").exists(), "the takeover touched no rank"
