"""A simulated engine that keeps a record of what it was asked and what it finished, for tests of nothing done twice.

Name it as `holdfast.testing.engine:RecordedEngine`; its option `record` is the file, shared by all engines.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.core.errors import BadUse
from holdfast.evaluate.testing import EngineSpec, Finished, Request, SimulatedEngine, keyed

NAME = "holdfast.testing.engine:RecordedEngine"


class Recorded(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A line of the record: what an engine's process did with a request, in `time.monotonic()` of this machine."""

    what: Literal["asked", "recalled", "finished"]
    key: str
    pid: int
    at_s: float
    started_s: float = 0.0


class RecordedEngine(SimulatedEngine):
    """See the module."""

    def __init__(self, spec: EngineSpec) -> None:
        options = dict(spec.options)
        record = options.pop("record", None)
        if not record:
            raise BadUse("A recorded engine needs a file: --engine-option record=FILE.")
        super().__init__(msgspec.structs.replace(spec, options=options))
        self._file = os.open(str(record), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._keys: dict[int, str] = {}

    def submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        """See `Engine.submit`."""
        self._keys |= {id_: keyed(request).key.hex() for id_, request in requests}
        self._write("asked", [id_ for id_, _request in requests])
        super().submit(requests)

    def recall(self, ids: Sequence[int]) -> list[int]:
        """See `Engine.recall`."""
        given = super().recall(ids)
        self._write("recalled", given)
        return given

    def step(self) -> list[Finished]:
        """See `Engine.step`."""
        finished = super().step()
        self._write("finished", [one.id for one in finished], [one.started_s for one in finished])
        return finished

    def _write(
        self,
        what: Literal["asked", "recalled", "finished"],
        ids: list[int],
        started_s: Sequence[float] = (),
    ) -> None:
        now_s, pid = time.monotonic(), os.getpid()
        lines = b""
        for place, id_ in enumerate(ids):
            began_s = started_s[place] if started_s else 0.0
            lines += msgspec.json.encode(
                Recorded(what=what, key=self._keys[id_], pid=pid, at_s=now_s, started_s=began_s)
            )
            lines += b"\n"
        os.write(self._file, lines)  # at once: lines of several engines never mix


def read_record(path: Path) -> list[Recorded]:
    """All lines so far, in their order; one that a killed engine left torn is left out."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [_decoder.decode(line) for line in lines if line.endswith(b"]")]


_decoder = msgspec.json.Decoder(Recorded)
