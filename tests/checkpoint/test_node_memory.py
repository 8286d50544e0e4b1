"""Test memory that the ranks of a node take at the same time."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import until

from holdfast.checkpoint import scan
from holdfast.checkpoint.ipc import memory_reservation
from holdfast.checkpoint.ipc.memory_reservation import reserved

TAKES = """
import sys, time
from pathlib import Path
from holdfast.checkpoint import scan
from holdfast.checkpoint.ipc import memory_reservation
memory_reservation._SHARED = Path(sys.argv[1])
with memory_reservation.reserved(1 << 60):
    print("takes", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def shared(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_reservation, "_SHARED", tmp_path)
    return tmp_path


class Node:
    """A node with 250 bytes, of which each rank needs 60."""

    def __init__(self, monkeypatch):
        self.taken_bytes = 0
        self._changing = threading.Lock()
        monkeypatch.setattr(
            memory_reservation, "available_memory_bytes", lambda: 250 - self.taken_bytes
        )

    def take(self, _rank):
        with reserved(60) as free_bytes:
            if free_bytes < 60:
                return False
            for _ in range(60):  # takes a while
                time.sleep(0.0005)
                with self._changing:
                    self.taken_bytes += 1
            return True


def test_ranks_that_take_memory_at_once_do_not_take_more_than_there_is(monkeypatch, shared):
    node = Node(monkeypatch)
    with ThreadPoolExecutor(8) as ranks:
        took = list(ranks.map(node.take, range(8)))
    assert sum(took) == 4
    assert node.taken_bytes == 240
    assert [path.name for path in shared.iterdir()] == [f"holdfast-taking.{os.getuid()}"]


def test_what_a_process_that_was_killed_was_taking_is_free(monkeypatch, shared):
    node = Node(monkeypatch)
    command = [sys.executable, "-c", TAKES, str(shared)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other, ThreadPoolExecutor(1) as rank:
        try:
            other.stdout.readline()
            taking = rank.submit(node.take, 0)
            looks = iter(range(50))
            until(lambda: next(looks, None) is None)
            assert not taking.done()
        finally:
            other.kill()
        assert taking.result(60)


def test_where_nothing_can_be_said_what_is_free_counts(monkeypatch, shared):
    monkeypatch.setattr(memory_reservation, "_SHARED", shared / "nowhere")
    assert Node(monkeypatch).take(0)


SAVES = """
import logging, sys
import torch
from holdfast import Checkpointer
logging.basicConfig(level=logging.WARNING)
torch.set_num_threads(1)
state = {"weights": torch.zeros(75_000_000)}
with Checkpointer(sys.argv[1], keep=1) as checkpointer:
    for step in (1, 2):
        checkpointer.save(step, state)
        checkpointer.before_update()
        state["weights"] += 1
    found = checkpointer.save(2, state, force=True).result()
print("saved", found)
"""


@pytest.mark.slow
def test_where_a_nested_group_has_no_memory_for_two_snapshots_there_is_one(limited_group, tmp_path):
    """300 MB of state and one snapshot fit into 1 GB beside torch; a second snapshot would not."""
    ended = limited_group(10**9).run([sys.executable, "-c", SAVES, tmp_path], timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert "There is no memory for a second snapshot" in ended.stderr
    assert [info.step for info in scan(tmp_path) if info.state == "written"] == [2]
