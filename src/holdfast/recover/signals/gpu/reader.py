"""Read the GPUs in a separate process, because a call into a driver may never return.

For each byte on standard input, the process prints one line of JSON. It is a `Reading` by the first
reader that works, or `{"error": …}` with the reasons of all readers. Both have `cpu_s`, the CPU
seconds that reading took. The process ends when its standard input or its parent ends.
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

Only NVML has events. `nvidia-smi` exists wherever the driver is installed. DCGM and its exporter
are for containers in which neither can be used.
"""


def main() -> None:
    """Answer requests until standard input ends."""
    die_with_parent()
    serve(READERS)


def serve(readers: Mapping[str, Callable[[], Reader]]) -> None:
    """Answer each byte on standard input with a line, until standard input ends."""
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
                began_s += _cpu_s() - before_s  # do not count the opening: the reader stays open
            reading = opened[name].read().to_json()
            return {**reading, "cpu_s": _cpu_s() - began_s}
        except CannotSee as error:
            missing.append(str(error))
        except Exception as error:  # a driver's library may fail in any way
            missing.append(f"{name}: {type(error).__name__}: {error}")
        if name == "NVML":  # open NVML anew next time: a reload of the driver ends the session
            opened.pop(name, None)
    return {"error": "; ".join(missing), "cpu_s": _cpu_s() - began_s}


def _cpu_s() -> float:
    """Return the CPU seconds that this process and its commands have used."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()
