"""Exchange the ranks' addresses, and assign each rank a peer on another node.

The peer holds the rank's newest snapshot in memory.
"""

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import psutil

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.place import ENV_FAILURE_DOMAIN, ENV_NODE, Place, own_place
from holdfast.checkpoint.memory.peer import Pairing
from holdfast.checkpoint.memory.peer_protocol import TOKEN_BYTES
from holdfast.checkpoint.memory.peer_sender import Peer

_logger = logging.getLogger("holdfast")
ENV_INTERFACES: Final = "GLOO_SOCKET_IFNAME"
"""The environment variable that names gloo's network interfaces; the first usable one is used."""
_LOOPBACK: Final = "127.0.0.1"


class _Offer(NamedTuple):
    place: Place
    host: str
    port: int
    token: bytes


def meet(ranks: Ranks) -> Pairing | None:
    """Agree with all ranks on peers, and return this rank's. Collective.

    Returns:
        This rank's pairing. If no peers are possible, None on all ranks; rank 0 then logs the
        reason.
    """
    listener: socket.socket | None = None
    with contextlib.ExitStack() as undo:

        def offer() -> _Offer:
            nonlocal listener
            listener = undo.enter_context(_listen())
            host, port = listener.getsockname()[:2]
            return _Offer(own_place(), host, port, secrets.token_bytes(TOKEN_BYTES))

        try:
            offers = ranks.together(offer)
        except OSError as error:
            if ranks.rank == 0:
                _logger.warning("peer_memory: no snapshot is held on another node: %s", error)
            return None
        pairs = partners([each.place for each in offers])
        partner = pairs[ranks.rank]
        if ranks.rank == 0:
            _warn_of_poor_pairs(offers, pairs)
        if partner is None or listener is None:
            return None
        undo.pop_all()
        _place, host, port, token = offers[partner]
        return Pairing(
            to=Peer(rank=partner, host=host, port=port, token=token),
            listener=listener,
            token=offers[ranks.rank].token,
            ranks=tuple(rank for rank, holder in enumerate(pairs) if holder == ranks.rank),
        )


def _warn_of_poor_pairs(offers: list[_Offer], pairs: list[int | None]) -> None:
    if None in pairs:
        _logger.warning(
            "peer_memory: all ranks are on one node, and no snapshot is held on another one. "
            "If they are not, give each node a unique name in %s.",
            ENV_NODE,
        )
        return
    alike = sum(
        bool(mine.place.domain) and mine.place.domain == offers[holder].place.domain
        for mine, holder in zip(offers, pairs, strict=True)
        if holder is not None
    )
    if alike:
        _logger.warning(
            "peer_memory: %d of %d ranks have their peer in their own failure domain, as more "
            "than half of the nodes are in one (%s).",
            *(alike, len(offers), ENV_FAILURE_DOMAIN),
        )


def _listen() -> socket.socket:
    """Bind a socket to an address of the network interfaces that gloo uses, and return it.

    Peers can reach this node at that address; otherwise, gloo could not have connected the ranks.

    Raises:
        OSError: this node has no such address.
    """
    failed: OSError | None = None
    for family, host in _addresses():
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, 0))
        except OSError as error:
            listener.close()
            failed = error
        else:
            return listener
    raise OSError(
        f"A rank has no address to listen on ({failed or 'no such interface'}). "
        f"Name an interface of this node in {ENV_INTERFACES}."
    )


def _addresses() -> Iterator[tuple[int, str]]:
    if names := os.environ.get(ENV_INTERFACES):
        interfaces = psutil.net_if_addrs()
        for name in names.split(","):
            for address in interfaces.get(name.strip(), ()):
                if (
                    address.family in (socket.AF_INET, socket.AF_INET6)
                    and "%" not in address.address
                ):
                    yield address.family, address.address
        return
    with contextlib.suppress(OSError):  # the host name cannot be resolved
        for found in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield found[0], str(found[4][0])
    yield socket.AF_INET, _LOOPBACK


def partners(places: Sequence[Place]) -> list[int | None]:
    """Return for each rank the rank that holds its snapshot; None for all ranks on a single node.

    The nodes form a ring in which the nodes of a failure domain are adjacent. A node's snapshots
    are held by the node halfway around the ring. Thus each node holds the snapshots of one other
    node. The two nodes are in different failure domains unless one domain has more than half of the
    nodes. The ranks of a node are assigned to the holding node's ranks in order. If that node has
    fewer ranks, the assignment starts again at its first rank.

    Args:
        places: the node and failure domain of each rank, by rank.
    """
    nodes: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place.node, []).append(rank)
    domains: dict[tuple[str, str], list[str]] = {}
    for node, ranks in nodes.items():
        domain = places[ranks[0]].domain
        domains.setdefault((domain, "" if domain else node), []).append(node)
    ring = [node for together in domains.values() for node in together]
    found: list[int | None] = [None] * len(places)
    if len(ring) > 1:
        for at, node in enumerate(ring):
            holders = nodes[ring[(at + len(ring) // 2) % len(ring)]]
            for local, rank in enumerate(nodes[node]):
                found[rank] = holders[local % len(holders)]
    return found
