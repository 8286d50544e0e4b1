"""Kill saving processes with SIGKILL at seeded random instants, and check the files each time.

Usage: killed_saver.py FOLDER SEED TIMES. Prints one JSON object. The program kills in turn: the
trainer, whose writing process then completes its requests; the writing process, which the trainer
replaces; and both. The trainer is forked from this process, so that torch is imported once.
"""

import json
import os
import random
import select
import signal
import sys
from pathlib import Path

import torch
from waiting import contents

from holdfast.checkpoint import Checkpointer, scan, verify

KEEP = 2
COUNT = 500_000
ENDS_S = 240.0
"""The limit by which a writing process has ended after the death of its trainer."""


def state_of(value):
    return {
        "value": value,
        "big": torch.full((COUNT,), float(value)),
        "many": [torch.tensor(value)] * 5,
    }


def save_for_ever(folder, step, value, report):
    """Save each step twice, overlapping the next save, and report every durable value."""
    ckpt = Checkpointer(folder, keep=KEEP, keep_in_memory_s=None)
    before = pid = None
    while True:
        for _ in range(2):
            value += 1
            handle = ckpt.save(step, state_of(value))
            if pid != (pid := ckpt._engine._writer.pid):
                os.write(report, b"pid %d\n" % pid)
            if before is not None:
                before[0].result()
                os.write(report, b"%d %d\n" % before[1:])
            before = handle, step, value
        step += 1


def save_once(folder, step, value):
    with Checkpointer(folder, keep=KEEP, keep_in_memory_s=None) as ckpt:
        ckpt.save(step, state_of(value)).result()
    os._exit(0)


def fork(work, *arguments):
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
        finally:
            os._exit(1)
    return child


def in_a_fork(work, *arguments):
    assert os.waitstatus_to_exitcode(os.waitpid(fork(work, *arguments), 0)[1]) == 0


class Reports:
    """The reports of a trainer: its writing processes, and the durable values."""

    def __init__(self, reader):
        self._reader = reader
        self._content = b""

    def read(self, until=lambda _reports: False):
        """Read to the end of the reports, or until a condition holds."""
        while not until(self):
            chunk = os.read(self._reader, 65536)
            if not chunk:
                break
            self._content += chunk
        return self

    @property
    def _lines(self):
        return [
            line.split()
            for line in self._content.decode().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    @property
    def writers(self):
        return [int(words[1]) for words in self._lines if words[0] == "pid"]

    @property
    def durable(self):
        return [tuple(map(int, words)) for words in self._lines if words[0] != "pid"]


def await_end(pidfd):
    assert select.select([pidfd], [], [], ENDS_S)[0], (
        "the writing process goes on without its trainer"
    )
    os.close(pidfd)


def look(folder, found):
    names = [path.name for path in contents(Path(folder))]
    found["unfinished"] += any(name.endswith(".tmp") for name in names)
    found["replaced"] += any(name.endswith(".replaced") for name in names)
    found["deleting"] += any(name.startswith(".deleting") for name in names)


def end_it(victim, trainer, reports, folder, found):
    """Kill the victim, then all remaining processes, and wait for their end."""
    (writer,) = reports.writers
    if victim == "writer":
        pidfd = os.pidfd_open(writer)
        os.kill(writer, signal.SIGKILL)
        await_end(pidfd)
        look(folder, found)
        # The next process makes the outstanding requests durable, and later ones.
        count = len(reports.durable)
        reports.read(lambda told: len(told.writers) > 1 and len(told.durable) > count + 2)
        writer = reports.writers[-1]
        found["saved_by_the_next_writer"] += len(reports.durable) > count + 2
    pidfd = os.pidfd_open(writer)
    os.kill(trainer, signal.SIGKILL)
    if victim == "both":
        os.kill(writer, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(trainer, 0)[1])
    reports.read()
    await_end(pidfd)
    if victim == "both":
        look(folder, found)


def main(folder, seed, times):
    torch.set_num_threads(1)
    source = random.Random(seed)
    # The newest durable step so far, and its value.
    step, value = 1, 0
    found = dict.fromkeys(("unfinished", "replaced", "deleting", "restored_newer"), 0)
    found |= {"saved_by_the_writer_alone": 0, "saved_by_the_next_writer": 0}
    found["kills"] = dict.fromkeys(("trainer", "writer", "both"), 0)
    in_a_fork(save_once, folder, step, value)
    for number in range(times):
        victim = ("trainer", "writer", "both")[number % 3]
        reader, report = os.pipe()
        trainer = fork(save_for_ever, folder, step, value, report)
        os.close(report)
        reports = Reports(reader).read(lambda told: told.writers)
        try:
            select.select([], [], [], source.uniform(0.0, 0.1))
            while not list(Path(folder).glob("*.tmp")):  # from here on within a save
                select.select([], [], [], 0.0005)
            select.select([], [], [], source.uniform(0.0, 0.01))
            end_it(victim, trainer, reports, folder, found)
        except BaseException:
            os.kill(trainer, signal.SIGKILL)
            raise
        os.close(reader)
        found["kills"][victim] += 1
        if reports.durable:
            step, value = reports.durable[-1]
        names = [path.name for path in contents(Path(folder))]
        for info in scan(folder):
            assert verify(info).state == "verified", (info, names)

        state = {"value": -1, "big": torch.zeros(COUNT), "many": [torch.tensor(0)] * 5}
        restored = Checkpointer(folder).restore(state)
        # The newest is the last one that was reported durable, or one of the two saves in flight.
        assert (restored, state["value"]) >= (step, value), (
            restored,
            state["value"],
            step,
            value,
            names,
        )
        assert state["value"] in range(value, value + 3), (state["value"], value)
        assert state["big"].eq(state["value"]).all()
        assert all(each.item() == state["value"] for each in state["many"])
        if victim == "trainer":
            # All requests are completed, and nothing is left over.
            assert all(name.startswith("step-") and "." not in name for name in names), names
            found["saved_by_the_writer_alone"] += state["value"] != value
        found["restored_newer"] += state["value"] != value
        step, value = restored, state["value"]
    # The first save of a process deletes the leftovers of all earlier processes.
    in_a_fork(save_once, folder, step + 1, value)
    names = sorted(path.name for path in contents(Path(folder)))
    assert all(name.startswith("step-") and "." not in name for name in names), names
    assert len(names) == KEEP, names
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
