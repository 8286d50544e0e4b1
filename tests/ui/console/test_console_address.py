"""Refuse addresses at which the console cannot listen, and name the option that mends each."""

import errno
import socket
from contextlib import closing

import pytest

from holdfast.core.errors import BadUse
from holdfast.ui import Address
from holdfast.ui.console.serving import serve


def refusal(address: Address) -> str:
    with pytest.raises(BadUse) as refused:
        serve(None, address, show=print, complain=print)
    return str(refused.value)


def test_a_taken_port_names_another_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        assert "--port 0" in refusal(Address(port=taken.getsockname()[1]))


@pytest.mark.parametrize("host", ["999.1.1.1", "ä" * 64, "192.0.2.1"])
def test_an_address_that_is_not_of_this_host_names_the_host(host):
    said = refusal(Address(host=host, port=0))
    assert said.endswith("Name an address of this host with --host.")


def test_a_host_without_ipv6_names_the_host(monkeypatch):
    def no_socket(*_):
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_socket)
    assert refusal(Address(host="::1", port=0)).endswith("with --host.")
