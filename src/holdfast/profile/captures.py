"""Capture a few training steps on request, as a profiler trace or as a memory snapshot.

A user requests a capture by writing a file to the folder of the recording. Each recorded rank polls
this file in the background thread that also writes the phases. A rank that the request names starts
and stops the capture between two steps.

A trace leaves out stack traces, tensor shapes and memory, because recording these slows a step the
most. The rank profiles one step first, to count its events. If the count predicts a trace larger
than the limit in the request, the rank refuses the request.

| file below `captures/` | content |
|---|---|
| `request.json` | `id`, `kinds` (`trace`, `memory`), `ranks`, `steps`, `max_bytes` |
| `ID-rankR-KIND.json` | the result, with the fields of `Captured` |
| `ID-rankR-trace.json.gz` | the trace, which Perfetto opens |
| `ID-rankR-memory.pickle` | the memory snapshot, which PyTorch's memory_viz opens |
| `oom-N-rankR-PID.pickle` | a memory snapshot that was taken when a device ran out of memory |
| `oom-N` | an empty file that reserves the number N for such a snapshot |
"""

import contextlib
import json
import os
import pickle
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from holdfast.core.atomic import write_atomic
from holdfast.core.errors import HoldfastError
from holdfast.profile.columns import fields
from holdfast.profile.recording import Recording

STEPS: Final = 3
EVENT_BYTES: Final = 400
"""Bytes of one event in a trace before compression, used to predict the size of a trace.

`benchmarks/profile.py` measures this number.
"""
HISTORY_ENTRIES: Final = 100_000
"""The number of allocations and frees whose history a memory snapshot keeps.

Each entry takes at most a few kilobytes of host memory.
"""
BLOCK_BYTES: Final = 1_000
"""Bytes of one memory block or history entry in a snapshot file, including its stack trace."""
OOM_BYTES: Final = 256 << 20
"""The size limit of a snapshot that is taken when a device runs out of memory."""
OOM_SNAPSHOTS: Final = 4
"""The most out-of-memory snapshots in one run: the first ones, over all ranks and attempts."""
OUTLIER_STEPS: Final = 100
COMPUTING: Final = ("data", "forward", "backward", "optimizer")
"""The phases of a rank's own work. In all other phases it waits for other ranks or storage."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that some ranks capture a trace or their memory."""

    id: str
    kinds: tuple[str, ...]
    ranks: tuple[int, ...]
    steps: int = STEPS
    max_bytes: int

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "Request":
        """Parse a request from the JSON object in `request.json`.

        Raises:
            KeyError, TypeError, ValueError: the object lacks a field or has a value of a wrong
                type.
        """
        return cls(
            id=str(plain["id"]),
            kinds=tuple(str(kind) for kind in plain["kinds"]),
            ranks=tuple(int(rank) for rank in plain["ranks"]),
            steps=int(plain["steps"]),
            max_bytes=int(plain["max_bytes"]),
        )


@dataclass(frozen=True, kw_only=True)
class Captured:
    """The result of a capture request, for one rank and one kind of capture.

    Attributes:
        state: `done` or `refused`.
        reason: why the capture was refused; empty if it was done.
        file: the name of the capture's file in `captures/`.
    """

    rank: int
    kind: str
    state: str
    reason: str = ""
    file: str = ""
    size_bytes: int = 0
    predicted_bytes: int = 0
    events: int = 0
    steps: int = 0


def request_capture(
    folder: Path, *, kinds: Sequence[str], ranks: Iterable[int], max_bytes: int, steps: int = STEPS
) -> Request:
    """Write a request for a capture, which the ranks that record into `folder` carry out.

    Args:
        folder: the folder of the recording.
        kinds: `trace`, `memory` or both.
        ranks: the ranks that capture.
        max_bytes: the size limit of one rank's capture, in bytes.
        steps: the number of steps to capture.
    """
    request = Request(
        id=secrets.token_hex(4),
        kinds=tuple(kinds),
        ranks=tuple(sorted(set(ranks))),
        steps=steps,
        max_bytes=max_bytes,
    )
    place = folder / "captures"
    place.mkdir(parents=True, exist_ok=True)
    write_atomic(place / "request.json", json.dumps(vars(request)).encode())
    return request


def captured(folder: Path, request: Request) -> list[Captured]:
    """Return the results that ranks have written so far: one for each rank and kind."""
    found = []
    for rank in request.ranks:
        for kind in request.kinds:
            with contextlib.suppress(OSError, ValueError, TypeError):
                plain = json.loads(
                    (folder / "captures" / f"{request.id}-rank{rank}-{kind}.json").read_bytes()
                )
                found.append(Captured(**plain))
    return found


