"""Hosts of network namespaces: they reach each other, know their names, and are gone afterwards."""

import os
import subprocess
import sys

import pytest

from holdfast.testing import hosts as hosts_module
from holdfast.testing.hosts import Hosts, NoHosts, delete_stale

SERVE = "import socket; s = socket.create_server(('', 7)); print('up', flush=True); s.accept()[0].sendall(b'hello')"
ASK = "import socket; print(socket.gethostbyname(socket.gethostname()), socket.create_connection(('a', 7), 30).recv(9))"
MAKE_AND_DIE = """
import os, signal
from holdfast.testing.hosts import Hosts
with Hosts.made(["a"]) as hosts:
    print(hosts.command("a", [])[-1], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def namespaces():
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


def own_namespaces():
    """The names of those that this process has made: tests beside this one make others."""
    return {name for name in namespaces() if name.startswith(f"holdfast-{os.getpid()}-")}


@pytest.fixture
def two():
    """Two hosts, `a` and `b`; the test is skipped where the machine has none."""
    try:
        with Hosts.made(["a", "b"]) as hosts:
            yield hosts
    except NoHosts as error:
        pytest.skip(str(error))


def test_hosts_reach_each_other_by_name_and_are_gone_afterwards():
    try:
        with Hosts.made(["a", "b"]) as hosts:
            serve = hosts.command("a", [sys.executable, "-c", SERVE])
            with subprocess.Popen(serve, stdout=subprocess.PIPE) as server:
                assert server.stdout.readline() == b"up\n"
                ask = hosts.command("b", [sys.executable, "-c", ASK])
                done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=240)
            assert done.stdout.split() == [hosts.addresses["b"], "b'hello'"]
            names = {hosts.command(name, [])[-1] for name in ("a", "b")}
            assert names <= namespaces()
    except NoHosts as error:
        pytest.skip(str(error))
    assert not names & namespaces()
    assert not any((hosts_module._FILES / name).exists() for name in names)


def test_a_process_on_a_host_keeps_its_id_and_has_the_variables(two):
    own_id = [
        sys.executable,
        "-c",
        "import os; print(os.getpid(), os.environ['GLOO_SOCKET_IFNAME'])",
    ]
    environment = {**os.environ, **two.environment("a")}
    with subprocess.Popen(
        two.command("a", own_id), stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        said, _ = process.communicate(timeout=240)
    assert said.split() == [str(process.pid), hosts_module.INTERFACE]
    assert two.environment("a")["HOLDFAST_NODE_NAME"] == "a"


def test_what_a_killed_process_left_is_deleted_and_what_a_living_one_has_is_not(two):
    done = subprocess.run(
        [sys.executable, "-c", MAKE_AND_DIE],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    left = done.stdout.strip()
    assert done.returncode == -9
    assert left.startswith("holdfast-")
    delete_stale()  # unless a test beside this one has done so
    assert left not in namespaces()
    assert two.command("a", [])[-1] in namespaces()


def test_the_reason_is_said_where_there_can_be_no_hosts(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoHosts, match="only root"), Hosts.made(["a"]):
        pass


def test_the_missing_command_is_named_where_there_can_be_no_hosts(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found = {"ip": "/sbin/ip"}
    monkeypatch.setattr(hosts_module.shutil, "which", found.get)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoHosts, match="the command unshare is missing"), Hosts.made(["a"]):
        pass


def test_a_command_that_hangs_is_a_reason_for_no_hosts(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts_module, "_COMMAND_S", 0.1)
    for name in ("ip", "unshare"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 3600\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NoHosts, match="no network namespaces here"), Hosts.made(["a"]):
        pass


def test_half_made_hosts_are_deleted_and_the_reason_is_said(two, monkeypatch):
    before = own_namespaces()
    real = hosts_module._ip

    def refuses(*words):
        if "bridge" in words:
            raise NoHosts("ip link add bridge0 type bridge: Operation not supported")
        return real(*words)

    monkeypatch.setattr(hosts_module, "_ip", refuses)
    with pytest.raises(NoHosts, match="Operation not supported"), Hosts.made(["c"]):
        pass
    assert own_namespaces() == before


def test_a_cut_cable_keeps_calls_away_until_it_is_mended(two):
    listen = (
        "import socket; s = socket.create_server(('', 7)); print(flush=True); s.accept()[0].recv(9)"
    )
    call = "import socket; socket.create_connection(('{}', 7), timeout={}).close()"

    def reached(timeout_s):
        code = call.format(two.addresses["a"], timeout_s)
        command = two.command("b", [sys.executable, "-S", "-c", code])
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    command = two.command("a", [sys.executable, "-S", "-c", listen])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as listener:
        listener.stdout.read(1)
        two.cut("a")
        assert not reached(0.2)
        two.mend("a")
        assert reached(60)
        listener.wait(60)
