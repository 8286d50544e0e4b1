"""Convert log files to events, which are the lines that a rule matches, in bounded memory."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from holdfast.diagnose.explain.diagnosis import mask_varying
from holdfast.diagnose.explain.life import (
    STEPS_SURVIVED,
    Before,
    Counters,
    Habits,
    OwnSteps,
    Steps,
    own_went_on,
)
from holdfast.diagnose.explain.newest_step import step_rule
from holdfast.diagnose.logs.files import LINE_LIMIT_BYTES, LogFile, Reading, read_blocks
from holdfast.diagnose.logs.lines import Line, clean_line, learn_prefixes
from holdfast.diagnose.logs.prefixes import Prefixes
from holdfast.diagnose.logs.programs import Programs, is_in_quotes
from holdfast.diagnose.logs.progress import PROGRESS, reported, reported_step
from holdfast.diagnose.logs.records import plain_text, record_lines
from holdfast.diagnose.logs.times import BlockTimes, Stamp, time_of_line
from holdfast.diagnose.logs.tracebacks import Caught, Raised, TracebackReader
from holdfast.diagnose.rules.rules import ROUTINE, Rule, RuleSet, Where

KEPT_PER_RULE: Final = 16
"""For each rule, this many first events (not survived) and last events of a log are kept."""
_STREAMS_LIMIT: Final = 4096
_PROGRESS_WINDOW_BYTES: Final = 64 * 1024
_PROGRESS_LINES: Final = 16
"""The number of last progress lines that are read before an event or the end of a block."""
_SHAPES_LIMIT: Final = 65_536
_OF_PROGRAMS: Final = frozenset({"exception", "suspect"})
"""Kinds of errors of only the program. If an exit handler raises one, the error is no root."""
_OF_A_CALL: Final = _OF_PROGRAMS | {"service", "disk", "device_memory"}
"""Kinds of errors that a program can catch and survive."""
_OUTLIVED_LINES: Final = 20
"""With at least this many lines between, a first error of a process did not cause a second."""
_ONE_DIGIT: Final = bytes.maketrans(b"123456789", b"000000000")
_TORN_LINES: Final = 5000
"""An unfinished traceback is cut off after this number of lines of other processes."""
_BACK_S: Final = 30.0
"""The largest disorder of lines, in seconds; a larger one shows that logs were concatenated."""
_MATCHES_LIMIT: Final = 512
"""The largest number of lines that pass the prefilter and are read to find `_PROGRESS_LINES`."""
_COUNTER_LINES: Final = 128
"""The number of last lines before an event that are searched for counters."""
_FEW_COUNTER_LINES: Final = 16
"""The number of lines that are searched before an event if events are close together."""
_COUNTER_SHARE: Final = 4
_ALWAYS_COUNTER_LINES: Final = 4096
"""After this number of lines, only one in `_COUNTER_SHARE` lines is searched for counters."""
_ENDS: Final = frozenset({"exit", "death", "crash", "node", "scheduler", "teardown"})
"""Kinds of events that report an end. Errors before an end were not survived."""

StreamKey: TypeAlias = int | tuple[str | int | None, ...] | None
"""A rank or, if the rank is unknown, the host with the local rank or the process."""


@dataclass
class Stream:
    """The lines of one rank in a log."""

    steps: OwnSteps = field(default_factory=OwnSteps)
    tracebacks: TracebackReader = field(default_factory=TracebackReader)
    chain: "Event | None" = None
    """The event that is the root of the newest chain of tracebacks so far."""
    newest: "Event | None" = None
    """The newest error that ended a traceback of this stream."""


@dataclass(eq=False, kw_only=True)
class Event:
    """A line, and the rule that matches the line."""

    rule: Rule
    captures: dict[str, str]
    file: str
    line: int
    text: str
    cited: str
    rank: int | None
    local_rank: int | None
    node: str | None
    """The host that the prefix of the line names."""
    stream: Stream
    log: "_Log"
    log_line: int
    """The number of this line, counted over all parts of a rotated log."""
    frame_lines: int
    """The number of lines up to here that are frames or source code in tracebacks."""
    before: Before
    """The progress of the job at this line."""
    script: str = ""
    """The script of the program whose traceback the line ends."""
    introduced: bool = False
    """True if other words stand before the beginning of the traceback in the same line."""
    survived_before: int = 0
    """The number of times that the job survived the same error before."""
    time_s: float | None = None
    """The time of the line, or else the last one before, in seconds since 1970 in the log's zone.
    """
    has_own_time: bool = False
    whole_traceback: bool = False
    demoted: bool = False
    """True if a line of the same chain is a better root, or Python went on after the exception."""
    caught: Caught = "nobody"
    """The printer of the traceback, such as a thread or the interpreter."""

    @property
    def recovered(self) -> bool:
        """True if the rank made new steps after the event, or the job made enough new steps."""
        if self.log.clock.is_before(self.log.last_step_s, self.time_s):
            return False  # the steps belong to an earlier log that was concatenated
        if self.own_progress or self.log.steps.went_on(self.before):
            return True
        return self.log.steps.total < STEPS_SURVIVED and self.log.counters.went_on(self.before)

    @property
    def of_generated_program(self) -> bool:
        """True if the event ends the traceback of one of many generated programs."""
        return bool(self.script) and self.log.programs.is_generated(self.script)

    @property
    def is_report(self) -> bool:
        """True if text of the job introduces or quotes the line, which may be about another program."""
        if self.introduced:
            return not self.log.programs.is_own_folder(self.script)
        if self.whole_traceback or "\\n" not in self.text:
            return False
        match = self.rule.regex.search(self.text)
        return match is not None and is_in_quotes(self.text, match.start())

    @property
    def own_progress(self) -> bool:
        """True if the rank of the event is known and made progress after the event."""
        return self.rank is not None and own_went_on(self.stream.steps, self.before)

    @property
    def outlived(self) -> bool:
        """True if the process logged many lines after the event, another error, and then few lines."""
        last, log = self.stream.newest, self.log
        if last is None or last is self or self.rule.kind not in _OF_A_CALL:
            return False
        if log.ranks and not self.is_of_named_process:
            return False  # another rank may have raised it
        between = (last.log_line - last.frame_lines) - (self.log_line - self.frame_lines)
        after = (log.lines - log.frame_lines) - (last.log_line - last.frame_lines)
        return (
            after // max(1, len(log.ranks)) < _OUTLIVED_LINES <= between // max(1, len(log.ranks))
        )

    @property
    def is_of_named_process(self) -> bool:
        """True if the line or its file identifies the process, by rank or otherwise."""
        return self.stream is not self.log.streams.get(None)

    @property
    def lines_below(self) -> int:
        """The number of lines of the log after the event, divided by the number of ranks in the log."""
        return (self.log.lines - self.log_line) // max(1, len(self.log.ranks))


class _Clock:
    """The times that the lines of one log state."""

    def __init__(self) -> None:
        self.last_s: float | None = None
        self.went_back = False
        """True if the log is a concatenation of several logs."""
        self._by_form: dict[str, float] = {}

    def note(self, stamp: Stamp | None) -> float | None:
        """Record the time of a line; return the last time, which lines without a time inherit."""
        if stamp is not None:
            before = self._by_form.get(stamp.form, stamp.seconds)
            self.went_back |= stamp.seconds < before - _BACK_S
            self._by_form[stamp.form] = self.last_s = stamp.seconds
        return self.last_s

    def is_before(self, one_s: float | None, other_s: float | None) -> bool:
        """Return True if `one_s` is before `other_s`, and the times of the log went back."""
        return self.went_back and one_s is not None and other_s is not None and one_s < other_s - 1


class _Log:
    """The state of one log while its parts are read."""

    def __init__(self, rules: RuleSet, shapes: set[int], ranks: set[int]) -> None:
        self.rules = rules
        self.shapes = shapes
        """Hashes of lines to skip. One hash covers all digits, unless digits matter to a rule."""
        self.ranks = ranks
        """The ranks that any log of the job names."""
        self.prefixes = Prefixes()
        self.clock = _Clock()
        self.last_step_s: float | None = None
        """The latest time of a reported step."""
        self.steps = Steps()
        self.counters = Counters()
        self.habits = Habits()
        self.programs = Programs()
        self.lines = 0
        self.frame_lines = 0
        """The number of lines so far that are frames or source code in tracebacks."""
        self.streams: dict[StreamKey, Stream] = {}
        self.tracebacks = TracebackReader()
        """Reads all streams together, since one traceback may have several kinds of prefixes."""
        self.open: dict[StreamKey, int] = {}
        """The number of the last line of each stream that is inside a traceback."""
        self.reporters: dict[str, dict[int, int | None]] = {}
        """By rule id, the ranks that reported an event, with their last enqueued collectives."""
        self.block = b""
        self.block_times = BlockTimes(b"")
        self.progress_at = -1
        """The offset in the block of the next progress line; -1 if it was not searched yet."""
        self.line_start = self.line_end = 0
        self.steps_noted_to = 0
        """The offset up to which progress is recorded; the rest waits until an event needs it."""
        self.newest_at: tuple[int, Line] | None = None
        """The offset in the block of its newest progress line, and this line."""
        self.newest: Event | None = None
        """The event of the newest progress line."""
        self.first: dict[str, list[Event]] = {}
        self.last: dict[str, deque[Event]] = {}
        self.steps_noted = 0
        self.weighed: dict[str, tuple[int, int, bool]] = {}
        """By rule id, the signs of survival at the last check. Only new signs lead to a new check.
        """

    def stream(self, key: StreamKey) -> tuple[StreamKey, Stream]:
        if key not in self.streams:
            if len(self.streams) >= _STREAMS_LIMIT:
                key = None
            elif isinstance(key, int):
                self.ranks.add(key)
        return key, self.streams.setdefault(key, Stream())

    def keep(self, event: Event) -> None:
        rank = event.rank
        if rank is not None:
            enqueued = event.captures.get("enqueued")
            self.reporters.setdefault(event.rule.id, {})[rank] = (
                None if enqueued is None else int(enqueued)
            )
        first = self.first.setdefault(event.rule.id, [])
        life = (self.steps_noted, self.counters.newest_rise, self.clock.went_back)
        if len(first) >= KEPT_PER_RULE and self.weighed.get(event.rule.id) != life:
            self.weighed[event.rule.id] = life
            recovered = [one.recovered for one in first]
            survived = [one for one, is_over in zip(first, recovered, strict=True) if is_over]
            others = [one for one, is_over in zip(first, recovered, strict=True) if not is_over]
            first[:] = survived[-1:] + others
        if len(first) < KEPT_PER_RULE:
            first.append(event)
        else:
            self.last.setdefault(event.rule.id, deque(maxlen=KEPT_PER_RULE)).append(event)

    def events(self) -> Iterator[Event]:
        for kept in (*self.first.values(), *self.last.values()):
            yield from kept
        if self.newest is not None:
            yield self.newest


class Scan:
    """Scan the logs of one job piece by piece, in bounded memory."""

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._logs: dict[str, _Log] = {}
        self._shapes: set[int] = set()
        self._ranks: set[int] = set()

    def block(self, file: LogFile, block: bytes, number: int) -> None:
        """Scan a block of whole lines of `file`; `number` is the line number of the first line."""
        self.know(file)
        _scan_block(self._log(file.group), file, plain_text(block), number)

    def know(self, file: LogFile) -> None:
        """Register a file, which may be empty, and the rank whose output it is."""
        if file.rank is not None:
            self._ranks.add(file.rank)

    def line(self, file: LogFile, text: str, number: int) -> None:
        """Scan one line that represents a record; `number` is 0 for a supervisor's observation."""
        _scan_line(self._log(file.group), file, clean_line(text.encode("utf-8", "replace"), number))

    def events(self) -> list[Event]:
        """Return the events found so far."""
        return [event for log in self._logs.values() for event in log.events()]

    def _log(self, group: str) -> "_Log":
        if group not in self._logs:
            self._logs[group] = _Log(self._rules, self._shapes, self._ranks)
        return self._logs[group]


