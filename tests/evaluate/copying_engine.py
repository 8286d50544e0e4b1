"""Provide a simulated engine that copies its model folder, for tests of the weights' path."""

import shutil
from pathlib import Path

import msgspec

from holdfast.evaluate.engines.simulated import SimulatedEngine
from holdfast.evaluate.types.engine import EngineSpec


class CopyingEngine(SimulatedEngine):
    """Copy the model folder to the path in the option `copy`."""

    def __init__(self, spec: EngineSpec) -> None:
        options = dict(spec.options)
        self._copy = Path(str(options.pop("copy")))
        super().__init__(msgspec.structs.replace(spec, options=options))

    def load(self, folder: Path) -> None:
        """See `Engine.load`."""
        shutil.copytree(folder, self._copy)
        super().load(folder)
