"""Learn from a log itself which prefix a launcher puts before most of its lines.

First, the prefixes of `dialects.yaml` are removed from a sample of lines. The rest of each line is
split into tokens. All times are the same token, and so are all words with digits. A prefix is a
sequence of tokens with which almost all lines begin. Lines that differ only in their numbers count
once, so that ten thousand lines of progress do not look like a prefix.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import re2

from holdfast.diagnose.logs.times import TIME_PATTERN

SAMPLE_LINES: Final = 384
"""Prefixes are learned from up to this number of lines of a block."""
_SMALL_BLOCK_BYTES: Final = 64 << 10
_MIN_SHAPES: Final = 8
"""Prefixes are learned only from at least this number of lines with different shapes."""
_ALONE_SHARE: Final = 0.6
"""A single prefix must begin at least this share of all shapes."""
_TOGETHER_SHARE: Final = 0.9
"""If no single prefix begins enough shapes, several prefixes together must begin this share."""
_BRANCH_SHARE: Final = 0.05
_STAY_SHARE: Final = 0.95
"""A prefix is extended by a token only if at least this share of its lines continue with the token.
"""
_TOKENS_LIMIT: Final = 32
_RAW_BYTES: Final = 1600
_HEAD_CHARACTERS: Final = 160
_TEMPLATES_LIMIT: Final = 16
_MIN_VARIETY: Final = 4
"""A prefix must be followed by at least this number of different tokens."""
_FOLLOWING_TOKENS: Final = 8
_RANK_SLACK: Final = 8

_TOKEN: Final = re2.compile(rf"{TIME_PATTERN}|\w+(?:[.-]+\w+)*|[ \t]+|.")
_EPOCH: Final = re2.compile(r"^1[5-9]\d{8}\.\d+$")
_TIME, _ID, _SPACE = "<time>", "<id>", " "
_FIELD_PATTERNS: Final = {_TIME: TIME_PATTERN, _ID: r"\w+(?:[.-]+\w+)*"}
_VARYING: Final = b"0123456789.,:%"
"""Matches words made of the characters of numbers, or of non-ASCII characters, as in progress bars.
"""
_SEVERITY = re2.compile(r"(?i)^(?:error|err|warn|warning|info|debug|fatal|critical|notice|trace)$")
_SOURCE = re2.compile(r"\.(?:py|cpp|cc|cu|cuh|c|h|hpp|go|rs)$")
_NAME = re2.compile(r"^[A-Z][A-Za-z]*[a-z]|\.")
_ADDRESS = re2.compile(r"^\d{1,3}(?:\.\d{1,3}){3}$")
_SHORT_RANK = re2.compile(r"(?i)^r(?:k|ank)?[-_]?(\d{1,6})$")
_RANK = re2.compile(r"(?i)^(?:r(?:k|ank)?[-_]?)?\d{1,6}$")
_KEYS: Final = {
    "rank": "rank", "global_rank": "rank", "globalrank": "rank", "mpirank": "rank", "procid": "rank", "task": "rank",
    "local_rank": "local_rank", "localrank": "local_rank", "lrank": "local_rank",
    "ip": "host", "host": "host", "hostname": "host", "node": "host", "pod": "host", "pod_name": "host",
}  # fmt: skip
"""Words that, before `=`, `:` or a blank, name the field after them."""
_NAMED: Final = frozenset({"rank", "local_rank", "host", "time"})
_QUOTES: Final = "\"'"
_ESCAPES: Final = {"n": " ", "t": "\t", "r": " "}
_ESCAPED = re2.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class _Sampled:
    tokens: tuple[str, ...]
    """A kind of token: `<time>`, `<id>`, a single blank for any number of blanks, or the text
    itself.
    """
    values: tuple[str, ...]


class Prefix:
    """A learned prefix: its pattern, and the meanings of its fields."""

    def __init__(
        self, tokens: Sequence[str], lines: Sequence[_Sampled], *, one_of_several: bool
    ) -> None:
        roles = _roles(tokens, lines)
        marking = [
            at
            for at in _recurring(tokens, lines)
            if roles.get(at) not in ("rank", "host", "local_rank")
        ]
        parts = []
        for at, token in enumerate(tokens):
            if token == _SPACE:
                parts.append("(?:[ \\t]|$)" if at == len(tokens) - 1 else "[ \\t]+")
            elif token in _FIELD_PATTERNS:
                name = roles.get(at) or (f"p{at}" if at in marking else None)
                group = f"(?P<{name}>" if name else "(?:"
                parts.append(f"{group}{_FIELD_PATTERNS[token]})")
            else:
                parts.append(re2.escape(token))
        self.pattern = "".join(parts)
        self.quote = tokens[-1] if tokens[-1] in _QUOTES else ""
        """The quotation mark that opens the line's own text, if the prefix ends with one."""
        self.order = -len(tokens)
        self._name = " ".join(one for one in tokens if one.isalnum()) if one_of_several else ""
        self._compiled = re2.compile(self.pattern)
        self._groups = sorted(self._compiled.groupindex.items())

    def part(self, text: str) -> tuple[str, dict[str, str]] | None:
        """Return the text after the prefix, and the prefix's fields; None if the prefix is missing.

        The field `process` joins all fields without another meaning. It distinguishes the processes
        that write to the same log.
        """
        found = self._compiled.match(text)
        if found is None:
            return None
        fields: dict[str, str] = {}
        marks = [self._name] if self._name else []
        for name, group in self._groups:
            if name in _NAMED:
                fields[name] = found[group]
            else:
                marks.append(found[group])
        if marks:
            fields["process"] = " ".join(marks)
        if "rank" in fields and (short := _SHORT_RANK.search(fields["rank"])):
            fields["rank"] = short[1]
        if not all(fields[name].isdigit() for name in ("rank", "local_rank") if name in fields):
            return None
        rest = text[found.end() :]
        return _unquoted(rest, self.quote) if self.quote else rest, fields