def scan(files: Iterable[LogFile], rules: RuleSet, reading: Reading | None = None) -> list[Event]:
    """Return the events of all files; the parts of a rotated log are read as one log."""
    reading = Reading() if reading is None else reading
    records, logs = record_lines(list(files), reading)
    scan = Scan(rules)
    for file in logs:
        scan.know(file)
        for block, number in read_blocks(file.path, reading):
            scan.block(file, block, number)
    for path, lines in records.items():
        for number, text, rank in lines:
            scan.line(LogFile(path=path, group=str(path), part=0, rank=rank), text, number)
    return scan.events()


def scan_texts(texts: Iterable[str], rules: RuleSet) -> list[Event]:
    """Return the events of lines that are in no file; their line number is 0."""
    log = _Log(rules, set(), set())
    for text in texts:
        line = clean_line(text.encode(), 0)
        _note(log, None, line, log.stream(None)[1])
    return list(log.events())


def _scan_block(log: _Log, file: LogFile, block: bytes, number: int) -> None:
    learn_prefixes(log.prefixes, block)
    log.block, log.steps_noted_to, log.newest_at = block, 0, None
    log.block_times, log.progress_at = BlockTimes(block), -1
    position, start, start_line = 0, number, log.lines
    for raw in block.split(b"\n"):
        if raw:
            for part in raw.split(b"\r") if b"\r" in raw else (raw,):
                # Most lines differ from earlier ones only in numbers, and cost only this lookup.
                shape = hash(part.translate(_ONE_DIGIT))
                if log.open or (shape not in log.shapes and hash(part) not in log.shapes):
                    log.line_start, log.line_end = position, position + len(part) + 1
                    _look_at(log, file, part[:LINE_LIMIT_BYTES], number, shape, hash(part))
                position += len(part) + 1
        else:
            position += 1
        number += 1
        log.lines += 1
    _note_progress(log, file, len(block), len(block))
    _note_newest(log, file, start, start_line)
    log.clock.note(log.block_times.last(len(block), log.clock.last_s))
    # Otherwise, each log would keep a block in memory.
    log.block, log.block_times = b"", BlockTimes(b"")


