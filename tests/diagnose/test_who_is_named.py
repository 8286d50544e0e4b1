"""Test `names.yaml`: which rank or node a line names, by the words around the name."""

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.explain.locate import names
from holdfast.diagnose.rules.causes import kinds

SPAWNED = """-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/w/train.py", line 101, in f
    g()
KeyError: 'param_groups'
"""
RAY_BLOCK = """ray.exceptions.RayActorError: The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tpid: 6420
\tip: 10.72.56.3
The actor is dead because its node has died. Node Id: 677df2a9020c5db45e755b0078c469e2
"""


@pytest.mark.parametrize(("name", "of", "example", "tells"), names().examples)
def test_its_own_example(name, of, example, tells):
    assert set(of) <= set(kinds())
    for kind in of:
        assert names().names_in(kind, example).items() >= tells.items()
    assert not names().names_in("exception", example), (
        "a program's exception may speak of any number"
    )


@pytest.mark.parametrize(
    "text",
    [
        "the device is not 10 GB large",
        "CUDA error on a device",
        "GPU 80GB HBM3",
        "GPU 22.13 GiB in use",
        "GPU H100",
        "device-side assert triggered",
        "compute capability 9.0 of the device",
    ],
)
def test_a_number_that_names_no_device(text):
    assert names().names_in("cuda_error", text) == {}


@pytest.mark.parametrize(
    ("log", "scope"),
    [
        ("gn7:306:3306 [3] alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n", {"local_rank": 3, "node": "gn7"}),
        ("RuntimeError: Allocation on device 0 would exceed allowed memory. (out of memory)\n", {"gpu": "0"}),
        ("c000001: FileNotFoundError: [Errno 2] No such file or directory: '/d/x.npy'\n", {}),
        ("c000001: OSError: [Errno 28] No space left on device: '/d/x.npy'\n", {"node": "c000001"}),
        (
            SPAWNED,
            {"local_rank": 1},
        ),
        ("ps-8:795:822 [0] socket.h:409 NCCL WARN Net : Connect to 192.168.1.9<54263> failed : No route to host\n",
         {"node": "192.168.1.9"}),
        (
            "Owner Ip address: 10.4.0.19 Owner worker exit type: SYSTEM_ERROR: Owner's node has crashed.\n",
            {"node": "10.4.0.19"},
        ),
        (RAY_BLOCK, {"node": "10.72.56.3"}),
        ("The actor died because its node has died. Node Id: 581656f84659be9bba58da99\n",
         {"node": "581656f84659be9bba58da99"}),
    ],
)  # fmt: skip
def test_who_is_at_fault_is_named(tmp_path, log, scope):
    (tmp_path / "job.log").write_text(log)
    assert diagnose(tmp_path).scope == scope
