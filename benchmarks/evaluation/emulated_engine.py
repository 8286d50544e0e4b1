"""The engine of an emulated cluster: a simulated one that starts while weights arrive.

All processes are up before time counts, since this machine's cores could not start them as fast as
a cluster does. An engine's start counts from the moment in the file that `HOLDFAST_EMULATION_BEGAN`
names.
"""

import os
import time
from pathlib import Path

import msgspec

from holdfast.evaluate.engines.simulated import SimulatedEngine
from holdfast.evaluate.types.engine import EngineSpec

ENV_BEGAN = "HOLDFAST_EMULATION_BEGAN"


class EmulatedEngine(SimulatedEngine):
    """A simulated engine with the further option `start_s`: seconds until it can load weights."""

    def __init__(self, spec: EngineSpec) -> None:
        options = dict(spec.options)
        self._start_s = float(options.pop("start_s", 0.0) or 0.0)
        super().__init__(msgspec.structs.replace(spec, options=options))

    def load(self, folder: Path) -> None:
        """See `Engine.load`."""
        began_s = float(Path(os.environ[ENV_BEGAN]).read_text())
        self._pass(began_s + self._start_s - time.monotonic())
        super().load(folder)