def _look_at(log: _Log, file: LogFile, raw: bytes, number: int, shape: int, whole: int) -> None:
    hot = log.rules.hot.search(raw) is not None
    if hot or log.open:
        line = clean_line(raw, number, log.prefixes)
        if _scan_line(log, file, line):
            return
        if hot and log.rules.digits_matter(line.text):
            shape = whole
    if len(log.shapes) >= _SHAPES_LIMIT:
        log.shapes.clear()
    log.shapes.add(shape)


def _line_start(block: bytes, low: int, position: int) -> int:
    return max(low, block.rfind(b"\n", low, position) + 1, block.rfind(b"\r", low, position) + 1)


def _line_end(block: bytes, position: int) -> int:
    ends = [end for end in (block.find(b"\n", position), block.find(b"\r", position)) if end >= 0]
    return min(ends, default=len(block))


def _note_progress(log: _Log, file: LogFile, end: int, resume: int) -> None:
    """Record the last progress lines between the last event and `end`; older lines change nothing."""
    block, first, start = log.block, log.steps_noted_to, log.steps_noted_to
    log.steps_noted_to = resume
    if log.steps.total < STEPS_SURVIVED:
        are_many = log.counters.now > _ALWAYS_COUNTER_LINES + log.lines // _COUNTER_SHARE
        most = _FEW_COUNTER_LINES if are_many else _COUNTER_LINES
        log.counters.note(_last_lines(block, start, end, most))
    if not _has_progress(log, start, end):
        return
    noted: deque[tuple[int, Line]] = deque()
    seen = 0
    while start < end and len(noted) < _PROGRESS_LINES and seen < _MATCHES_LIMIT:
        window = max(start, end - _PROGRESS_WINDOW_BYTES)
        window = window if window == start else _line_start(block, start, window)
        for match in reversed(list(PROGRESS.finditer(block, window, end))):
            seen += 1
            low, line = _line_of(log, match, first)
            if reported(line.text) is not None:  # bars that count other things are left out
                noted.appendleft((low, line))
            if len(noted) == _PROGRESS_LINES or seen == _MATCHES_LIMIT:
                break
        end = window
    if log.steps.is_empty and noted and (earliest := PROGRESS.search(block, first, resume)):
        # Without the first step, an error before it would never count as survived.
        noted.appendleft(_line_of(log, earliest, first))
    for low, line in noted:
        stamp = time_of_line(line.time, line.text, log.clock.last_s)
        _note_step(log, file, line, _note_time(log, stamp, low))
    if noted:
        log.newest_at = noted[-1]


