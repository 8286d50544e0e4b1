"""Test the connection of two or three nodes by an allgather, and compare each bit of the result.

`worker` runs the test in a process that is killed at a time limit. The test uses NCCL with the
first GPU of each node, if each node has a GPU and torch has NCCL, and otherwise gloo.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

from holdfast.recover.localise.solo import is_occupied

ELEMENTS, GPU_ELEMENTS = 1024 * 1024, 16 * 1024 * 1024
"""The number of four-byte elements that each node sends in one gather."""
GATHERS = 3
CONNECT_S = 10.0
"""The seconds that the nodes of a test wait for each other, and for each collective."""
LIMIT_S = 20.0
"""The seconds that a test may take."""
MAX_REASON = 300


@dataclass(frozen=True, kw_only=True)
class GroupOrder:
    """An order to take part in a group test, for one node.

    Attributes:
        rank, world_size: the rank of this node in the test, and the number of nodes.
        address, port: the address on which the node of rank 0 listens.
        use_gpu: True if every node of the test has a GPU.
    """

    rank: int
    world_size: int
    address: str
    port: int
    use_gpu: bool = False

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read an order.

        Raises:
            KeyError, TypeError, ValueError: the order is malformed.
        """
        return cls(
            rank=int(fields["rank"]),
            world_size=int(fields["world_size"]),
            address=str(fields["address"]),
            port=int(fields["port"]),
            use_gpu=bool(fields["use_gpu"]),
        )


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """The result of a group test on one node.

    Attributes:
        passed: True if the test passed; None if the test could not be made.
        reason: why the test failed or could not be made.
        mb_per_s: the speed of receiving from the other nodes, in 10^6 bytes a second.
    """

    passed: bool | None
    reason: str = ""
    mb_per_s: float | None = None

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read a result that another process has sent.

        Raises:
            KeyError, TypeError, ValueError: the result is malformed.
        """
        passed, speed = fields["passed"], fields["mb_per_s"]
        return cls(
            passed=None if passed is None else bool(passed),
            reason=str(fields["reason"])[:MAX_REASON],
            mb_per_s=None if speed is None else float(speed),
        )


def tested(order: GroupOrder) -> GroupResult:
    """Take part in a group test; return the result on this node."""
    try:
        return GroupResult(passed=True, mb_per_s=_gathered(order))
    except (ImportError, AttributeError, TypeError) as error:
        # torch is missing, or of an unsupported version.
        return GroupResult(passed=None, reason=f"torch cannot do it here: {error}"[:MAX_REASON])
    except Exception as error:  # errors of torch have no common class
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        # The port was taken after it had been found free, or the GPU is in use. This is no sign of
        # a faulty node.
        passed = None if "EADDRINUSE" in str(error) or is_occupied(error) else False
        return GroupResult(passed=passed, reason=reason)


def _gathered(order: GroupOrder) -> float:
    """Run the test; return the speed in 10^6 bytes a second."""
    import torch
    import torch.distributed as dist

    use_gpu = order.use_gpu and torch.cuda.is_available() and dist.is_nccl_available()
    device = torch.device("cuda", 0) if use_gpu else torch.device("cpu")
    elements = GPU_ELEMENTS if use_gpu else ELEMENTS
    timeout = timedelta(seconds=CONNECT_S)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        order.address,
        order.port,
        order.world_size,
        is_master=order.rank == 0,
        timeout=timeout,
    )
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if use_gpu else "gloo",
        store=store,
        rank=order.rank,
        world_size=order.world_size,
        timeout=timeout,
    )
    try:
        began_s = time.monotonic()
        for round_ in range(GATHERS):
            parts = [
                torch.empty(elements, dtype=torch.int32, device=device)
                for _ in range(order.world_size)
            ]
            dist.all_gather(parts, _pattern(order.rank, round_, elements, device))
            for rank, part in enumerate(parts):
                if not torch.equal(part, _pattern(rank, round_, elements, device)):
                    raise ValueError(f"data from node {rank} of the test arrived changed")
        seconds = time.monotonic() - began_s
        # A node that ended immediately would cut the connections of the other nodes.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    received_bytes = GATHERS * (order.world_size - 1) * elements * 4
    return received_bytes / seconds / 1e6


def _pattern(rank: int, round_: int, elements: int, device: Any) -> Any:
    """Return the data that a rank sends in a round: int32, shape `(elements,)`.

    Every rank can compute the data of all ranks.
    """
    import torch

    # Products with odd numbers overflow and wrap around, so that each bit of an element changes.
    ramp = torch.arange(elements, dtype=torch.int32, device=device)
    return ramp * (2654435 + 2 * (GATHERS * rank + round_)) + rank
