"""A simulated engine that keeps a copy of the folder that it is given, for tests of how models come to engines."""

import shutil
from pathlib import Path

import msgspec

from holdfast.evaluate.engines.simulated import SimulatedEngine
from holdfast.evaluate.types.engine import EngineSpec


class CopyingEngine(SimulatedEngine):
    """Its option `copy` names the folder to be made."""

    def __init__(self, spec: EngineSpec) -> None:
        options = dict(spec.options)
        self._copy = Path(str(options.pop("copy")))
        super().__init__(msgspec.structs.replace(spec, options=options))

    def load(self, folder: Path) -> None:
        """See `Engine.load`."""
        shutil.copytree(folder, self._copy)
        super().load(folder)