def outlier_rank(recording: Recording) -> int | None:
    """Return the rank that spends the most time on its own work, over the last steps.

    Waiting for other ranks does not count as own work. A slow rank makes all other ranks wait, so
    whole steps take equally long on all ranks and would not reveal it.

    Returns:
        The rank, or None if fewer than two ranks recorded steps.
    """
    typical: dict[int, float] = {}
    for rank, spans in recording.spans_by_rank():
        work_ns: dict[int, int] = {}
        for step, phase, start_ns, end_ns in fields(spans, "step", "phase", "start_ns", "end_ns"):
            if step is not None and phase in COMPUTING:
                work_ns[step] = work_ns.get(step, 0) + end_ns - start_ns
        if work_ns:
            typical[rank] = median(list(work_ns.values())[-OUTLIER_STEPS:])
    return max(typical, key=lambda rank: typical[rank]) if len(typical) > 1 else None


class Captures:
    """Carry out capture requests on one rank.

    The training thread calls `on_step`. The background thread that writes the phases calls `look`
    and `finish`.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        """Prepare to watch a folder; a request that is already there is ignored."""
        self._folder = folder / "captures"
        self._rank = rank
        self._seen = self._mtime_ns()
        self._request: Request | None = None
        self._work: deque[tuple[Callable[..., Captured], tuple[Any, ...]]] = deque()
        self._profiler: Any = None
        self._is_warm = False
        self._left = 0
        self._predicted_bytes = 0
        self._has_history = False
        self._watches_oom = False
        self._has_seen_oom = False

    def look(self) -> None:
        """Read the request file if it has changed, and accept the request if it names this rank."""
        mtime_ns = self._mtime_ns()
        if mtime_ns in (0, self._seen):
            return
        self._seen = mtime_ns
        with contextlib.suppress(OSError, KeyError, TypeError, ValueError):
            request = Request.from_json(json.loads((self._folder / "request.json").read_bytes()))
            if self._rank in request.ranks and request.steps > 0:
                self._request = request

    def finish(self) -> None:
        """Write the files and the results of all captures that have ended."""
        while self._work:
            write, arguments = self._work.popleft()
            request, kind = arguments[:2]
            try:
                result = write(*arguments)
            except Exception as error:  # PyTorch's own formats may change; training continues
                result = self._refused(kind, f"{type(error).__name__}: {error}"[:300])
            name = f"{request.id}-rank{self._rank}-{kind}.json"
            with contextlib.suppress(OSError):
                write_atomic(self._folder / name, json.dumps(_plain(result)).encode())

    @property
    def is_idle(self) -> bool:
        """Return True if `on_step` would do nothing."""
        return self._request is None and not self._watch_is_due

    def on_step(self) -> None:
        """Start, continue or stop a capture; called between two steps."""
        if self._watch_is_due:
            self._watch_oom()
        request = self._request
        if request is None:
            return
        try:
            if self._left == 0:
                self._begin(request)
                return
            self._left -= 1
            if self._left == 0:
                self._end(request)
        except Exception as error:  # another profiler runs, for example; training continues
            self._request, self._profiler, self._left, self._has_history = None, None, 0, False
            result = f"{type(error).__name__}: {error}"[:300]
            for kind in request.kinds:
                self._work.append((self._give, (request, kind, self._refused(kind, result))))

    def _begin(self, request: Request) -> None:
        self._is_warm = "trace" not in request.kinds
        self._left = request.steps if self._is_warm else 1
        if self._is_warm:
            self._begin_memory(request)
        else:
            self._profiler = _profiler()
            self._profiler.start()

    def _end(self, request: Request) -> None:
        if self._is_warm:
            if self._profiler is not None:
                self._profiler.stop()
                self._work.append(
                    (self._write_trace, (request, "trace", self._profiler, self._predicted_bytes))
                )
                self._profiler = None
            if self._has_history:
                self._has_history = False
                snapshot = _memory()._snapshot()
                _memory()._record_memory_history(enabled=None)
                self._work.append((self._write_memory, (request, "memory", snapshot)))
            self._request = None
            return
        self._profiler.stop()
        events = len(self._profiler.profiler.kineto_results.events())
        self._predicted_bytes = events * EVENT_BYTES * request.steps
        self._profiler, self._is_warm = None, True
        if self._predicted_bytes > request.max_bytes:
            self._work.append((self._write_refusal, (request, "trace", events)))
        else:
            self._profiler = _profiler()
            self._profiler.start()
        self._begin_memory(request)
        if self._profiler is None and not self._has_history:
            self._request = None
        else:
            self._left = request.steps

    def _begin_memory(self, request: Request) -> None:
        if "memory" not in request.kinds:
            return
        if not _uses_cuda():
            result = self._refused("memory", "this rank uses no CUDA device")
            self._work.append((self._give, (request, "memory", result)))
            if self._profiler is None:
                self._left, self._request = 0, None
            return
        entries = min(HISTORY_ENTRIES, request.max_bytes // BLOCK_BYTES)
        _memory()._record_memory_history(stacks="python", max_entries=entries)
        self._has_history = True

    def _write_trace(
        self, request: Request, kind: str, profiler: Any, predicted_bytes: int
    ) -> Captured:
        name = f"{request.id}-rank{self._rank}-trace.json.gz"
        temporary = self._folder / f".{name}"
        events = len(profiler.profiler.kineto_results.events())
        try:
            # PyTorch compresses the trace, because the name ends in .gz.
            profiler.export_chrome_trace(str(temporary))
            temporary.replace(self._folder / name)
        finally:
            temporary.unlink(missing_ok=True)
        return Captured(
            rank=self._rank,
            kind=kind,
            state="done",
            file=name,
            size_bytes=(self._folder / name).stat().st_size,
            predicted_bytes=predicted_bytes,
            events=events,
            steps=request.steps,
        )

    @staticmethod
    def _give(_request: Request, _kind: str, result: Captured) -> Captured:
        return result

    def _write_refusal(self, request: Request, kind: str, events: int) -> Captured:
        reason = (
            f"the trace of {request.steps} steps would have about {self._predicted_bytes >> 20} MiB before compression "
            f"({events} events a step), and the limit is {request.max_bytes >> 20} MiB"
        )
        return self._refused(kind, reason, predicted_bytes=self._predicted_bytes, events=events)

    def _write_memory(self, request: Request, kind: str, snapshot: Any) -> Captured:
        name = f"{request.id}-rank{self._rank}-memory.pickle"
        size_bytes = write_snapshot(self._folder / name, snapshot, max_bytes=request.max_bytes)
        return Captured(
            rank=self._rank,
            kind=kind,
            state="done",
            file=name,
            size_bytes=size_bytes,
            steps=request.steps,
        )

    def _refused(
        self, kind: str, reason: str, *, predicted_bytes: int = 0, events: int = 0
    ) -> Captured:
        return Captured(
            rank=self._rank,
            kind=kind,
            state="refused",
            reason=reason,
            predicted_bytes=predicted_bytes,
            events=events,
        )

    def _mtime_ns(self) -> int:
        try:
            return (self._folder / "request.json").stat().st_mtime_ns
        except OSError:
            return 0

    # Out of memory

    @property
    def _watch_is_due(self) -> bool:
        return not self._watches_oom and _uses_cuda()

    def _watch_oom(self) -> None:
        self._watches_oom = True
        attach = getattr(sys.modules["torch"]._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self._out_of_memory)

    def _out_of_memory(self, *_: Any) -> None:
        """Write a memory snapshot the first time that an allocation fails.

        PyTorch calls this before it raises the out-of-memory error.
        """
        if self._has_seen_oom:
            return
        self._has_seen_oom = True
        with contextlib.suppress(Exception):  # must not hide the out-of-memory error
            self._folder.mkdir(parents=True, exist_ok=True)
            if (place := self._free_place()) is not None:
                name = f"{place.name}-rank{self._rank}-{os.getpid()}.pickle"
                try:
                    write_snapshot(self._folder / name, _memory()._snapshot(), max_bytes=OOM_BYTES)
                except BaseException:
                    place.unlink()
                    raise

    def _free_place(self) -> Path | None:
        """Reserve one of the run's `OOM_SNAPSHOTS` numbers for a snapshot.

        Several ranks may call this at the same time, and each gets a different number.

        Returns:
            The file `oom-N` that reserves the number; None if all numbers are taken.
        """
        for number in range(OOM_SNAPSHOTS):
            place = self._folder / f"oom-{number}"
            with contextlib.suppress(FileExistsError):
                place.touch(exist_ok=False)
                return place
        return None


def write_snapshot(file: Path, snapshot: dict[str, Any], *, max_bytes: int) -> int:
    """Write a snapshot of a device's memory that PyTorch's memory_viz can open.

    Returns:
        The size of the file in bytes.

    Raises:
        HoldfastError: the snapshot is larger than `max_bytes`; nothing is written.
        OSError: the file cannot be written.
    """
    blocks = sum(len(segment.get("blocks", ())) for segment in snapshot.get("segments", ()))
    entries = sum(map(len, snapshot.get("device_traces", ())))
    predicted_bytes = (blocks + entries) * BLOCK_BYTES
    if predicted_bytes > max_bytes:
        raise HoldfastError(
            f"the snapshot of {blocks} blocks and {entries} allocations would have about {predicted_bytes >> 20} MiB, "
            f"and the limit is {max_bytes >> 20} MiB"
        )
    content = pickle.dumps(snapshot, protocol=4)  # memory_viz reads no newer protocol
    if len(content) > max_bytes:  # some names of files or functions are long
        raise HoldfastError(
            f"the snapshot has {len(content) >> 20} MiB, and the limit is {max_bytes >> 20} MiB"
        )
    write_atomic(file, content)
    return len(content)


def _profiler() -> Any:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if _uses_cuda() else [])]
    return profile(activities=activities)


def _uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _memory() -> Any:
    return sys.modules["torch"].cuda.memory


def _plain(result: Captured) -> dict[str, Any]:
    return {name: getattr(result, name) for name in Captured.__dataclass_fields__}
