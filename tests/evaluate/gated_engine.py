"""Provide an engine that records its requests and stops at a gate, and the test's side of both.

A test can thus act when a stated part of the work is done, at any speed of the machine.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.evaluate.engines.choose import make_engine
from holdfast.evaluate.types.engine import EngineSpec, Finished
from holdfast.evaluate.types.requests import Request, keyed
from holdfast.testing.engine import Recorded, read_record

_LOOK_S = 0.01


def finished_keys(record: Path) -> set[str]:
    """Return the distinct requests that engines finished so far."""
    return {line.key for line in read_record(record) if line.what == "finished"}


@dataclass(frozen=True)
class Gate:
    """Hold the record and the gate of some engines, both files in `folder`."""

    folder: Path
    kind: str = "hf"

    @property
    def record(self) -> Path:
        """The path of the record."""
        return self.folder / "record"

    @property
    def flags(self) -> list[str]:
        """Return options of `holdfast eval run` and `watch`, which need this folder in PYTHONPATH."""
        options = {"engine": self.kind, "record": self.record, "gate": self.folder / "gate"}
        words = [
            word
            for name, value in options.items()
            for word in ("--engine-option", f"{name}={value}")
        ]
        return ["--engine", "gated_engine:GatedEngine", *words]

    def asked(self) -> set[int]:
        """Return the process ids of the engines that received requests so far."""
        return {line.pid for line in read_record(self.record) if line.what == "asked"}

    def let(self, count: int) -> None:
        """Let the engines finish `count` distinct requests in all, or a few more."""
        write_atomic(self.folder / "gate", str(count).encode())

    def open(self) -> None:
        """Let the engines finish all requests."""
        self.let(1 << 30)


class GatedEngine:
    """Wrap an `Engine` of the kind in the option `engine`, with a `Gate`'s `record` and `gate`.

    Requests behind the gate wait here, as behind other requests.
    """

    def __init__(self, spec: EngineSpec) -> None:
        options = dict(spec.options)
        kind, record, gate = (str(options.pop(name)) for name in ("engine", "record", "gate"))
        self._engine = make_engine(msgspec.structs.replace(spec, kind=kind, options=options))
        self._gate, self._record = Path(gate), Path(record)
        self._file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting: dict[int, Request] = {}
        self._keys: dict[int, str] = {}  # of all that are not finished

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        self._keys |= {id_: keyed(request).key.hex() for id_, request in requests}
        self._waiting |= dict(requests)
        self._write("asked", [id_ for id_, _request in requests])

    def recall(self, ids: Sequence[int]) -> list[int]:
        given = [id_ for id_ in ids if self._waiting.pop(id_, None) is not None]
        given += self._engine.recall([id_ for id_ in ids if id_ not in given])
        self._write("recalled", given)
        return given

    def step(self) -> list[Finished]:
        inside = len(self._keys) - len(self._waiting)
        room = int(self._gate.read_bytes()) - len(finished_keys(self._record)) - inside
        for id_ in list(self._waiting)[: max(0, room)]:
            self._engine.submit([(id_, self._waiting.pop(id_))])
        if len(self._keys) == len(self._waiting):
            time.sleep(_LOOK_S)
            return []
        finished = self._engine.step()
        self._write("finished", [one.id for one in finished])
        return finished

    def _write(self, what: Any, ids: Sequence[int]) -> None:
        """Append to the record, and forget finished and recalled requests."""
        now_s, pid = time.monotonic(), os.getpid()
        lines = [Recorded(what=what, key=self._keys[id_], pid=pid, at_s=now_s) for id_ in ids]
        os.write(self._file, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        if what != "asked":
            for id_ in ids:
                del self._keys[id_]
