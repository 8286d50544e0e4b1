"""What happened when in an evaluation: one JSON object a line, appended by the coordinator, read by reports.

Every time (`t0`, `t1`) is in seconds since the evaluation's first start and goes on over a restart of the coordinator.
Engines, nodes, models and tasks are the small numbers that the policy uses; `Begin` names the tasks.

What a crash can leave: lines that were not flushed are lost, and the last one may be torn, which readers leave out and
the next writer cuts off. Nothing but reports depends on this file; what must not be lost is in the journal.
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
"""Written when so much is waiting; `flush` writes what there is."""
READ_BACK_BYTES = 1 << 16


def _kind(name: str) -> str:
    return name.removesuffix("Span").lower()


class _Line(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag=_kind
):
    """What every line is: a JSON object whose `kind` is its class's name in small letters, without "Span"."""


class Span(_Line, frozen=True, kw_only=True):
    """What lasted from `t0` to `t1`."""

    t0: float
    t1: float


class Begin(_Line, frozen=True, kw_only=True):
    """The coordinator started (again); the newest line holds. `tasks` are the suite's entries, by task number."""

    started_at_s: float
    suite: str
    tasks: list[str]
    restarts: int = 0


class EngineSpan(Span, frozen=True, kw_only=True):
    """An engine was occupied with one thing, from `t0` to `t1`.

    Attributes:
        what: "load": from the order to start it until it served, process start included; "swap": other weights put
            into it; "serve": it stood ready for `model`, busy or not; "lost": from its last sign of life until the
            coordinator knew that it was gone.
    """

    what: Literal["load", "swap", "serve", "lost"]
    engine: int
    node: int
    model: int = 0


class RequestSpan(Span, frozen=True, kw_only=True):
    """An engine worked on a request, maybe on others at the same time. `sample` is the document within its task."""

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
    """A model-as-judge was asked; `waited_s` of the time before `t0` was for its quota."""

    model: int = 0
    task: int
    sample: int
    tokens: int = 0
    waited_s: float = 0.0
    error: str = ""


class NodeSpan(Span, frozen=True, kw_only=True):
    """A node was there ("here"), or fetched a model's weights into its memory ("fetch")."""

    what: Literal["here", "fetch"]
    node: int
    model: int = 0
    host: str = ""
    remote_bytes: int = 0
    peer_bytes: int = 0


class TaskSpan(Span, frozen=True, kw_only=True):
    """A task of a model, from its first sample to its scores, or to why it has none."""

    model: int = 0
    task: int
    samples: int
    reused: int = 0
    error: str = ""


class ModelSpan(Span, frozen=True, kw_only=True):
    """A model, from when it was asked for to the end of its last task."""

    model: int
    name: str
    digest: str = ""
    error: str = ""


class End(_Line, frozen=True, kw_only=True):
    """All is done, or it was stopped. The makespan is `t1`."""

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
    """The file's one writer: the coordinator."""

    def __init__(self, path: Path) -> None:
        """Open the file at `path`, making its folder, and cut off a line that a killed writer left torn.

        Raises:
            OSError: the file cannot be opened.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        os.ftruncate(self._fd, _whole_lines_bytes(self._fd))
        self._encoder = msgspec.json.Encoder()
        self._waiting = bytearray()

    def append(self, *lines: Line) -> None:
        """Add lines; they are in the file at the latest when `flush` or `close` returns.

        Raises:
            OSError: what was waiting could not be written; it is tried again with the next.
        """
        for line in lines:
            self._waiting += self._encoder.encode(line)
            self._waiting += b"\n"
        if len(self._waiting) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting.

        Raises:
            OSError: as `append`.
        """
        while self._waiting:
            del self._waiting[: os.write(self._fd, self._waiting)]

    def close(self) -> None:
        """Write what is waiting and let go of the file. Closing twice is harmless."""
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
    """An evaluation's lines, each kind in the order of its starts."""

    begin: Begin
    engines: tuple[EngineSpan, ...] = ()
    requests: tuple[RequestSpan, ...] = ()
    metrics: tuple[MetricSpan, ...] = ()
    judged: tuple[JudgeSpan, ...] = ()
    nodes: tuple[NodeSpan, ...] = ()
    tasks: tuple[TaskSpan, ...] = ()
    models: tuple[ModelSpan, ...] = ()
    end: End | None = None
    """None while it goes on, and after a crash."""

    @property
    def makespan_s(self) -> float:
        """From the first start to the end; to the last that is known of where there was none."""
        if self.end is not None:
            return self.end.t1
        kinds: tuple[tuple[Span, ...], ...] = (
            self.engines, self.requests, self.metrics, self.judged, self.nodes, self.tasks, self.models,
        )  # fmt: skip
        return max((span.t1 for spans in kinds for span in spans), default=0.0)

    def task_name(self, task: int) -> str:
        """The suite's name of a task."""
        return self.begin.tasks[task] if 0 <= task < len(self.begin.tasks) else f"task {task}"


def read_timeline(path: Path) -> Timeline:
    """The timeline in a file; as `TimelineReader.read`."""
    return TimelineReader(path).read()


class TimelineReader:
    """Reads the file at `path` while it grows: each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = self._read_lines = 0
        self._kept: list[Line] = []
        self._forgotten: set[int] = set()
        self._decoder = msgspec.json.Decoder(Line)

    def read(self) -> Timeline:
        """All that is there by now and not forgotten; empty where there is no file yet.

        A last line without its line end is torn or still being written, and left out.

        Raises:
            EvaluationError: a whole line is none of the kinds; the message names its number.
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
        """Of a model that ended nothing more is wanted but when that was, whatever is still written of it."""
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
                f"{self._path}:{self._read_lines} is no line of a timeline ({error}). Something other than Holdfast "
                "changed it, or its disk is failing; delete that line to read the rest."
            ) from error
        return line


def timeline_of(lines: Iterable[Line]) -> Timeline:
    """Lines, as they were appended, sorted into a timeline."""
    begin, end = Begin(started_at_s=0.0, suite="", tasks=[]), None
    kinds: dict[type, list[Any]] = {}
    for line in lines:
        if isinstance(line, Begin):
            begin, end = line, None  # it was begun again: an earlier end was not the end
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
    """Where the last whole line ends."""
    end_bytes = os.fstat(fd).st_size
    while end_bytes > 0:
        start_bytes = max(0, end_bytes - READ_BACK_BYTES)
        newline = os.pread(fd, end_bytes - start_bytes, start_bytes).rfind(b"\n")
        if newline >= 0:
            return start_bytes + newline + 1
        end_bytes = start_bytes
    return 0
