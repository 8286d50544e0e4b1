"""A node whose link breaks: its connections to other ranks are really cut, and nothing else is touched."""

import os
import socket
import subprocess
import sys

import pytest

from holdfast.testing.bad_nodes import BreakingLink, cut_connections

COLLECTIVE = """
import pathlib, socket, sys
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

assert sys.modules["torch.nn.parallel.distributed"].DistributedDataParallel.forward.__wrapped__
pathlib.Path(sys.argv[1]).touch()
with socket.create_server(("127.0.0.1", 0)) as server:
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    for _ in range(200):  # each one fails with a chance of a half
        try:
            dist.barrier()
        except ValueError:
            pass  # there is no process group: the connections are cut before
    print(one.recv(1), other.recv(1))
"""


@pytest.fixture
def connection():
    """A TCP connection within this process, both ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with one, other:
            yield one, other


def test_connections_are_cut_and_those_to_the_store_and_the_agent_are_not(connection, monkeypatch):
    one, other = connection
    monkeypatch.setenv("MASTER_PORT", str(one.getpeername()[1]))
    monkeypatch.setenv("HOLDFAST_CHANNEL", f"127.0.0.1:{other.getpeername()[1]}")
    cut_connections()
    one.sendall(b"x")
    assert other.recv(1) == b"x"
    monkeypatch.delenv("HOLDFAST_CHANNEL")
    assert cut_connections() >= 1
    assert one.recv(1) == b""


def test_a_node_works_until_its_link_breaks(tmp_path):
    link = BreakingLink(tmp_path / "link")
    variables = link.environment(os.environ)
    broken = tmp_path / "link" / "broken"
    assert not broken.exists()
    done = subprocess.run(
        [sys.executable, "-c", COLLECTIVE, str(broken)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("b'' b''\n", 0), done.stderr


def test_breaking_is_a_file_that_all_processes_of_the_node_see(tmp_path):
    link = BreakingLink(tmp_path / "link")
    link.break_now()
    assert (tmp_path / "link" / "broken").exists()
    assert link.environment({"PYTHONPATH": "x"})["PYTHONPATH"].endswith(f"{os.pathsep}x")
