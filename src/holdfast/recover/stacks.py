"""Read the stacks of a rank's threads in the rank, and interpret the stacks in the supervisor.

Reading the stacks needs no signals, debugger or source files. So the reading thread does not
disturb a rank that works, and does not wait for a file system that hangs. If native code holds the
interpreter's lock, the rank cannot answer.
"""

import dis
import inspect
import os
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import Any

MAIN_FRAMES = 24
OTHER_FRAMES = 2
THREADS = 32
"""The largest number of threads in a message. Others are left out, so that the message does not
exceed the limit of the channel."""
TEXT_CHARACTERS = 160

_LOADS = frozenset(
    {"LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"}
)
_COLLECTIVES = frozenset(
    {
        "torch.distributed.distributed_c10d",
        "torch.distributed._functional_collectives",
        "torch.distributed.nn.functional",
        "torch.nn.parallel.distributed",
    }
)
"""Modules for collectives. They are not all modules of torch.distributed, since its checkpoints and
its launcher do other work."""
_DEVICE_CALLS = frozenset({"item", "cpu", "tolist", "numpy", "to", "synchronize", "wait"})
"""Native calls that wait for a GPU, or for a collective that was started before."""
_THREAD_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_USERS = ("holdfast.recover.shim.", "holdfast.testing.")
"""Modules of Holdfast whose frames count as the user's code. They call the user's script in a
restarted trainer, or stand for the user's code in tests."""
_LIBRARIES = (
    "<frozen ",
    *(
        f"{sysconfig.get_path(name)}{os.sep}"
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ),
)
"""The beginnings of the file names of libraries, which both Holdfast and the user's code call."""
_MONITORS = frozenset({"tqdm._monitor", "torch.utils.data._utils.pin_memory"})
"""Modules of threads that never release a lock for the user's code, since each wait for such a
thread has a timeout."""


class Activity(Enum):
    """The activity of a main thread, as far as its stack shows."""

    COLLECTIVE = "a collective"
    BACKWARD = "the backward pass"
    """In the backward pass, the rank may compute, or wait for gradients of other ranks."""
    DEVICE = "a wait for the device"
    LOCK = "a lock that none of its threads can release"
    OTHER = "other code"


@dataclass(frozen=True)
class Stand:
    """The position of a rank's main thread in its code."""

    activity: Activity
    frames: tuple[str, ...]
    """The calls as `function (file.py:line)`, the innermost first."""


