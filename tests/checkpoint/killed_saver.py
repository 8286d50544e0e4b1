"""Kills a process that saves, with SIGKILL, at seeded random instants, and checks what is left each time.

Usage: killed_saver.py FOLDER SEED TIMES. Prints one JSON object. The process that saves is forked from this one,
so that torch is imported once.
"""

import json
import os
import random
import select
import signal
import sys
from pathlib import Path

import torch

from holdfast.checkpoint import Checkpointer, scan, verify

KEEP = 2


def state_of(value):
    return {"value": value, "big": torch.full((20_000,), float(value)), "many": [torch.tensor(value)] * 5}


def save_for_ever(folder, step, value, report):
    """Save steps upwards, each twice, and report every value that is durable."""
    ckpt = Checkpointer(folder, keep=KEEP)
    while True:
        for _ in range(2):
            value += 1
            ckpt.save(step, state_of(value)).result()
            os.write(report, b"%d %d\n" % (step, value))
        step += 1


def read_all(pipe):
    content = b""
    while chunk := os.read(pipe, 65536):
        content += chunk
    return [tuple(map(int, line.split())) for line in content.decode().splitlines()]


def main(folder, seed, times):
    torch.set_num_threads(1)
    source = random.Random(seed)
    # Durable so far: newest step and its value.
    step, value = 1, 0
    found = {"kills": 0, "unfinished": 0, "replaced": 0, "deleting": 0, "restored_newer": 0}
    Checkpointer(folder).save(step, state_of(value))
    while found["kills"] < times:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                save_for_ever(folder, step, value, writer)
            finally:
                os._exit(1)
        os.close(writer)
        select.select([], [], [], source.uniform(0.005, 0.15))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        found["kills"] += 1
        reported = read_all(reader)
        os.close(reader)
        if reported:
            step, value = reported[-1]
        names = [path.name for path in Path(folder).iterdir()]
        found["unfinished"] += any(name.endswith(".tmp") for name in names)
        found["replaced"] += any(name.endswith(".replaced") for name in names)
        found["deleting"] += any(name.startswith(".deleting") for name in names)
        for info in scan(folder):
            assert verify(info).state == "verified", (info, names)

        state = {"value": -1, "big": torch.zeros(20_000), "many": [torch.tensor(0)] * 5}
        restored = Checkpointer(folder).restore(state)
        # What was reported durable, or the one save that followed it.
        assert (restored, state["value"]) >= (step, value), (restored, state["value"], step, value, names)
        assert state["value"] in (value, value + 1), (state["value"], value)
        assert state["big"].eq(state["value"]).all()
        assert all(each.item() == state["value"] for each in state["many"])
        found["restored_newer"] += state["value"] != value
        step, value = restored, state["value"]
    # A first save of a process tidies up after all of them.
    Checkpointer(folder, keep=KEEP).save(step + 1, state_of(value))
    names = sorted(path.name for path in Path(folder).iterdir())
    assert all(name.startswith("step-") and "." not in name for name in names), names
    assert len(names) == KEEP, names
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
