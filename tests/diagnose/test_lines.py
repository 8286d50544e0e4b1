"""Test that each prefix is separated as `dialects.yaml` defines, and other lines stay whole."""

from importlib import resources

import pytest
import re2
import yaml

from holdfast.diagnose.logs.lines import clean_line, dialects

GROUPS = {"time", "host", "rank", "local_rank", "task", "stream"}
DIALECTS = yaml.safe_load(
    (resources.files("holdfast.diagnose.logs") / "dialects.yaml").read_text("utf-8")
)


@pytest.mark.parametrize("one", DIALECTS, ids=lambda one: one["id"])
def test_example_is_parted_as_stated(one):
    prefix, text = one["example"]
    assert dialects().part(prefix + text) == (text, one["tells"])
    assert re2.match(one["pattern"], prefix + text), "another dialect parts the example"
    assert re2.match(one["pattern"], prefix + text).end() == len(prefix), (
        "another dialect parts the example"
    )
    assert set(one["tells"]) <= set(re2.compile(one["pattern"]).groupindex) <= GROUPS


@pytest.mark.parametrize(
    "text",
    [
        "error: 12: x",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        "torch.OutOfMemoryError: CUDA out of memory.",
        '  File "/app/train.py", line 12, in main',
        "    loss = model(batch)",
        "loss: 2.31",
        "step 12: loss 2.31",
        "[step:1180] loss 2.31",
        "step-118 | loss 2.31",
        "{'loss': 2.31, 'epoch': 0.1}",
        "  2%|2         | 118/5200 [03:11<2:17:05,  1.62s/it]",
        "mlx5_0: link is down",
        "eth0: Link is Down",
        "conv2: weights are frozen",
        "python3: can't open file 'x.py'",
        "train.py: error: unrecognized arguments: --x",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.",
        "srun: error: node0007: task 3: Exited with exit code 1",
        "ERROR: Unexpected bus error encountered in worker.",
        "[E socket.cpp:860] [c10d] The client socket has timed out",
        "[Rank 3] Watchdog caught collective operation timeout",
        "[PG ID 2 PG GUID 3 Rank 1] failure detected",
        "[INFO] [launch.py:256:main] dist_world_size=16",
        "[engine.cc:12] something",
        "[node] something",
        "2024 was a year",
        "12 of 16 ranks joined",
        "3:11 left",
        "frame #0: c10::Error::Error",
        "WARNING: something",
        "kernel: no such function",
        "kernel 12: slow",
        "Killed",
        "",
    ],
)
def test_nothing_is_swallowed(text):
    assert dialects().part(text) == (text, {})


@pytest.mark.parametrize(
    ("raw", "text", "told"),
    [
        (
            '12: [rank12]:   File "/x.py", line 3, in f',
            '  File "/x.py", line 3, in f',
            {"rank": 12},
        ),
        ("3: KeyError: 4", "KeyError: 4", {"rank": 3}),
        ("0: [rank9]: KeyError: 4", "KeyError: 4", {"rank": 9}),
        (
            "[default7]:[rank15]: KeyError: 'state'",
            "KeyError: 'state'",
            {"rank": 15, "local_rank": 7},
        ),
        ("[default0]:    x = y", "    x = y", {"local_rank": 0}),
        ("[1,0]<stderr>:[1,0]<stderr>:    x = y", "    x = y", {"rank": 0, "stream": "stderr"}),
        (
            "(RayTrainWorker pid=811, ip=10.0.0.3) [rank1]: KeyError: 4",
            "KeyError: 4",
            {"rank": 1, "host": "10.0.0.3"},
        ),
        ("(RayTrainWorker pid=811)", "", {}),
        ("\x1b[36m(Worker pid=811)\x1b[0m   x", "  x", {}),
        ("[0] node0:135:1390 [0] NCCL WARN x", "NCCL WARN x", {"rank": 0, "host": "node0"}),
        (
            "[80749] [rank3]:[E321 02:07:08.4 x.cpp:1664] y",
            "[E321 02:07:08.4 x.cpp:1664] y",
            {"rank": 3},
        ),
        (
            "Jun  1 03:11:47 n7 kernel: [ 1843.308145] NVRM: Xid",
            "NVRM: Xid",
            {"host": "n7", "time": "Jun  1 03:11:47"},
        ),
        (
            "2025-11-09 15:39:31.043 +08:00 [2025-11-09 07:39:30] n8:28:1219 [0] x",
            "x",
            {"host": "n8"},
        ),
        (
            "2024-06-01 03:11:47,123 - root - ERROR - KeyError: 4",
            "KeyError: 4",
            {"time": "2024-06-01 03:11:47,123"},
        ),
        ("2024-06-01 03:11:47,123 - root - INFO - step: 4", "- root - INFO - step: 4", {}),
        ("[2024-06-01 03:11:47,123][src.train][ERROR] - KeyError: 4", "KeyError: 4", {}),
        ("2022-11-15 16:03:15.140058: E external/x.cc:954] y", "E external/x.cc:954] y", {}),
        ("[titan] 2024-06-01 03:11:47,123 - root - INFO - x", "- root - INFO - x", {"host": None}),
        (
            "[01:17:10.938]: W1024 01:17:10.936000 14040 torch/x.py:9] NameError: y",
            "NameError: y",
            {},
        ),
    ],
)
def test_prefixes_nest(raw, text, told):
    line = clean_line(raw.encode(), 1)
    assert line.text == text
    for name, value in told.items():
        assert getattr(line, name) == value
