"""Import `torch.distributed.nn` such that it keeps no reference to the default process group.

Functions of `torch.distributed.nn` have a default argument, which at import becomes the default
group that exists then. This reference keeps the group and gloo's threads alive after
`destroy_process_group`, until the interpreter exits. At exit, one of these threads sometimes aborts
a process that had ended well ("terminate called without an active exception", seen with torch
2.13). `torch.distributed.checkpoint` imports these functions, and most Checkpointers are made when
the group already exists. This module hides the group during the import. The functions then look the
group up when they are called.
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
