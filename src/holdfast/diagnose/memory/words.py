"""Split a log line into words and varying parts, and rate how informative a word is."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import re2

Sort = Literal["word", "value", "quoted"]

_TOKEN: Final = re2.compile(
    r"(?P<url>\b[a-z][a-z0-9+.-]{1,9}://[^\s'\"<>)\],]+)"
    r"|(?P<quoted>'[^']{0,200}'|\"[^\"]{0,200}\"|`[^`]{0,200}`|<[^<>]{1,80}>)"
    r"|(?P<path>(?:~|\.{1,2})?/[\w.+@%=-]+(?:/[\w.+@%=-]*)*|\b[\w.+-]+(?:/[\w.+@%=-]+)+)"
    r"|(?P<source>\b[\w-]+\.(?:py|cc|cpp|cu|cuh|c|h|so|rs|go|sh|ya?ml|json|toml|pt|bin|log|txt)\b(?:[.:]\d+)*)"
    r"|(?P<hex>\b0x[0-9a-fA-F]+\b|\b[0-9a-fA-F]{2,}(?:[:-][0-9a-fA-F]+)+(?:\.\d+)?\b)"
    r"|(?P<number>[-+]?\d[\w.,:%+-]*)"
    r"|(?P<word>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:'[a-z]{1,2}\b)?)"
)
"""The parts of a line, tried in this order: a path may contain words, but a word never contains a
path.
"""
_SENTENCE_BLANKS: Final = 2
_DIGIT: Final = re2.compile(r"\d")
_CAMEL: Final = re2.compile(r"[a-z][A-Z]|[A-Z]{2}[a-z]|_[A-Za-z]|[A-Za-z]_")
_LOUD: Final = re2.compile(r"^[A-Z]{3,}$")
_PARTS: Final = re2.compile(r"[A-Z]+(?:[a-z]+|$)|[A-Z]?[a-z]+|[A-Z]+")

_COMMON: Final = """
a an the of in to is was were be been by for and or nor not with without on at this that it its as from are has have had
may might can could should would will must if when while which who what where than then there here no any all some one
two other into over under after before during up down out off only also more most so but
error errors err fail failed failing fails failure failures warning warnings warn exception exceptions info debug fatal
critical traceback message reason cause caused due raised raise please see try trying tried again got get call called
calling caught unable cannot can't couldn't invalid unknown unexpected expected following
rank ranks process processes worker workers task tasks job jobs node nodes step steps host local global line lines file
function value values object objects type data given argument arguments name named run running using used use set new
end start started
exit exited code status state number size time times last first current thread main python pid gpu device
version details
"""
COMMON: Final = frozenset(_COMMON.split())
"""Words that are frequent in all logs, and so are not informative by themselves."""
TROUBLE: Final = (
    r"(?:\w*(?:Error|Exception|Failure|Fault|Warning)\b|(?i:\b(?:errors?|fail(?:ed|ure|ures|s|ing)?|fatal|abort\w*"
    r"|panic\w*|cannot|can't|couldn't|could not|unable|denied|refused|rejected|invalid|illegal|corrupt\w*|lost|loses"
    r"|kill(?:ed|ing)?|died|dead|crash\w*|tim(?:ed|e)[ -]?out|unavailable|unreachable|not found|not ready|no such"
    r"|mismatch\w*|exceed\w*|missing|unexpected\w*|uncorrectable|unhandled|fallen|down|out of|already in use|exited"
    r"|reset|closed|bad|broken|cancel\w*|preempt\w*|unsuccessful|non-zero|interrupted|disconnect\w*|expired|forbidden"
    r"|no space|read-only|too many|violat\w*|overflow|throttl\w*|slow ?down|hung|stuck|stopped|oom)\b))"
)
"""An RE2 pattern for words that report a problem, such as `failed`."""
_TROUBLE: Final = re2.compile(TROUBLE)
WORDS_LIMIT: Final = 1500
"""The largest number of words of one incident that full-text search indexes."""


@dataclass(frozen=True, slots=True)
class Token:
    """A part of a line, and its place."""

    sort: Sort
    text: str
    start: int
    end: int

    @property
    def is_common(self) -> bool:
        """True if the word is not informative by itself."""
        return self.text.lower() in COMMON or len(self.text) < 2

    @property
    def is_technical(self) -> bool:
        """True for words in the style of programs: inner or all capitals, underscores or dots."""
        loud = _LOUD.search(self.text) is not None and self.text.lower() not in COMMON
        return loud or "." in self.text or _CAMEL.search(self.text) is not None


def tokens(text: str) -> list[Token]:
    """Split `text` into words and varying parts: numbers, paths, names, hosts, addresses.

    A word with a digit (`node017`, `mlx5_0`) counts as varying. Quoted text counts as varying,
    unless the text is a sentence.
    """
    found: list[Token] = []
    for match in _TOKEN.finditer(text):
        word, kind = match[0], match.lastgroup
        if kind == "quoted" and word[1:-1].count(" ") >= _SENTENCE_BLANKS:
            at = match.start() + 1
            found += (
                Token(one.sort, one.text, one.start + at, one.end + at)
                for one in tokens(word[1:-1])
            )
            continue
        sort: Sort = "word" if kind == "word" and not _DIGIT.search(word) else "value"
        found.append(
            Token("quoted" if kind == "quoted" else sort, word, match.start(), match.end())
        )
    return found


@functools.lru_cache(maxsize=65_536)
def words_of(text: str) -> tuple[str, ...]:
    """Return the words of `text` in lower case, in order, and also the parts of compound words."""
    found: list[str] = []
    for token in tokens(text):
        if token.sort != "word":
            continue
        for name in token.text.split("."):
            whole = name.strip("_").lower().partition("'")[0]
            parts = [part.lower() for part in _PARTS.findall(name)]
            found.append(whole)
            if len(parts) > 1:
                found += parts
    return tuple(word for word in found if len(word) > 1)


def search_words(lines: Iterable[str]) -> str:
    """Return up to `WORDS_LIMIT` words of `lines` for full-text search, including repetitions."""
    found: list[str] = []
    for line in lines:
        found += (word for word in words_of(line) if word not in COMMON)
        if len(found) >= WORDS_LIMIT:
            break
    return " ".join(found[:WORDS_LIMIT])


def mask(text: str) -> str:
    """Replace varying parts of `text` by `<*>`, so that a message is the same text in each run."""
    pieces, at = [], 0
    for token in tokens(text):
        if token.sort != "word":
            pieces += [text[at : token.start], "<*>"]
            at = token.end
    return "".join((*pieces, text[at:])).strip()


def is_trouble(text: str) -> bool:
    """Return True if a word of `text` reports a problem."""
    return _TROUBLE.search(text) is not None
