"""Read the GPUs in a process of its own, because a call of a driver may never return.

For each byte of the standard input the process prints a JSON line: a `Reading` of the first reader
that answers, or `{"error": …}` with the reason of each, and in both `cpu_s`, the CPU time that the
look took. The process ends with its standard input, or with its parent.
"""

import json
import os
from collections.abc import Callable, Mapping

from holdfast.core.processes import die_with_parent
from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.gpu.dcgm import Dcgmi, Exporter
from holdfast.recover.signals.gpu.nvml import open_nvml
from holdfast.recover.signals.gpu.smi import Smi
from holdfast.recover.signals.gpu.state import Reader

READERS: Mapping[str, Callable[[], Reader]] = {
    "NVML": open_nvml,
    "nvidia-smi": Smi,
    "DCGM": Dcgmi,
    "dcgm-exporter": Exporter,
}
"""The readers, in the order in which they are tried.

NVML alone has events. `nvidia-smi` exists wherever the driver does. DCGM and its exporter are for
containers that see neither.
"""


def main() -> None:
    """Serve until the standard input ends."""
    die_with_parent()
    serve(READERS)


def serve(readers: Mapping[str, Callable[[], Reader]]) -> None:
    """Answer each byte of the standard input with a line; end with the standard input."""
    opened: dict[str, Reader] = {}
    while os.read(0, 1):
        line = json.dumps(_answer(readers, opened)).encode() + b"\n"
        while line:
            line = line[os.write(1, line) :]


def _answer(
    readers: Mapping[str, Callable[[], Reader]], opened: dict[str, Reader]
) -> dict[str, object]:
    missing = []
    began_s = _cpu_s()
    for name, open_reader in readers.items():
        try:
            if name not in opened:
                before_s = _cpu_s()
                opened[name] = open_reader()
                began_s += _cpu_s() - before_s  # later looks do not open the reader again
            reading = opened[name].read().to_json()
            return {**reading, "cpu_s": _cpu_s() - began_s}
        except CannotSee as error:
            missing.append(str(error))
        except Exception as error:  # a driver's library may fail in any way
            missing.append(f"{name}: {type(error).__name__}: {error}")
        if name == "NVML":  # opened anew, since a reload of the driver ends its session
            opened.pop(name, None)
    return {"error": "; ".join(missing), "cpu_s": _cpu_s() - began_s}


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of the commands that it ran."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
