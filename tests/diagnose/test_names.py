"""`names.yaml`: who a line is about, by the words around a name."""

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.causes import kinds
from holdfast.diagnose.names import names


@pytest.mark.parametrize(("name", "of", "example", "tells"), names().examples)
def test_its_own_example(name, of, example, tells):
    assert set(of) <= set(kinds())
    for kind in of:
        assert names().told(kind, example).items() >= tells.items()
    assert not names().told("exception", example), "a program's exception may speak of any number"


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
    assert names().told("cuda_error", text) == {}


@pytest.mark.parametrize(
    ("log", "scope"),
    [
        ("gn7:306:3306 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n", {"local_rank": 3, "node": "gn7"}),
        ("RuntimeError: Allocation on device 0 would exceed allowed memory. (out of memory)\n", {"gpu": "0"}),
        ("c000001: FileNotFoundError: [Errno 2] No such file or directory: '/d/x.npy'\n", {"node": "c000001"}),
        (
            "-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
            '  File "/w/train.py", line 101, in f\n    g()\nKeyError: \'param_groups\'\n',
            {"local_rank": 1},
        ),
        ("ps-8:795:822 [0] socket.h:409 NCCL WARN Net : Connect to 192.168.1.9<54263> failed : No route to host\n",
         {"node": "192.168.1.9"}),
        ("The actor is dead because its owner has died. Owner Id: 01 Owner Ip address: 10.4.0.19 Owner worker exit type: "
         "SYSTEM_ERROR Worker exit detail: Owner's node has crashed.\n", {"node": "10.4.0.19"}),
    ],
)  # fmt: skip
def test_who_is_at_fault_is_named(tmp_path, log, scope):
    (tmp_path / "job.log").write_text(log)
    assert diagnose(tmp_path).scope == scope
