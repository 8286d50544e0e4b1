"""Import torchrun ahead of time, and run it when ordered to.

torchrun's imports take more than a second. With a warm launcher, a node that replaces a lost one
does not wait for them. The process reads one line with its order from standard input, and then runs
torchrun. Before that, it imports only PyTorch's launcher, and no code of the user.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-P", "-m", "holdfast.recover.launching.warm_launcher")
_MODULE = (sys.executable, "-m", "torch.distributed.run")


def launcher_arguments(command: Sequence[str]) -> list[str] | None:
    """Return torchrun's arguments in a command; None if it is not torchrun in this interpreter."""
    if tuple(command[:3]) == _MODULE:
        return list(command[3:])
    if Path(command[0]) == Path(sys.executable).with_name("torchrun"):
        return list(command[1:])
    return None


def order_of(arguments: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Return the line with the order for a warm launcher."""
    order = {"arguments": list(arguments), "environment": dict(environment)}
    return json.dumps(order).encode() + b"\n"


def read_line(fd: int) -> bytes | None:
    """Read one line, and not a byte more; return None at the end of the file."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            return None
        line += byte
    return bytes(line)


def main() -> None:
    """Import torchrun, wait for the order, and run torchrun."""
    from torch.distributed import run

    line = read_line(0)
    if line is None:
        return
    order: dict[str, Any] = json.loads(line)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["torchrun", *order["arguments"]]
    run.main()


if __name__ == "__main__":
    main()
