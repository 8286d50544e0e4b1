"""The number of a run's nodes, and their meeting place."""

import stat

import pytest

from holdfast.core.errors import BadUse
from holdfast.core.paths import ledger_url
from holdfast.recover.agent.board import board_of
from holdfast.recover.agent.rendezvous import (
    Meeting,
    loopback_listener,
    meeting_of,
    node_name,
)

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_NODES": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NODEID": "2",
}


def meeting(*command, environment=(), **given):
    options = {"nnodes": None, "rendezvous": None, "spares": 0, "stem": "train", **given}
    return meeting_of(command, environment=dict(environment), **options)


@pytest.mark.parametrize(
    "command",
    [
        ("python", "train.py"),
        ("torchrun", "--nproc-per-node", "8", "train.py", "--nnodes", "4"),
        ("torchrun", "--nnodes=1", "--rdzv-endpoint=localhost:0", "train.py"),
        ("torchrun", "--nnodes", "1:1", "train.py"),
        ("torchrun", "--standalone", "train.py"),
    ],
)
def test_one_node_needs_no_meeting(command):
    assert meeting(*command) is None


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (["--nnodes=4", "--rdzv-endpoint=n1:29400"], ("n1", 29400)),
        (["--nnodes", "4", "--rdzv_endpoint", "n1:29400", "--rdzv-id=x"], ("n1", 29400)),
        (["--nnodes=4", "--node-rank=2", "--master-addr=n1"], ("n1", 29500)),
        (["--nnodes=4", "--master_addr", "10.0.0.1", "--master_port", "1"], ("10.0.0.1", 1)),
        (["--nnodes=4", "--rdzv-endpoint=[fe80::1]:29400"], ("fe80::1", 29400)),
    ],
)
def test_the_words_of_torchrun_say_where(options, place):
    found = meeting("torchrun", *options, "train.py")
    assert (found.nnodes, found.host, found.port) == (4, *place)


def test_options_come_first():
    found = meeting(
        *("torchrun", "--nnodes=4", "--rdzv-endpoint=n1:29400", "train.py"),
        nnodes=2,
        rendezvous="n2:1",
    )
    assert (found.nnodes, found.host, found.port) == (2, "n2", 1)


def test_the_nodes_of_a_slurm_step_find_each_other():
    found = meeting("python", "train.py", environment=STEP, spares=1)
    assert (found.nnodes, found.is_first, found.preferred_rank) == (4, False, 2)
    assert (found.key, found.run_name) == ("slurm-7.1", "train-7.1")
    assert meeting("x", environment={**STEP, "SLURM_NODEID": "0"}).is_first
    few = meeting("torchrun", "--nnodes=3", "--rdzv-endpoint=$h:1", "t.py", environment=STEP)
    assert (few.nnodes, few.host) == (3, None)
    assert meeting("x", environment=STEP, nnodes=1) is None, "each node on its own"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"environment": {**STEP, "SLURM_STEP_NUM_TASKS": "10"}}, "--ntasks-per-node=1"),
        ({"environment": STEP, "spares": 5}, "0 nodes of a step with 5"),
        ({"environment": STEP, "nnodes": 6}, "6 nodes of a step with 5"),
        ({"nnodes": 2, "rendezvous": "n1:0"}, "HOST:PORT"),
        ({"nnodes": 2, "rendezvous": "n1:http"}, "HOST:PORT"),
    ],
)
def test_what_cannot_be_is_said(given, said):
    with pytest.raises(BadUse, match=said):
        meeting("python", "train.py", **given)


def test_torchruns_elastic_range_is_refused():
    with pytest.raises(BadUse, match="give one number"):
        meeting("torchrun", "--nnodes=2:4", "--rdzv-endpoint=n1:1", "train.py")


def test_the_first_agent_of_an_address_listens(tmp_path):
    with loopback_listener() as probe:
        port = probe.getsockname()[1]
    here = Meeting(nnodes=2, key="k", host="127.0.0.1", port=port)
    elsewhere = Meeting(nnodes=2, key="k", host="192.0.2.1", port=port)
    assert elsewhere.listen() is None
    board = board_of(tmp_path, "k", ledger_url(tmp_path))
    assert not here.is_led(board)
    first = here.listen()
    assert here.listen() is None, "an agent of this node was first"
    here.publish(board, first, "secret", run_id="r")
    path = board.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    told = {"hosts": ["127.0.0.1"], "port": port, "token": "secret", "run_id": "r"}
    assert board.read() == told
    assert here.led_before(board) == "r"
    assert here.is_led(board)
    first.close()
    assert not here.is_led(board)
    path.write_text('{"port": 1}')
    assert board.read() is None
    board.remove()
    assert not path.exists()