class Prefixes:
    """The prefixes that have been learned from one log so far."""

    def __init__(self) -> None:
        self._learnt: tuple[Prefix, ...] = ()
        self._kept: list[bytes] = []
        self._lines = 0
        self._next = _MIN_SHAPES

    def __bool__(self) -> bool:
        return bool(self._learnt)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The RE2 pattern of each learned prefix."""
        return tuple(one.pattern for one in self._learnt)

    def sample(self, block: bytes) -> list[bytes]:
        """Count the lines of a block; each time the log has doubled, return lines to learn from.

        At other times the result is empty. The lines of small blocks are collected, since the log
        of a running job arrives a few lines at a time.
        """
        self._lines += block.count(b"\n") + 1
        is_due = self._lines >= self._next
        if is_due or len(block) <= _SMALL_BLOCK_BYTES:
            self._kept = (self._kept + _spread(block))[-SAMPLE_LINES:]
        if not is_due:
            return []
        self._next = 2 * self._lines
        return self._kept

    def learn(self, rests: Iterable[tuple[str, bool]]) -> None:
        """Learn from lines without packaged prefixes; a flag is True if its line had such a prefix."""
        for group in (False, True):
            lines = [text for text, parted in rests if parted is group]
            # Before a launcher starts the job, it may log without its prefix.
            for prefix in learnt(lines) or learnt(lines[len(lines) // 2 :]):
                if prefix.pattern not in self.patterns:
                    self._learnt = (*self._learnt, prefix)[-_TEMPLATES_LIMIT:]
        # The longest prefix is tried first, since one prefix may begin with another.
        self._learnt = tuple(sorted(self._learnt, key=lambda one: one.order))

    def part(self, text: str) -> tuple[str, dict[str, str]] | None:
        """Return the text after the first prefix that matches, and its fields; None if none matches."""
        for prefix in self._learnt:
            if (parted := prefix.part(text)) is not None:
                return parted
        return None


def _spread(block: bytes) -> list[bytes]:
    """Return up to `SAMPLE_LINES` lines, spread evenly over a block."""
    lines = [line[:_RAW_BYTES] for line in block.split(b"\n") if line.strip()]
    if len(lines) <= SAMPLE_LINES:
        return lines
    return [lines[at * len(lines) // SAMPLE_LINES] for at in range(SAMPLE_LINES)]


def learnt(lines: Iterable[str]) -> list[Prefix]:
    """Return the prefixes with which almost all of `lines` begin."""
    lines = [line[:_HEAD_CHARACTERS] for line in lines if line.strip()]
    shapes = [_tokens(line) for line in {_shape(line): line for line in lines}.values()]
    if len(shapes) < _MIN_SHAPES:
        return []
    found = _grown((), shapes, at_root=True)
    followed_by = set().union(*(_following(one, shapes) for one in found))
    if len(followed_by) < _MIN_VARIETY:
        return []
    has_fields = any(token in _FIELD_PATTERNS for tokens in found for token in tokens)
    if not has_fields and not any(_is_indented(one, tokens) for one in shapes for tokens in found):
        # A prefix is a launcher's if it stands also before indented lines. The name of a program
        # does not.
        return []
    sampled = [_tokens(line) for line in lines]
    return [
        Prefix(
            tokens,
            [one for one in sampled if one.tokens[: len(tokens)] == tokens],
            one_of_several=len(found) > 1,
        )
        for tokens in found
    ]


def _shape(line: str) -> bytes:
    return line.encode("ascii", "ignore").translate(None, _VARYING)


def _tokens(line: str) -> _Sampled:
    values = tuple(match[0] for match in islice(_TOKEN.finditer(line), _TOKENS_LIMIT))
    return _Sampled(tuple(map(_kind_of_token, values)), values)


def _kind_of_token(value: str) -> str:
    if value[0] in " \t":
        return _SPACE
    if len(value) > 1 and (":" in value or _EPOCH.search(value)):
        return _TIME
    varies = any(one.isdigit() or one == "-" for one in value) and value != "-"
    return _ID if varies and not _SOURCE.search(value) else value


def _grown(
    prefix: tuple[str, ...], members: list[_Sampled], *, at_root: bool = False
) -> list[tuple[str, ...]]:
    """Return the longest prefixes that begin with `prefix` and begin almost all of `members`."""
    at = len(prefix)
    by_token: dict[str, list[_Sampled]] = {}
    for one in members:
        if len(one.tokens) > at:
            by_token.setdefault(one.tokens[at], []).append(one)
    alone = _ALONE_SHARE if at_root else _STAY_SHARE
    together = _TOGETHER_SHARE if at_root else _STAY_SHARE
    # A line that ends here, such as an empty line after its prefix, supports no further token.
    count = sum(map(len, by_token.values()))
    token = max(by_token, key=lambda one: len(by_token[one]), default=None)
    if token is not None and len(by_token[token]) >= alone * count:
        branches = [token]
    else:
        least = max(_MIN_VARIETY, _BRANCH_SHARE * count)
        branches = [one for one, its in by_token.items() if len(its) >= least]
        if sum(len(by_token[one]) for one in branches) < together * count:
            branches = []
    if at_root and _SPACE in branches:
        return []  # indentation is no prefix
    found: list[tuple[str, ...]] = []
    for branch in branches:
        stays = _SEVERITY.search(branch) or _SOURCE.search(branch)
        deeper = [] if stays else _grown((*prefix, branch), by_token[branch])
        if not deeper:
            found = []
            break
        found += deeper
    if found and len(found) <= _TEMPLATES_LIMIT:
        return found
    return [prefix] if _may_end(prefix, members) else []


def _may_end(prefix: tuple[str, ...], members: Sequence[_Sampled]) -> bool:
    """Return True if a launcher's prefix may end here: at a punctuation mark or a blank."""
    if (
        not prefix
        or len(members) < _MIN_VARIETY
        or (prefix[-1] in _FIELD_PATTERNS)
        or prefix[-1].isalnum()
    ):
        return False
    marks = [one for one in prefix if one != _SPACE and not one.isalnum()]
    if not marks or (prefix[-1] in "([{<=" and len(prefix) < 4):
        return False
    opened = sum(one in "([{" for one in prefix) - sum(one in ")]}" for one in prefix)
    if opened > 0 and prefix[-1] not in _QUOTES:
        return False  # the end is inside a bracket
    if _NAME.search(prefix[0]) and prefix[1:2] == (":",):
        return False  # an exception, or a heading
    if prefix[0] == _ID and len(prefix) == 2 and prefix[1] == _SPACE:
        named = sum(not one.values[0][0].isdigit() for one in members)
        if named < _STAY_SHARE * len(members):
            return False  # columns of numbers
    return len(_following(prefix, members)) > 1


