"""`holdfast eval` on a real Slurm and a real Ray of several nodes on this machine, whole and with a node that dies."""

import json
from pathlib import Path

import psutil
import pytest
from end_to_end_world import TIMEOUT_S, answers, check_equal, check_nothing_was_redone, end, wait_until

from holdfast.testing.slurm import PrivateSlurm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]  # whole clusters are started


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := PrivateSlurm.missing():
        pytest.skip(reason)
    with PrivateSlurm(tmp_path_factory.mktemp("s"), nodes=3, cpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray_cluster():
    """A head that offers nothing, and four nodes."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'holdfast[ray]')")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 * 2**20},
    )
    try:
        nodes = [cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20) for _ in range(4)]
        cluster.wait_for_nodes()
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def agents(folder: Path) -> dict[int, psutil.Process]:
    """The nodes' agents of an evaluation, by place."""
    found = {}
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if "holdfast.evaluate.node" in line and str(folder) in line and "-m" in line[:3]:
                found[int(process.environ()["HOLDFAST_PLACE"])] = process
        except (psutil.Error, KeyError):
            continue
    return found


def run_and_kill(world, home, words, kill, environment) -> dict:
    """Run with a node killed once engines answer; what came of it."""
    folder = home / "evaluations" / "struck"
    words = ["run", "--suite", world.suite(), "--model", world.model(), "--threads", 1, "--id", "struck", *words]
    process = world.start(*words, home=home, **environment)
    try:
        wait_until(lambda: answers(folder) > 0, process)
        kill(agents(folder))
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        end(process)
    assert process.returncode == 0, (out, err)
    check_nothing_was_redone(folder)
    return json.loads((folder / "results.json").read_text())


def test_three_nodes_of_slurm(slurm, e2e, stock, tmp_path):
    environment = {name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")}
    evaluation = e2e.json(
        "run", "--suite", e2e.suite(), "--model", e2e.model(), "--threads", 1, "--on", "slurm", "--nodes", 3,
        home=tmp_path / "home", **environment,
    )  # fmt: skip
    check_equal(evaluation, stock)
    assert evaluation["nodes"] == 3
    size = (e2e.model() / "model.safetensors").stat().st_size
    assert size <= evaluation["remote_bytes"] <= size + 2**20
    assert slurm.run(["squeue", "--noheader"]) == ""


def test_a_node_of_slurm_dies(slurm, e2e, stock, tmp_path):
    environment = {name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")}
    killed = []

    def kill(found):
        name = found[1].environ()["SLURMD_NODENAME"]
        killed.append(name)
        slurm.kill_node(name)
        slurm.run(["scontrol", "update", f"nodename={name}", "state=down", "reason=dead"])

    try:
        evaluation = run_and_kill(
            e2e, tmp_path / "home", ["--on", "slurm", "--nodes", 3, "--engines-per-node", 1], kill, environment
        )
    finally:
        for name in killed:
            slurm.restart_node(name)
    check_equal(evaluation, stock)


def test_four_nodes_of_ray(ray_cluster, e2e, stock, tmp_path):
    evaluation = e2e.json(
        "run", "--suite", e2e.suite(), "--model", e2e.model(), "--threads", 1, "--on", "ray", "--nodes", 4,
        home=tmp_path / "home", RAY_ADDRESS=ray_cluster[0].address,
    )  # fmt: skip
    check_equal(evaluation, stock)
    assert evaluation["nodes"] == 4


def test_a_command_on_ray_is_killed(ray_cluster, e2e, stock, tmp_path):
    home, environment = tmp_path / "home", {"RAY_ADDRESS": ray_cluster[0].address}
    folder = home / "evaluations" / "left"
    words = ["--model", e2e.model(), "--threads", 1, "--id", "left", "--on", "ray", "--nodes", 2]
    process = e2e.start("run", "--suite", e2e.suite(), *words, home=home, **environment)
    try:
        wait_until(lambda: answers(folder) > 0, process)
        left = list(agents(folder).values())
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
        assert left
        _, alive = psutil.wait_procs(left, timeout=TIMEOUT_S)
        assert not alive
    finally:
        end(process)
    assert '"state":"stopped"' in (folder / "timeline.jsonl").read_text()
    evaluation = e2e.json("resume", "left", home=home, **environment)
    check_equal(evaluation, stock)
    check_nothing_was_redone(folder)


def test_a_node_of_ray_dies(ray_cluster, e2e, stock, tmp_path):
    def kill(found):
        cluster, nodes = ray_cluster
        victim = found[1]
        raylets = {parent.pid for parent in victim.parents()}
        [node] = [node for node in nodes if node.all_processes["raylet"][0].process.pid in raylets]
        cluster.remove_node(node, allow_graceful=False)
        victim.wait(timeout=TIMEOUT_S)

    evaluation = run_and_kill(
        e2e, tmp_path / "home", ["--on", "ray", "--nodes", 4], kill, {"RAY_ADDRESS": ray_cluster[0].address}
    )
    check_equal(evaluation, stock)
