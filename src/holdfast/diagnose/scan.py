"""Log files to events: each line that a rule knows, once, with what is needed to weigh it. Bounded memory."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from holdfast.diagnose.lines import PROGRESS, Line, clean_line, reported_step
from holdfast.diagnose.read import LINE_LIMIT_BYTES, LogFile, read_blocks
from holdfast.diagnose.rules import Rule, RuleSet, Where
from holdfast.diagnose.tracebacks import Raised, TracebackReader

KEPT_PER_RULE: Final = 16
"""So many events of one rule in one log: the first since the last progress, and as many last ones."""
_STREAMS_LIMIT: Final = 4096
_PROGRESS_WINDOW_BYTES: Final = 64 * 1024
_PROGRESS_LINES: Final = 256
JOB_STEPS_RECOVERED: Final = 3
"""Steps of any rank after another rank's error before that error counts as survived: ranks of one job step
together, but their output may arrive a step or two late."""


@dataclass
class Stream:
    """One rank's part of a log."""

    steps: int = 0
    """How often a larger step was reported."""
    last_step: int | None = None
    tracebacks: TracebackReader = field(default_factory=TracebackReader)
    chain: "Event | None" = None
    """The root so far of the newest chain of tracebacks."""


@dataclass(eq=False, kw_only=True)
class Event:
    """A line and the rule that knows it."""

    rule: Rule
    captures: dict[str, str]
    file: str
    line: int
    text: str
    cited: str
    rank: int | None
    local_rank: int | None
    stream: Stream
    log: "_Log"
    steps_before: int
    job_steps_before: int
    whole_traceback: bool = False
    demoted: bool = False
    """A better line of the same chain of tracebacks states the root, or Python went on after it."""

    @property
    def recovered(self) -> bool:
        """Whether its rank, or for long enough the job, made progress after it."""
        return self.stream.steps > self.steps_before or self.log.steps >= self.job_steps_before + JOB_STEPS_RECOVERED


class _Log:
    """The state of one log while its parts are read."""

    def __init__(self, rules: RuleSet) -> None:
        self.rules = rules
        self.steps = 0
        """How often a step larger than any before was reported."""
        self.last_step: int | None = None
        self.streams: dict[int | None, Stream] = {}
        self.open: set[int | None] = set()
        """Keys of the streams inside a traceback: these want every line."""
        self.block = b""
        self.line_start = self.line_end = 0
        self.steps_noted_to = 0
        """Up to here the block's progress is noted; the rest waits until an event needs it."""
        self.first: dict[str, list[Event]] = {}
        self.last: dict[str, deque[Event]] = {}

    def stream(self, key: int | None) -> tuple[int | None, Stream]:
        if key not in self.streams and len(self.streams) >= _STREAMS_LIMIT:
            key = None
        return key, self.streams.setdefault(key, Stream())

    def keep(self, event: Event) -> None:
        first = self.first.setdefault(event.rule.id, [])
        if len(first) >= KEPT_PER_RULE:
            survived = [one for one in first if one.recovered]
            first[:] = survived[-1:] + [one for one in first if not one.recovered]
        if len(first) < KEPT_PER_RULE:
            first.append(event)
        else:
            self.last.setdefault(event.rule.id, deque(maxlen=KEPT_PER_RULE)).append(event)

    def events(self) -> Iterator[Event]:
        for kept in (*self.first.values(), *self.last.values()):
            yield from kept


def scan(files: Iterable[LogFile], rules: RuleSet) -> list[Event]:
    """The events of all files; the parts of a rotated log are read as one."""
    logs: dict[str, _Log] = {}
    for file in files:
        log = logs.setdefault(file.group, _Log(rules))
        for block, number in read_blocks(file.path):
            _scan_block(log, file, block, number)
    return [event for log in logs.values() for event in log.events()]


def scan_texts(texts: Iterable[str], rules: RuleSet) -> list[Event]:
    """Events of lines that stand in no file: their line number is 0."""
    log = _Log(rules)
    for text in texts:
        line = clean_line(text.encode(), 0)
        _note(log, None, line, log.stream(None)[1])
    return list(log.events())


def _scan_block(log: _Log, file: LogFile, block: bytes, number: int) -> None:
    log.block, log.steps_noted_to = block, 0
    position = 0
    redrawn = b"\r" in block
    while position < len(block):
        if not log.open:
            hot = log.rules.hot.search(block, position)
            start = len(block) if hot is None else _line_start(block, position, hot.start(), redrawn=redrawn)
            number += block.count(b"\n", position, start)
            position = start
            if hot is None:
                break
        end, after = _line_end(block, position, redrawn=redrawn)
        raw = block[position : min(end, position + LINE_LIMIT_BYTES)]
        log.line_start, log.line_end = position, after
        _scan_line(log, file, clean_line(raw, number))
        number += block.count(b"\n", end, after)
        position = after
    _note_progress(log, file, len(block), len(block))


