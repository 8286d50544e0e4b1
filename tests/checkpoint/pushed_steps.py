"""Make states to push, and look at what is in storage and which processes push."""

import contextlib

import psutil
import torch

from holdfast.checkpoint.storage.remote import Remote
from holdfast.checkpoint.storage.uploader import PUSHING_MODULE


def state_of(value):
    return {"t": torch.full((5000,), float(value)), "value": value}


def steps_of(url):
    return [each.step for each in Remote(url).scan() if each.state == "written"]


def pushing(folder):
    """Return the ids of the processes that push from `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if (
                PUSHING_MODULE in words
                and str(folder) in words
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process.pid)
    return found


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
