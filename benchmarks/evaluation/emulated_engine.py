"""The engine of an emulated cluster: a simulated one, whose start goes on while weights come.

All processes are up before time counts, since this machine's cores could not start them as a cluster does. What an
engine's own start takes counts from the moment that `HOLDFAST_EMULATION_BEGAN` names a file for.
"""

import os
import time
from pathlib import Path

import msgspec

from holdfast.evaluate.engines.simulated import SimulatedEngine
from holdfast.evaluate.types.engine import EngineSpec

ENV_BEGAN = "HOLDFAST_EMULATION_BEGAN"


class EmulatedEngine(SimulatedEngine):
    """Has one option more, `start_s`: from the beginning until it can load weights."""

    def __init__(self, spec: EngineSpec) -> None:
        options = dict(spec.options)
        self._start_s = float(options.pop("start_s", 0.0) or 0.0)
        super().__init__(msgspec.structs.replace(spec, options=options))

    def load(self, folder: Path) -> None:
        """See `Engine.load`."""
        began_s = float(Path(os.environ[ENV_BEGAN]).read_text())
        self._pass(began_s + self._start_s - time.monotonic())
        super().load(folder)