def test_a_node_has_the_name_that_its_scheduler_gives_it():
    assert node_name({"SLURMD_NODENAME": "n7"}) == "n7"
    assert node_name({"HOLDFAST_NODE_NAME": "x", "SLURMD_NODENAME": "n7"}) == "x"
    assert node_name({"NODE_NAME": "gpu-7", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "gpu-7"
    assert node_name({"NODE_NAME": "gpu-7"}) != "gpu-7", "somebody else's variable"


POD = {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-node-0-2"}


def test_the_pods_of_a_job_find_each_other():
    found = meeting("python", "train.py", nnodes=4, environment=POD)
    assert (found.nnodes, found.host, found.is_first, found.preferred_rank) == (4, None, False, 2)
    assert (found.key, found.run_name) == ("kubernetes-train-node-0", "train-train-node-0")
    assert meeting("x", nnodes=4, environment={**POD, "JOB_COMPLETION_INDEX": "0"}).is_first
    words = meeting("torchrun", "--nnodes=3", "--master-addr=$(M)", "t.py", environment=POD)
    assert (words.nnodes, words.host) == (3, None)
    assert meeting("x", nnodes=1, environment=POD) is None, "each pod on its own"
    assert meeting("x", environment=POD) is None, "a Job of many runs"
    explicit = meeting("x", nnodes=2, rendezvous="n1:5", environment=POD)
    assert (explicit.host, explicit.port) == ("n1", 5)


@pytest.mark.parametrize(
    ("job_index", "index", "is_first", "preferred_rank"),
    [("0", "0", True, 0), ("3", "0", False, 3), ("0", "1", False, 1), ("2", "1", False, None)],
)
def test_the_pods_of_a_jobset_find_each_other(job_index, index, is_first, preferred_rank):
    names = {"JOBSET_NAME": "train", "JOBSET_UID": "0123456789ab", "JOB_INDEX": job_index}
    found = meeting("x", nnodes=4, environment={**names, "JOB_COMPLETION_INDEX": index})
    assert (found.is_first, found.preferred_rank) == (is_first, preferred_rank)
    assert (found.key, found.run_name) == ("kubernetes-train-01234567", "train-train-01234567")


def test_a_trainjob_says_how_many_pods_it_has():
    trainjob = {**POD, "PET_NNODES": "4", "PET_MASTER_ADDR": "train-node-0-0.train"}
    assert meeting("torchrun", "train.py", environment=trainjob).nnodes == 4
    found = meeting("torchrun", "train.py", environment=trainjob, spares=1)
    assert (found.nnodes, found.host) == (3, None)
    assert meeting("x", environment={**POD, "PET_NNODES": "1"}) is None
    operator = {"PET_NNODES": "4", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "23456"}
    found = meeting("torchrun", "train.py", environment=operator)
    assert (found.nnodes, found.host, found.port) == (4, "m", 23456), "of torchrun's own variables"


def test_a_long_name_of_a_job_gives_a_name_of_a_run():
    environment = {"JOB_COMPLETION_INDEX": "0", "JOBSET_NAME": "x" * 63}
    name = meeting("x", nnodes=2, environment=environment).run_name
    other = {**environment, "JOBSET_NAME": "x" * 62 + "y"}
    assert len(name) <= 64
    assert name != meeting("x", nnodes=2, environment=other).run_name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"environment": {**POD, "JOB_INDEX": "x"}, "nnodes": 2}, "JOB_INDEX is 'x'"),
        ({"environment": POD, "spares": 1}, "--spares is for a Slurm step or Kubernetes"),
        ({"environment": {**POD, "PET_NNODES": "2"}, "spares": 2}, "--nnodes is 0"),
    ],
)
def test_what_cannot_be_in_a_pod_is_said(given, said):
    with pytest.raises(BadUse, match=said):
        meeting("python", "train.py", **given)
