"""Provide a simulated engine that records its requests, to test that no work is done twice.

The engine's name is `holdfast.testing.engine:RecordedEngine`. The option `record` names the file to
record to, which all engines share.
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
    """One line of the record: an event of one request in the process of an engine.

    The times are in seconds of `time.monotonic()`.
    """

    what: Literal["asked", "recalled", "finished"]
    key: str
    pid: int
    at_s: float
    started_s: float = 0.0


class RecordedEngine(SimulatedEngine):
    """A simulated engine that appends an event to a file for each request.

    The events are `asked`, `recalled` and `finished`.
    """

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
        os.write(self._file, lines)  # in one call, so that lines of several engines never mix


def read_record(path: Path) -> list[Recorded]:
    """Return all complete lines of a record, in order.

    A line that a killed engine left incomplete is skipped.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [_decoder.decode(line) for line in lines if line.endswith(b"]")]


_decoder = msgspec.json.Decoder(Recorded)
