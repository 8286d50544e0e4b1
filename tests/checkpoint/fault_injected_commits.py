"""Inject faults into the system calls of a commit, one after another, and check the files left.

Run as `fault_injected_commits.py FOLDER HOW`; HOW is kill, EIO, short or dead. The program prints
one JSON object. It does not import torch, so that it starts at once.
"""

import errno
import json
import logging
import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from images import hand_made, is_whole, order_of, part_of, sealed

from checkpoint_faulting.calls import CHANGING, Strike, Traced
from checkpoint_faulting.forks import Fork
from holdfast.checkpoint import scan, verify
from holdfast.checkpoint.catalog.staging_dir import remove_leftovers

LAYOUT = hand_made(sizes=(20_000, 70_000))
OTHERS = 20
"""One in this many calls receives a fault, among the calls that change nothing."""


def persist(part, order):
    try:
        part.persist(order)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fault_of(how, call, injected):
    """Return a function that selects the fault for each system call."""

    def decide(count, name):
        if how == "short":
            return (
                Strike("short")
                if count >= call and name in ("write", "pwrite64") and not injected
                else None
            )
        if count == call or (how == "dead" and count > call and name in CHANGING):
            return (
                Strike("kill")
                if how == "kill"
                else Strike("error", error=getattr(errno, how, errno.EIO))
            )
        return None

    return decide


def is_worth_it(how, call, name):
    if how == "short":
        return name in ("write", "pwrite64")
    return name in CHANGING or (how != "dead" and call % OTHERS == 0)


def commit_with_fault(part, order, how, call):
    """Return the commit's error (None if killed), the names of its calls, and the faulty calls."""
    fork, injected = Fork(persist, part, order, held=True), []
    traced = Traced.seize(fork.pid, fault_of(how, call, injected))
    traced.injected = injected
    fork.release()
    traced.run()
    return (None if how == "kill" and injected else fork.answer()), traced.names, injected


def main(folder, how):
    logging.disable()
    before, after = (part_of(LAYOUT, sealed(LAYOUT, fill)) for fill in (1, 2))
    _, names, _ = commit_with_fault(after, order_of(make(folder, before), 2), "kill", 0)
    found = {"injected": 0, "saved": 0, "failed": 0, "taken_up": 0}
    for call, name in enumerate(names, start=1):
        if not is_worth_it(how, call, name):
            continue
        place = make(folder, before)
        order = order_of(place, 2)
        why, _, injected = commit_with_fault(after, order, how, call)
        found["injected"] += bool(injected)
        assert is_whole(place, 1, 1, [LAYOUT]), (call, name)
        assert all(verify(info).state == "verified" for info in scan(place)), (call, name)
        if why is None and call % 2:  # the next process receives the same request
            assert Fork(persist, after, order).answer() == "", (call, name)
            assert is_whole(place, 2, 2, [LAYOUT]), (call, name)
            found["taken_up"] += 1
        elif why is not None:
            # A reported success must be durable. After a failure, the checkpoint may exist if it is
            # whole.
            assert why or is_whole(place, 2, 2, [LAYOUT]), (call, name)
            assert how != "short" or not why, (call, name, why)
            found["failed" if why else "saved"] += 1
        remove_leftovers(place)
        left = [path.name for path in place.iterdir() if not path.name.startswith("step-")]
        assert not left, (call, name, left)
    sys.stdout.write(json.dumps(found))


def make(folder, before):
    """Return a folder with a checkpoint of step 1."""
    place = Path(folder) / "checkpoints"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    before.persist(order_of(place, 1))
    return place


if __name__ == "__main__":
    main(*sys.argv[1:])
