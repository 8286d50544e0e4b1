"""Record the timeline of an evaluation: one JSON object a line for each activity.

The coordinator appends the lines, and reports read them. Every time (`t0`, `t1`) is in seconds
since the evaluation's first start and continues over restarts of the coordinator. Engines, nodes,
models and tasks are identified by the numbers that the policy uses; `Begin` lists the tasks' names.

A crash loses the lines that were not flushed and may leave a torn last line. Readers skip a torn
line, and the next writer cuts it off. Only reports depend on this file; the journal holds
everything that must survive a crash.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec

from holdfast.evaluate.types.errors import EvaluationError

BUFFER_BYTES = 1 << 16
"""The buffer's size at which its lines are written; `flush` writes them earlier."""
READ_BACK_BYTES = 1 << 16


def _kind(name: str) -> str:
    return name.removesuffix("Span").lower()


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag=_kind
):
    """The base of all lines; `kind` in the JSON is the lower-case class name without "Span"."""


class Span(_Line, frozen=True, kw_only=True):
    """An activity from `t0` to `t1`."""

    t0: float
    t1: float


class Begin(_Line, frozen=True, kw_only=True):
    """The coordinator started or restarted; readers use the last such line.

    `tasks` are the names of the suite's entries; the index is the task's number.
    """

    started_at_s: float
    suite: str
    tasks: list[str]
    restarts: int = 0


class EngineSpan(Span, frozen=True, kw_only=True):
    """One activity of an engine, from `t0` to `t1`.

    Attributes:
        what: "load": the engine was started, from the order to start until it could serve, with the
            start of its process; "swap": the engine replaced its weights; "serve": the engine could
            answer requests for `model`, busy or idle; "lost": the engine sent nothing, from its
            last message until the coordinator gave it up.
    """

    what: Literal["load", "swap", "serve", "lost"]
    engine: int
    node: int
    model: int = 0


class RequestSpan(Span, frozen=True, kw_only=True):
    """An engine worked on a request, perhaps beside others; `sample` is its index in the task."""

    engine: int
    model: int = 0
    task: int
    sample: int
    prompt_tokens: int = 0
    new_tokens: int = 0
    error: str = ""


class MetricSpan(Span, frozen=True, kw_only=True):
    """A sample's metric was computed on a node's CPU."""

    node: int
    model: int = 0
    task: int
    sample: int
    error: str = ""


class JudgeSpan(Span, frozen=True, kw_only=True):
    """A request to the judge model; `waited_s` is the wait for the quota before `t0`."""

    model: int = 0
    task: int
    sample: int
    tokens: int = 0
    waited_s: float = 0.0
    error: str = ""


class NodeSpan(Span, frozen=True, kw_only=True):
    """A node was connected ("here"), or fetched a model's weights into shared memory ("fetch")."""

    what: Literal["here", "fetch"]
    node: int
    model: int = 0
    host: str = ""
    remote_bytes: int = 0
    peer_bytes: int = 0


class TaskSpan(Span, frozen=True, kw_only=True):
    """A task of a model ran, from its first sample to its scores or its error."""

    model: int = 0
    task: int
    samples: int
    reused: int = 0
    error: str = ""


class ModelSpan(Span, frozen=True, kw_only=True):
    """A model was evaluated, from the request to evaluate it to the end of its last task."""

    model: int
    name: str
    digest: str = ""
    error: str = ""


class End(_Line, frozen=True, kw_only=True):
    """The evaluation ended: it is done, failed or was stopped; `t1` is the makespan."""

    state: Literal["done", "failed", "stopped"]
    t1: float


AnySpan = TypeVar("AnySpan", bound=Span)
Line = (
    Begin
    | EngineSpan
    | RequestSpan
    | MetricSpan
    | JudgeSpan
    | NodeSpan
    | TaskSpan
    | ModelSpan
    | End
)


