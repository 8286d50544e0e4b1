"""Test that programs which seed their random numbers alike get different ports."""

import random

from holdfast.core.sockets import LISTENING_PORTS, free_ports


def test_ports_differ_among_programs_with_equal_seeds():
    found = []
    for _ in range(2):
        random.seed(0)
        found.append(free_ports(3))
    assert found[0] != found[1]
    assert all(port in LISTENING_PORTS for ports in found for port in ports)
