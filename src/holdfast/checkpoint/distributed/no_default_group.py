"""Import `torch.distributed.nn` without a reference to the current default process group.

Functions of `torch.distributed.nn` take the default group that exists at their import as a default
argument. They keep the group and gloo's threads alive beyond `destroy_process_group`, until the
interpreter exits. There, one of these threads sometimes aborts a process that had ended well
("terminate called without an active exception", seen with torch 2.13).
`torch.distributed.checkpoint` imports these functions, and most Checkpointers are made after the
group. Imported without a default group, the functions look the group up when they are called.
"""

import sys

import torch.distributed as dist


def _import_without_group() -> None:
    if (
        not dist.is_available()
        or not dist.is_initialized()
        or "torch.distributed.nn.functional" in sys.modules
    ):
        return
    world = dist.group.WORLD  # a local variable: a global would keep the group alive as well
    dist.group.WORLD = None
    try:
        import torch.distributed.nn.functional  # noqa: F401
    finally:
        dist.group.WORLD = world


_import_without_group()