class TimelineFile:
    """Write a timeline's file; only the coordinator does this."""

    def __init__(self, path: Path) -> None:
        """Open the file at `path`, create its folder, and cut off a torn last line.

        Raises:
            OSError: the file cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        os.ftruncate(self._fd, _whole_lines_bytes(self._fd))
        self._encoder = msgspec.json.Encoder()
        self._waiting = bytearray()

    def append(self, *lines: Line) -> None:
        """Append lines to the buffer; `flush` and `close` write the buffer to the file.

        Raises:
            OSError: the buffer is full and could not be written; the next call tries again.
        """
        for line in lines:
            self._waiting += self._encoder.encode(line)
            self._waiting += b"\n"
        if len(self._waiting) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines.

        Raises:
            OSError: the lines could not be written; the next call tries again.
        """
        while self._waiting:
            del self._waiting[: os.write(self._fd, self._waiting)]

    def close(self) -> None:
        """Write the buffered lines and close the file; closing twice is harmless."""
        if self._fd < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Hold the lines of a timeline; the lines of each kind are sorted by start."""

    begin: Begin
    engines: tuple[EngineSpan, ...] = ()
    requests: tuple[RequestSpan, ...] = ()
    metrics: tuple[MetricSpan, ...] = ()
    judged: tuple[JudgeSpan, ...] = ()
    nodes: tuple[NodeSpan, ...] = ()
    tasks: tuple[TaskSpan, ...] = ()
    models: tuple[ModelSpan, ...] = ()
    end: End | None = None
    """None while the evaluation runs, and after a crash."""

    @property
    def makespan_s(self) -> float:
        """The seconds from the first start to the end, or to the last span if `end` is None."""
        if self.end is not None:
            return self.end.t1
        kinds: tuple[tuple[Span, ...], ...] = (
            self.engines, self.requests, self.metrics, self.judged, self.nodes, self.tasks, self.models,
        )  # fmt: skip
        return max((span.t1 for spans in kinds for span in spans), default=0.0)

    def task_name(self, task: int) -> str:
        """Return the name that the suite gives to a task."""
        return self.begin.tasks[task] if 0 <= task < len(self.begin.tasks) else f"task {task}"


def read_timeline(path: Path) -> Timeline:
    """Read the timeline in a file, as `TimelineReader.read` does."""
    return TimelineReader(path).read()


class TimelineReader:
    """Read a timeline's file while it grows; each line is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = self._read_lines = 0
        self._kept: list[Line] = []
        self._forgotten: set[int] = set()
        self._decoder = msgspec.json.Decoder(Line)

    def read(self) -> Timeline:
        """Read the new lines and return the whole timeline, without forgotten models.

        The timeline is empty if there is no file yet. A last line without a line end is torn or not
        yet complete, and is left out.

        Raises:
            EvaluationError: a complete line is malformed; the message names the line's number.
        """
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                for text in file:
                    if not text.endswith(b"\n"):
                        break
                    self._read_lines += 1
                    self._read_bytes += len(text)
                    self._kept.append(self._decoded(text))
        return timeline_of(self._kept)

    def forget(self, model: int) -> None:
        """Drop the lines of an ended model, except its `ModelSpan`; `read` drops later ones too."""
        self._forgotten.add(model)
        self._kept = [
            line
            for line in self._kept
            if isinstance(line, ModelSpan) or getattr(line, "model", None) not in self._forgotten
        ]

    def _decoded(self, text: bytes) -> Line:
        try:
            line: Line = self._decoder.decode(text)
        except msgspec.DecodeError as error:
            raise EvaluationError(
                f"{self._path}:{self._read_lines} is not a line of a timeline ({error}). Something "
                "other than Holdfast "
                "changed it, or its disk is failing; delete that line to read the rest."
            ) from error
        return line


def timeline_of(lines: Iterable[Line]) -> Timeline:
    """Build a timeline from lines in the order in which they were appended."""
    begin, end = Begin(started_at_s=0.0, suite="", tasks=[]), None
    kinds: dict[type, list[Any]] = {}
    for line in lines:
        if isinstance(line, Begin):
            begin, end = line, None  # a restart: the earlier end was not the last
        elif isinstance(line, End):
            end = line
        else:
            kinds.setdefault(type(line), []).append(line)

    def spans(kind: type[AnySpan]) -> tuple[AnySpan, ...]:
        return tuple(sorted(kinds.get(kind, ()), key=lambda span: span.t0))

    return Timeline(
        begin=begin,
        engines=spans(EngineSpan),
        requests=spans(RequestSpan),
        metrics=spans(MetricSpan),
        judged=spans(JudgeSpan),
        nodes=spans(NodeSpan),
        tasks=spans(TaskSpan),
        models=spans(ModelSpan),
        end=end,
    )


def _whole_lines_bytes(fd: int) -> int:
    """Return the offset of the end of the last complete line."""
    end_bytes = os.fstat(fd).st_size
    while end_bytes > 0:
        start_bytes = max(0, end_bytes - READ_BACK_BYTES)
        newline = os.pread(fd, end_bytes - start_bytes, start_bytes).rfind(b"\n")
        if newline >= 0:
            return start_bytes + newline + 1
        end_bytes = start_bytes
    return 0