def thread_stacks() -> list[dict[str, Any]]:
    """Return the stacks of all other threads as plain JSON, beginning with the main thread."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()  # the documented way to read frames of other threads
    own = threading.get_ident()
    found = []
    for ident in sorted(frames, key=lambda one: one != main)[: THREADS + 1]:
        if ident == own:
            continue
        thread = threads.get(ident)
        limit = MAIN_FRAMES if ident == main else OTHER_FRAMES
        found.append(
            {
                "main": ident == main,
                "name": "" if thread is None else thread.name[:TEXT_CHARACTERS],
                "daemon": thread is not None and thread.daemon,
                "ours": _is_ours(frames[ident]),
                "module": _module(frames[ident]),
                "call": _call(frames[ident]),
                "frames": _frames(frames[ident], limit),
            }
        )
    if len(frames) > THREADS + 1:
        found.append(
            {
                "main": False,
                "name": "others",
                "daemon": False,
                "ours": False,
                "module": "",
                "call": "",
                "frames": [],
            }
        )
    return found


def _is_ours(frame: FrameType | None) -> bool:
    """Return True if Holdfast is in a call, perhaps in a library that Holdfast has called.

    The user's code below a call of Holdfast, such as a signal handler, is the user's.
    """
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("holdfast."):
            return not name.startswith(_USERS)
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return False
        frame = frame.f_back
    return False


def _module(frame: FrameType | None) -> str:
    """Return the module of the function that a thread runs."""
    module = ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        module = module if name == "threading" else name
        frame = frame.f_back
    return module[:TEXT_CHARACTERS]


def _frames(frame: FrameType | None, limit: int) -> list[list[str | int]]:
    found: list[list[str | int]] = []
    while frame is not None and len(found) < limit:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__", ""))
        texts = (module, code.co_filename.rpartition("/")[2], code.co_name)
        found.append([*(text[:TEXT_CHARACTERS] for text in texts), frame.f_lineno or 0])
        frame = frame.f_back
    return found


def _call(frame: FrameType) -> str:
    """Return the native call in which a frame is, as name and number of arguments (`acquire/0`).

    `with` means the entry of a with statement. `acquire/0` means a wait for a lock between threads.
    If the method `acquire` belongs to another kind of object, which another process may release,
    the result is `other acquire/0`.
    """
    before = [one for one in dis.get_instructions(frame.f_code) if one.offset <= frame.f_lasti]
    if not before:
        return ""
    now = before[-1]
    if now.opname == "BEFORE_WITH":
        return "with"
    if not now.opname.startswith("CALL") or now.positions is None or now.positions.lineno is None:
        return ""
    # The callee begins where the call begins. In `a.b.acquire()`, the last load at this place is
    # `acquire`.
    start = now.positions.lineno, now.positions.col_offset
    loads = [
        one
        for one in before
        if one.opname in _LOADS
        and one.positions
        and (one.positions.lineno, one.positions.col_offset) == start
    ]
    if not loads:
        return ""
    call = f"{str(loads[-1].argval)[:TEXT_CHARACTERS]}/{now.arg}"
    return (
        f"other {call}" if call == "acquire/0" and not _is_thread_lock(frame, loads[:-1]) else call
    )


def _is_thread_lock(frame: FrameType, loads: Sequence[dis.Instruction]) -> bool:
    """Return True if the loads lead to a lock of this process; no code of the user is run."""
    found: Any = None
    for load in loads:
        if load.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found = inspect.getattr_static(found, load.argval, None)
        elif load.opname == "LOAD_GLOBAL":
            found = frame.f_globals.get(load.argval)
        else:
            found = frame.f_locals.get(load.argval, frame.f_globals.get(load.argval))
    return isinstance(found, _THREAD_LOCKS)


def stand_of(threads: Sequence[Mapping[str, Any]]) -> Stand:
    """Return where a rank's main thread is, from the result of `thread_stacks` in the rank.

    Raises:
        KeyError, TypeError, ValueError: the message is malformed.
    """
    (main,) = (one for one in threads if one["main"] is True)
    frames = [
        (str(module), str(file), str(function), int(line))
        for module, file, function, line in main["frames"]
    ]
    others = [one for one in threads if one is not main]
    calls = tuple(f"{function} ({file}:{line})" for _, file, function, line in frames)
    return Stand(
        _activity(main, [(module, function) for module, _, function, _ in frames], others), calls
    )


def _activity(
    main: Mapping[str, Any], frames: Sequence[tuple[str, str]], others: Sequence[Mapping[str, Any]]
) -> Activity:
    call = str(main["call"])
    for module, function in frames:
        if module in _COLLECTIVES:
            return Activity.COLLECTIVE
        if function == "_engine_run_backward":
            return Activity.BACKWARD
        if not module.startswith("torch."):
            break
    if call.partition("/")[0] in _DEVICE_CALLS:
        return Activity.DEVICE
    # If the main thread waits in Holdfast's own code, it waits for a process of Holdfast.
    if (
        call in ("acquire/0", "with")
        and not main["ours"]
        and not any(_may_release(one) for one in others)
    ):
        return Activity.LOCK
    return Activity.OTHER


def _may_release(thread: Mapping[str, Any]) -> bool:
    """Return True if a thread may continue by itself and then release a lock.

    For example, a thread continues by itself at the end of a timeout or of a read.
    """
    call, frames = str(thread["call"]), thread["frames"]
    if thread["ours"] or thread.get("module") in _MONITORS or call in ("acquire/0", "with"):
        return False
    # Otherwise, only an idle thread of an executor waits for other threads.
    return not (frames and (frames[0][0], frames[0][2]) == ("concurrent.futures.thread", "_worker"))
