"""Imports what takes hold of the default process group while it can get hold of none.

Functions of `torch.distributed.nn` have the default group that exists when they are imported as a default argument,
and so keep it, with gloo's threads, past `destroy_process_group` into the end of the interpreter, where one of those
threads now and then aborts a process that had ended well ("terminate called without an active exception"; seen with
torch 2.13). `torch.distributed.checkpoint` imports them, and a Checkpointer is mostly made after the group. Without a
default these functions look the group up when they are called.
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
    world = dist.group.WORLD  # in a function: a name of the module would keep it just as well
    dist.group.WORLD = None
    try:
        import torch.distributed.nn.functional  # noqa: F401
    finally:
        dist.group.WORLD = world


_import_without_group()