def _line_start(block: bytes, low: int, position: int, *, redrawn: bool) -> int:
    start = block.rfind(b"\n", low, position) + 1
    if redrawn:
        start = max(start, block.rfind(b"\r", max(low, start), position) + 1)
    return max(low, start)


def _line_end(block: bytes, position: int, *, redrawn: bool) -> tuple[int, int]:
    end = block.find(b"\n", position)
    end = len(block) if end < 0 else end
    if redrawn and (redraw := block.find(b"\r", position, end)) >= 0:
        end = redraw
    return end, min(end + 1, len(block))


def _note_progress(log: _Log, file: LogFile, end: int, resume: int) -> None:
    """Note the last steps reported before `end` and after the last event; older ones there change nothing."""
    block, start = log.block, log.steps_noted_to
    log.steps_noted_to = resume
    if start >= end:
        return
    window = max(start, end - _PROGRESS_WINDOW_BYTES)
    found = deque(PROGRESS.finditer(block, window, end), maxlen=_PROGRESS_LINES)
    if not found and window > start:
        found = deque(PROGRESS.finditer(block, start, window), maxlen=_PROGRESS_LINES)
    for match in found:
        low = _line_start(block, start, match.start(), redrawn=True)
        high, _ = _line_end(block, match.end(), redrawn=True)
        _note_step(log, file, clean_line(block[low : min(high, low + LINE_LIMIT_BYTES)], 0))


def _note_step(log: _Log, file: LogFile, line: Line) -> None:
    step = reported_step(line)
    if step is None:
        return
    _, stream = log.stream(_key(line, file))
    if stream.last_step is not None and step > stream.last_step:
        stream.steps += 1
    went_back = stream.last_step is not None and step < stream.last_step
    stream.last_step = step
    if log.last_step is None or went_back:  # the job was started again within this log
        log.last_step = step
    elif step > log.last_step:
        log.steps += 1
        log.last_step = step


def _key(line: Line, file: LogFile) -> int | None:
    if line.rank is not None:
        return line.rank
    return line.local_rank if line.local_rank is not None else file.rank


def _scan_line(log: _Log, file: LogFile, line: Line) -> None:
    key, stream = log.stream(_key(line, file))
    raised = stream.tracebacks.feed(line)
    if stream.tracebacks.is_open:
        log.open.add(key)
        if raised is None and (line.text[:1] in " \t" or not line.text):
            return  # a frame or its source text, which may quote anything
    else:
        log.open.discard(key)
    if raised is not None:
        _link(stream, raised, _note(log, file, line, stream, raised))
    else:
        _note(log, file, line, stream)


def _note(log: _Log, file: LogFile | None, line: Line, stream: Stream, raised: Raised | None = None) -> Event | None:
    where: Where = "line"
    if raised is not None:
        where = "user_exception" if raised.in_user_code else "library_exception"
    found = log.rules.find(line.text, where)
    if found is None or found[0].role == "ignore":
        return None
    if file is not None:
        _note_progress(log, file, log.line_start, log.line_end)
    rule, captures = found
    event = Event(
        rule=rule,
        captures=captures,
        file="" if file is None else str(file.path),
        line=line.number,
        text=line.text,
        cited=line.cited,
        rank=file.rank if line.rank is None and file is not None else line.rank,
        local_rank=line.local_rank,
        stream=stream,
        log=log,
        steps_before=stream.steps,
        job_steps_before=log.steps,
        whole_traceback=raised is not None,
    )
    log.keep(event)
    return event


def _link(stream: Stream, raised: Raised, event: Event | None) -> None:
    """Let one link of a chain of tracebacks stand for its root.

    `raise … from cause`: the cause. An error while handling another: the later one, unless it says less. The
    original that PyTorch repeats inside a message: the original.
    """
    if event is None:
        return
    before = stream.chain
    if raised.link == "none" or before is None:
        stream.chain = event
    else:
        slack = 5 if raised.link == "cause" else -1
        keep_before = raised.link != "inner" and before.rule.depth >= event.rule.depth - slack
        loser = event if keep_before else before
        loser.demoted = True
        stream.chain = before if keep_before else event
    event.demoted |= raised.ignored