def _has_progress(log: _Log, start: int, end: int) -> bool:
    """Return True if the block may have progress between `start` and `end`.

    Calls must be in ascending order of `start`.
    """
    if log.progress_at < start:
        found = PROGRESS.search(log.block, start)
        log.progress_at = len(log.block) if found is None else found.start()
    return log.progress_at < end


def _note_newest(log: _Log, file: LogFile, number: int, log_line: int) -> None:
    """Make an event of the newest step in the block.

    The first line of the block has `number` in the file, and `log_line` in the log.
    """
    if log.newest_at is None:
        return
    position, line = log.newest_at
    lines = log.block.count(b"\n", 0, position)
    line = replace(line, number=number + lines)
    rule = step_rule(line.text, reported_step(line.text) or 0)
    log.newest = _event(log, file, line, log.stream(_key(line, file))[1], rule, {})
    log.newest.log_line = log_line + lines


def _line_of(log: _Log, match: Any, first: int) -> tuple[int, Line]:
    """Return the line of the block that contains `match`, and its offset."""
    low = _line_start(log.block, first, match.start())
    high = min(_line_end(log.block, match.end()), low + LINE_LIMIT_BYTES)
    return low, clean_line(log.block[low:high], 0, log.prefixes)


def _last_lines(block: bytes, start: int, end: int, most: int) -> Sequence[bytes]:
    """Return up to `most` last lines between `start` and `end`; the first may be incomplete."""
    start = max(start, end - _PROGRESS_WINDOW_BYTES)
    return block[start:end].splitlines()[-most:]


