"""A bad node in a real run of several nodes is found, cordoned and replaced by the spare.

`nodes check` too.
"""

import json
import os
import re
import signal

import pytest

import json_schemas
from holdfast.recover.agent.rendezvous import loopback_listener

TRAIN = """
import os, pathlib, sys, time
import holdfast

run = holdfast.attach()
step = 1000 * int(os.environ["HOLDFAST_ATTEMPT"])
name, rank = os.environ["HOLDFAST_NODE_NAME"], os.environ["RANK"]
told = pathlib.Path(f"rank-{rank}")
told.with_suffix(f".{os.getpid()}").write_text(f"{name} {os.getpid()}")
told.with_suffix(f".{os.getpid()}").replace(told)
while not pathlib.Path("finish").exists():
    step += 1
    time.sleep(0.02)
    run.step(step)
    if name == "n2" and pathlib.Path("strike").exists():
        print("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", file=sys.stderr)
        sys.exit(1)
"""
BAD_NODE = """
import importlib.util, os, sys

class WrongTorch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def execute_and_spoil(torch):
            execute(torch)
            right = torch.matmul
            def wrong(one, other):
                product = right(one, other)
                product[3, 5] += 1
                return product
            torch.matmul = wrong
        spec.loader.exec_module = execute_and_spoil
        return spec

if os.environ.get("HOLDFAST_NODE_NAME") == "n2":
    sys.meta_path.insert(0, WrongTorch())
"""
"""A module that Python imports at its start: on the node n2 each matrix product has one wrong
element.

Only processes that import torch by themselves pay for its import.
"""


def port_of_nobody():
    with loopback_listener() as probe:
        return probe.getsockname()[1]


def environment_of(place, name, *, bad):
    environment = {**place.environment, "HOLDFAST_NODE_NAME": name}
    if bad:
        paths = [str(bad), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


@pytest.fixture
def bad_node(startup):
    """A folder for PYTHONPATH that makes n2 a node whose hardware computes wrong results."""
    return startup(BAD_NODE)


@pytest.fixture
def started(place):
    nodes = {}
    yield nodes
    for node in nodes.values():
        node.send_signal(signal.SIGKILL)
        node.communicate()


@pytest.mark.slow
def test_in_a_run_a_bad_node_is_found_and_cordoned_and_the_spare_takes_its_place(
    place, started, bad_node
):
    meeting = ["--nnodes", "2", "--rendezvous", f"127.0.0.1:{port_of_nobody()}"]
    command = ["run", "--name", "r", *meeting, "--", *place.ranks(1, place.job(TRAIN))]

    def start(name):
        environment = environment_of(place, name, bad=bad_node)
        started[name] = place.start(*command, environment=environment)

    def nodes_of_ranks():
        ranks = [place.folder / f"rank-{rank}" for rank in range(2)]
        return [rank.read_text().split()[0] for rank in ranks if rank.exists()]

    start("n1")
    place.wait_until(lambda: list((place.home / "rendezvous").glob("*.json")))
    start("n2")
    place.wait_until(lambda: nodes_of_ranks() == ["n1", "n2"])
    start("n3")
    place.wait_until(lambda: len(list((place.paths("r").root / "nodes").glob("*.lock"))) >= 2)
    place.wait_for_step("r", 1003)
    (place.folder / "strike").touch()
    place.wait_until(lambda: nodes_of_ranks() == ["n1", "n3"], timeout_s=600)
    (place.folder / "strike").unlink()
    (place.folder / "finish").touch()
    ends = {name: node.communicate(timeout=600) for name, node in started.items()}
    assert [node.returncode for node in started.values()] == [0, 0, 0], ends
    with place.ledger() as ledger:
        (incident,) = ledger.incidents("r")
        (tested,) = ledger.events("r", "nodes_tested")
        node = ledger.node("n2")
        assert not ledger.node("n1").is_cordoned
        assert not ledger.node("n3").is_cordoned
    assert incident.diagnosis["category"] == "Infrastructure"
    assert "Node n2 fails its check of matrix product" in incident.explanation
    assert "is cordoned." in incident.explanation
    assert tested.attempt == incident.attempt == 1
    assert tested.data["cordoned"] == ["n2"]
    assert node.is_hard
    assert (node.cordoned_by, node.verdicts[-1]["outcome"]) == ("r", "bad")
    assert "testing" in ends["n1"][1]


@pytest.mark.slow
def test_nodes_that_meet_are_tested_and_the_bad_one_is_named(place, started, bad_node):
    meeting = ["--nnodes", "3", "--rendezvous", f"127.0.0.1:{port_of_nobody()}"]
    for name in ("n1", "n2", "n3"):
        environment = environment_of(place, name, bad=bad_node)
        command = ["nodes", "check", *meeting, "--cordon", "--json"]
        started[name] = place.start(*command, environment=environment)
    ends = {name: node.communicate(timeout=600) for name, node in started.items()}
    assert [node.returncode for node in started.values()] == [1, 1, 1], ends
    told = [json_schemas.check(json.loads(out)) for out, _ in ends.values()]
    (report,) = [one for one in told if one["schema"] == "holdfast.nodes_check"]
    outcomes = {one["id"]: one["outcome"] for one in report["nodes"]}
    assert outcomes["n2"] == "bad"
    assert "bad" not in (outcomes["n1"], outcomes["n3"])
    assert report["cordoned"] == ["n2"]
    assert any(pair["passed"] and pair["mb_per_s"] > 0 for pair in report["pairs"]), report
    assert not any("n2" in pair["nodes"] for pair in report["pairs"])
    others = [one for one in told if one["schema"] == "holdfast.nodes_joined"]
    assert [one["outcome"] for one in others] == ["Bad: n2."] * 2
    assert not list((place.home / "rendezvous").glob("*.json"))
    code, _, err = place.look("nodes", "return", "n2")
    assert code == 2
    assert re.search("has passed no test since it was cordoned", err)


def test_nodes_that_do_not_come_are_said(place):
    code, _, err = place.look("nodes", "check", "--nnodes", "2")
    assert code == 2
    assert "--rendezvous HOST:PORT" in err
    code, _, err = place.look("nodes", "check", "--nnodes", "0")
    assert (code, "--nnodes is 0. Give the number of nodes, at least 1." in err) == (2, True)