def _is_indented(line: _Sampled, prefix: tuple[str, ...]) -> bool:
    at = len(prefix)
    if line.tokens[:at] != prefix:
        return False
    return (
        len(line.values[at - 1]) > 1
        if prefix[-1] == _SPACE
        else line.tokens[at : at + 1] == (_SPACE,)
    )


def _following(prefix: tuple[str, ...], members: Iterable[_Sampled]) -> set[tuple[str, ...]]:
    """Return the sequences of tokens after `prefix`.

    Each is long enough to contain a severity, the prefix of a program and a word.
    """
    at = len(prefix)
    return {one.tokens[at : at + _FOLLOWING_TOKENS] for one in members if one.tokens[:at] == prefix}


def _recurring(tokens: Sequence[str], lines: Sequence[_Sampled]) -> list[int]:
    """Return the fields whose values recur, which excludes line counters and times."""
    return [
        at
        for at, token in enumerate(tokens)
        if token == _ID and 2 * len({one.values[at] for one in lines}) < len(lines)
    ]


def _roles(tokens: Sequence[str], lines: Sequence[_Sampled]) -> dict[int, str]:
    """Infer the meaning of each field from the word before it, or from its values."""
    roles = {at: "time" for at, token in enumerate(tokens) if token == _TIME}
    guesses: dict[int, str] = {}
    for at in _recurring(tokens, lines):
        values = {one.values[at] for one in lines}
        keyed = _key_before(tokens, at)
        if keyed == "host" or (keyed is not None and all(map(_RANK.search, values))):
            roles[at] = keyed
        elif (guess := _role_of(values)) is not None:
            guesses[at] = guess
    addressed = (at for at in guesses if all(_ADDRESS.search(one.values[at]) for one in lines))
    for at in (*addressed, *guesses):  # addresses are certain
        if guesses[at] not in roles.values():
            roles[at] = guesses[at]
    roles = {at: role for role, at in {role: at for at, role in reversed(roles.items())}.items()}
    host = next((at for at, role in roles.items() if role == "host"), None)
    rank = next((at for at in guesses if roles.get(at) == "rank"), None)
    if host is not None and rank is not None:
        pairs = {(one.values[host], one.values[rank]) for one in lines}
        if len(pairs) > len({number for _, number in pairs}):
            roles[rank] = "local_rank"  # each host counts its processes from 0
    return roles


def _key_before(tokens: Sequence[str], at: int) -> str | None:
    before = [one for one in tokens[max(0, at - 4) : at] if one not in (_SPACE, *_QUOTES)]
    if before and before[-1] in ("=", ":"):
        before.pop()
    return _KEYS.get(before[-1].lower()) if before else None


def _role_of(values: set[str]) -> str | None:
    if all(map(_ADDRESS.search, values)):
        return "host"
    if all(map(_SHORT_RANK.search, values)):
        return "rank"
    if len(values) < 2:
        return None
    if all(one.isdigit() for one in values):
        # Ranks are all numbers from 0 up to a highest one; process ids are not.
        return "rank" if max(map(int, values)) < 2 * len(values) + _RANK_SLACK else None
    return "host" if all(one[0].isalpha() for one in values) else None


def _unquoted(text: str, quote: str) -> str:
    """Return `text` up to the closing quotation mark, with escape sequences replaced."""
    end = len(text)
    at = 0
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == quote:
            end = at
            break
        else:
            at += 1
    unescaped = _ESCAPED.sub(lambda match: _ESCAPES.get(match[1], match[1]), text[:end])
    return str(unescaped).rstrip()
