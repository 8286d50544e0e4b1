"""Run `holdfast eval` on a real Slurm and a real Ray of several nodes, with a dying node.

The runs need no harness and no engine with torch, and check nodes, engines, weights and answers by
request. `test_end_to_end_scores` compares a run on Slurm with stock lm-eval.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from end_to_end_world import HERE, wait_until
from fault_injector import PATIENCE_S, FaultInjector
from gated_engine import Gate

from evaluation.fault_injected_evaluation import (
    FaultInjectedEvaluation,
    expected_results,
    synthetic_tasks,
)
from holdfast.testing.slurm import PrivateSlurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_is_left"),
]  # whole clusters are started
SAMPLES = (50, 40, 50)
MODEL_BYTES = 4 << 20


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := PrivateSlurm.missing():
        pytest.skip(reason)
    with PrivateSlurm(tmp_path_factory.mktemp("s"), nodes=3, cpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray_cluster():
    """Start a head without resources, and two nodes."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'holdfast[ray]')")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", str(HERE), prepend=os.pathsep
        )  # what Ray starts has this environment
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": 80 * 2**20,
            },
        )
        try:
            nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20) for _ in range(2)]
            cluster.wait_for_nodes()
            yield cluster, nodes
        finally:
            ray.shutdown()
            cluster.shutdown()


def slurm_environment(slurm: PrivateSlurm) -> dict[str, str]:
    return {name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")}


def agents(folder: Path) -> dict[int, psutil.Process]:
    """Return the nodes' agents of an evaluation, by place."""
    found = {}
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if (
                "holdfast.evaluate.run.node_agent" in line
                and str(folder) in line
                and "-m" in line[:3]
            ):
                found[int(process.environ()["HOLDFAST_PLACE"])] = process
        except (psutil.Error, KeyError):
            continue
    return found


class FaultInjectedRun:
    """Run an evaluation with one engine per node, until 20 requests are finished.

    The gate holds all further requests.
    """

    def __init__(self, folder: Path, on: str, nodes: int, environment: dict[str, str]) -> None:
        self.gate = Gate(folder, kind="simulated")
        self.evaluation = FaultInjectedEvaluation(
            folder=folder,
            tasks=synthetic_tasks(random.Random(0), SAMPLES, metric_s=0.02),
            nodes=nodes,
            engines_per_node=1,
            model_bytes=MODEL_BYTES,
            flags=("--on", on, "--max-batch", "4", "--metric-slots", "2", *self.gate.flags),
            environment={**environment, "PYTHONPATH": str(HERE)},
        )
        self.injector = FaultInjector(self.evaluation, seed=0)

    def start(self) -> None:
        self.gate.let(0)
        self.command = self.evaluation.start()
        wait_until(lambda: len(self.gate.asked()) == self.evaluation.nodes, self.command)
        self.gate.let(20)
        assert self.evaluation.wait_until_finished(20, PATIENCE_S), self.evaluation.output()

    def lose_a_node(self, kill: Callable[[psutil.Process], None]) -> None:
        """End an agent's node by `kill`; the others finish everything."""
        agent = agents(self.evaluation.paths.root)[1]
        self.injector.end(agent.pid, lambda: kill(agent))
        self.gate.open()
        assert self.command.wait(PATIENCE_S) == 0, self.evaluation.output()
        self.check()
        read_bytes = json.loads(self.evaluation.paths.results.read_bytes())["remote_bytes"]
        assert MODEL_BYTES <= read_bytes < 1.25 * MODEL_BYTES, "all nodes together read it once"

    def check(self) -> None:
        # Slurm ends the steps of a cancelled job a moment later.
        wait_until(lambda: not self.evaluation.leftovers())
        self.injector.check(requests=sum(SAMPLES))
        assert self.evaluation.results() == expected_results(self.evaluation.tasks)


@pytest.fixture
def fault_injected(tmp_path):
    started = []

    def start(on: str, nodes: int, **environment: str) -> FaultInjectedRun:
        started.append(FaultInjectedRun(tmp_path, on, nodes, environment))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.evaluation.end()


def test_a_node_of_slurm_dies(slurm, fault_injected):
    killed = []

    def kill(agent):
        name = agent.environ()["SLURMD_NODENAME"]
        killed.append(name)
        slurm.kill_node(name)
        slurm.run(["scontrol", "update", f"nodename={name}", "state=down", "reason=dead"])

    try:
        fault_injected("slurm", 3, **slurm_environment(slurm)).lose_a_node(kill)
    finally:
        for name in killed:
            slurm.restart_node(name)


def test_a_command_on_ray_is_killed(ray_cluster, fault_injected):
    one = fault_injected("ray", 2, RAY_ADDRESS=ray_cluster[0].address)
    left = list(agents(one.evaluation.paths.root).values())
    assert len(left) == 2
    one.injector.inject("command")
    one.command.wait()
    one.gate.open()
    _, alive = psutil.wait_procs(left, timeout=PATIENCE_S)
    assert not alive
    wait_until(
        lambda: '"state":"stopped"' in one.evaluation.paths.timeline.read_text()
    )  # the coordinator ends last
    assert one.evaluation.resume().wait(PATIENCE_S) == 0, one.evaluation.output()
    one.check()


def test_a_node_of_ray_dies(ray_cluster, fault_injected):
    def kill(agent):
        cluster, nodes = ray_cluster
        raylets = {parent.pid for parent in agent.parents()}
        [node] = [node for node in nodes if node.all_processes["raylet"][0].process.pid in raylets]
        cluster.remove_node(node, allow_graceful=False)
        agent.wait(timeout=PATIENCE_S)

    fault_injected("ray", 2, RAY_ADDRESS=ray_cluster[0].address).lose_a_node(kill)