def _note_time(log: _Log, stamp: Stamp | None, line_start: int) -> float | None:
    """Return the time of a line in the block: its own time stamp, or else the last one before."""
    return log.clock.note(stamp or log.block_times.last(line_start, log.clock.last_s))


def _note_step(log: _Log, file: LogFile, line: Line, time_s: float | None) -> None:
    found = reported(line.text)
    if found is None:
        return
    if time_s is not None:
        log.last_step_s = time_s if log.last_step_s is None else max(time_s, log.last_step_s)
    log.steps_noted += 1
    key, stream = log.stream(_key(line, file))
    log.steps.note(*found, stream.steps, is_rank=isinstance(key, int))


def _key(line: Line, file: LogFile) -> StreamKey:
    if line.rank is not None:
        return line.rank
    if line.local_rank is None:
        if file.rank is not None or (line.host is None and line.process is None):
            return file.rank
        return line.host, line.process
    return line.local_rank if line.host is None else (line.host, line.local_rank)


def _scan_line(log: _Log, file: LogFile, line: Line) -> bool:
    """Scan one line; return True if later lines of the same shape must be scanned, too."""
    key, stream = log.stream(_key(line, file))
    raised = stream.tracebacks.feed(line)
    mixed = log.tracebacks.feed(line)
    _note_open(log, key, stream)
    if stream.tracebacks.is_open and raised is None and (line.text[:1] in " \t" or not line.text):
        log.frame_lines += 1
        return True  # a frame, or its source code, which may contain any text
    if raised is not None:
        event = _note(log, file, raised.line, stream, raised)
        _link(stream, raised, event)
        if event is not None and event.caught == "nobody" and event.rule.kind in _OF_A_CALL:
            stream.newest = event
        return True
    event = _note(log, file, line, stream)
    if event is not None and mixed is not None:
        _take_catcher(event, mixed)
    return event is not None or stream.tracebacks.expects


def _note_open(log: _Log, key: StreamKey, stream: Stream) -> None:
    log.open.pop(key, None)
    if stream.tracebacks.is_open:
        log.open[key] = log.lines  # moves the key to the end; the first key is silent longest
    oldest = next(iter(log.open), key)
    if log.lines - log.open.get(oldest, log.lines) > _TORN_LINES:
        log.streams[oldest].tracebacks.is_open = False
        del log.open[oldest]


def _note(
    log: _Log, file: LogFile | None, line: Line, stream: Stream, raised: Raised | None = None
) -> Event | None:
    where: Where = "line"
    if raised is not None:
        where = "user_exception" if raised.in_user_code else "library_exception"
    found = log.rules.find(line.text, where)
    if found is None or found[0].kind == ROUTINE:
        return None
    if file is not None:
        _note_progress(log, file, log.line_start, log.line_end)
    rule, captures = found
    event = _event(log, file, line, stream, rule, captures)
    stamp = time_of_line(line.time, line.text, log.clock.last_s)
    event.time_s = _note_time(log, stamp, log.line_start)
    event.has_own_time = stamp is not None
    event.whole_traceback = raised is not None
    if raised is not None:
        event.script, event.introduced = raised.script, raised.introduced
        log.programs.note(
            raised.script,
            introduced=raised.introduced,
            progress=log.steps.total + log.counters.rises,
        )
    if rule.kind in _ENDS:
        log.habits.note_end()
        log.programs.note_end()
    elif rule.kind in _OF_PROGRAMS:
        where_raised = "" if raised is None else raised.deepest
        event.survived_before = log.habits.survived_before(
            rule.id,
            mask_varying(f"{line.text.strip()} {where_raised}"),
            log.steps.total + log.counters.rises,
        )
    log.keep(event)
    return event


def _event(
    log: _Log,
    file: LogFile | None,
    line: Line,
    stream: Stream,
    rule: Rule,
    captures: dict[str, str],
) -> Event:
    return Event(
        rule=rule,
        captures=captures,
        file="" if file is None else str(file.path),
        line=line.number,
        text=line.text,
        cited=line.cited,
        rank=_printed_by(line, captures, file),
        local_rank=line.local_rank,
        node=line.host,
        stream=stream,
        log=log,
        log_line=log.lines,
        frame_lines=log.frame_lines,
        before=Before(
            own=dict(stream.steps.rises), job=log.steps.so_far(), rises_seen=log.counters.now
        ),
    )


def _printed_by(line: Line, captures: dict[str, str], file: LogFile | None) -> int | None:
    if line.rank is not None:
        return line.rank
    if "reporter" in captures:
        return int(captures["reporter"])
    return None if file is None else file.rank


def _link(stream: Stream, raised: Raised, event: Event | None) -> None:
    """Choose the exception of a chain of tracebacks that represents the root.

    * For `raise … from cause`, the cause is chosen.
    * For an error while another was handled, the later error is chosen, unless the earlier one is
      more specific.
    * If PyTorch repeats the original traceback inside a message, the original is chosen.
    """
    if event is None:
        return
    before = stream.chain
    if raised.link == "none" or before is None:
        stream.chain = event
    else:
        slack = 0.3 if raised.link == "cause" else -0.02
        keep_before = raised.link != "inner" and before.rule.weight <= event.rule.weight + slack
        loser = event if keep_before else before
        loser.demoted = True
        stream.chain = before if keep_before else event
    _take_catcher(event, raised)


def _take_catcher(event: Event, raised: Raised) -> None:
    event.caught = raised.caught
    event.demoted |= raised.caught == "the interpreter" and event.rule.kind in _OF_PROGRAMS
