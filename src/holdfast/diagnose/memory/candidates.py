"""Propose patterns that match lines like a root line, from the most general to the line itself.

The examples without parentheses are for the line `botocore.errorfactory.NoSuchKey: An error
occurred (NoSuchKey) …`.

| breadth | the pattern matches | example |
|---|---|---|
| 0 | each class whose name ends like the reason's | (for KeyError: `KeyError`, `BatchKeyError`) |
| 1 | the reason's own class and its built-in subclasses | (`ModuleNotFoundError`) |
| 2 | each exception of its package | `botocore.*` |
| 3 | the class in any package | `NoSuchKey` |
| 4 to 7 | one to four consecutive informative words | `NoSuchKey`, with a word for a problem |
| 5 to 7 | the class and the first words of the message | `NoSuchKey: An error occurred` |
| 9 | the line, except for varying parts | |

A built-in class of exceptions identifies only its own reason. For example, the `RuntimeError` of a
DataLoader can be identified only by its message.
"""

import builtins
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import re2

from holdfast.diagnose.logs.tracebacks import is_exception
from holdfast.diagnose.memory.profile import NAMED, NAMES
from holdfast.diagnose.memory.words import TROUBLE, Token, is_trouble, tokens
from holdfast.diagnose.rules.taxonomy import CATEGORIES

FAMILY, OWN, PACKAGE, CLASS, PHRASE, TEMPLATE = 0, 1, 2, 3, 4, 9
_PHRASE_WORDS: Final = 4
_PLAIN_LETTERS: Final = 5
_MESSAGE_CHARACTERS: Final = 300
"""The number of characters at the beginning of a message that are used. The beginning states the
cause; the end may be advice.
"""
_TEMPLATE_CHARACTERS: Final = 400
_TEMPLATE_LETTERS: Final = 12
"""The least number of letters in a template; with fewer, unrelated lines would match."""
_HEAD: Final = re2.compile(r"^\s*(?P<package>(?:[A-Za-z_]\w*\.)*)(?P<name>[A-Za-z_]\w*)(?::\s|:?$)")
_BEFORE_CLASS: Final = r"^\s*(?:[\w.]+(?:\(|: ))*(?:\w+\.)*"
"""Matches text that may stand before a class: the name of a logger, a wrapper that repeats the
class, or the packages of the class (as in rules/topics/script.yaml)."""
_AFTER_CLASS: Final = r"(?:\)|:|$)"
_MANY_USES: Final = """
urllib3 requests http httpx aiohttp httpcore torch numpy jax jaxlib tensorflow ray builtins multiprocess pandas
deepspeed lightning pytorch_lightning transformers accelerate megatron vllm __main__
"""
_GENERAL_PACKAGES: Final = frozenset(_MANY_USES.split()) | frozenset(sys.stdlib_module_names)
"""Packages that have so many uses that their exceptions do not indicate a reason."""
_JOINT: Final = re2.compile(r"^[\s:,;()\[\]'\"=/-]{1,4}$")
"""Matches text that may separate two words of a phrase."""
_STEMS: Final = {"OutOfMemoryError": ("OutOfMemoryError", "MemoryError")}
"""For a reason, the endings of class names that mean the reason. Without an entry, only the
reason's own name does.
"""
_ARGPARSE: Final = r"^\s*[\w./-]+\.py: error: "
"""Matches the beginning of argparse's messages about wrong arguments."""
_BUILTIN: Final = {
    name: one
    for name, one in vars(builtins).items()
    if isinstance(one, type) and issubclass(one, BaseException)
}


@dataclass(frozen=True, kw_only=True)
class RuleCandidate:
    """A pattern that may become a rule."""

    pattern: str
    breadth: int
    """The specificity of the pattern: from 0, the most general, to 9, the line itself."""
    hot: tuple[str, ...]
    """Words in lower case. Each line that the pattern matches has at least one of these words."""
    named: bool = False
    """True if the pattern has a word, or a class, on the subject of the reason."""
    only_shared: bool = False
    """True for a plain word, which is informative only if the root lines of several incidents have
    it."""
    part: int = 0
    """The part of the line that the words come from. Phrases from different parts may both be
    learned.
    """
    worth: float = 0.0
    """The information of the words about the reason, to compare candidates of the same breadth."""
    what: str
    """A description, for people, of the lines that match."""


def candidates(root: str, reason: str) -> list[RuleCandidate]:
    """Return patterns for lines like `root`, the most general first. Each also matches `root`."""
    found: dict[str, RuleCandidate] = {}
    for one in _all(root, reason):
        if one.pattern not in found and re2.search(one.pattern, root):
            found[one.pattern] = one
    return sorted(found.values(), key=lambda one: (one.breadth, -one.worth))


def _all(root: str, reason: str) -> Iterator[RuleCandidate]:
    text = root.strip()
    parts = tokens(text)
    head = _HEAD.search(text) if is_exception(text) else None
    if head is not None and _names_a_class(head["name"]):
        yield from _classes(head["package"], head["name"], reason)
        parts = [one for one in parts if one.start >= head.end(2)]
        yield from _beginnings(text, head["name"], parts, reason)
    elif reason == "ArgumentError":
        what = "what argparse says of arguments"
        yield RuleCandidate(
            pattern=_ARGPARSE, breadth=CLASS, hot=(".py: error: ",), named=True, what=what
        )
    yield from _phrases(text, [one for one in parts if one.end <= _MESSAGE_CHARACTERS], reason)
    template = _template(text)
    if (
        sum(map(str.isalpha, "".join(one.text for one in tokens(text) if one.sort == "word")))
        >= _TEMPLATE_LETTERS
    ):
        hot = _hot([one for one in tokens(text) if one.sort == "word"])
        if hot:
            yield RuleCandidate(
                pattern=template,
                breadth=TEMPLATE,
                hot=hot,
                what="this line, but for what varies in it",
            )


def _names_a_class(name: str) -> bool:
    # `train.py: error: …` has the form of `module.Class: message`.
    return name[0].isupper() or name.endswith(("error", "exception"))


def _classes(package: str, name: str, reason: str) -> Iterator[RuleCandidate]:
    family = _family(reason)
    stems = _STEMS.get(reason, (reason,))
    own = "|".join(sorted(re2.escape(one) for one in {*family, *stems}))
    hot = tuple(sorted({one.lower() for one in {*family, *stems}}))
    what = f"any exception that is a {reason} by its class"
    if name in family or name.endswith(stems):
        pattern = rf"{_BEFORE_CLASS}(?:\w*(?:{'|'.join(stems)})|{own}){_AFTER_CLASS}"
        yield RuleCandidate(
            pattern=pattern, breadth=FAMILY, hot=hot, named=True, what=f"{what}, or that ends so"
        )
    if name in family:
        pattern = rf"{_BEFORE_CLASS}(?:{own}){_AFTER_CLASS}"
        yield RuleCandidate(pattern=pattern, breadth=OWN, hot=hot, named=True, what=what)
    top = package.partition(".")[0]
    if top and top not in _GENERAL_PACKAGES:
        pattern = rf"^\s*(?:[\w.]+(?:\(|: ))*{re2.escape(top)}(?:\.\w+)*\.[A-Z]\w*{_AFTER_CLASS}"
        yield RuleCandidate(
            pattern=pattern,
            breadth=PACKAGE,
            hot=(f"{top.lower()}.",),
            what=f"any exception of {top}",
        )
    if name not in _BUILTIN and name != "Error":
        pattern = rf"{_BEFORE_CLASS}{re2.escape(name)}{_AFTER_CLASS}"
        yield RuleCandidate(
            pattern=pattern, breadth=CLASS, hot=(name.lower(),), what=f"the exception {name}"
        )


def is_bare(root: str) -> bool:
    """Return True if `root` states a built-in exception, which identifies only its own reason."""
    head = _HEAD.search(root.strip())
    return head is not None and head["name"] in _BUILTIN


def _family(reason: str) -> frozenset[str]:
    """Return the names of the built-in classes that mean `reason`, and no more specific reason."""
    found = set()
    for name, one in _BUILTIN.items():
        nearest = next((base.__name__ for base in one.__mro__ if base.__name__ in CATEGORIES), "")
        if nearest == reason:
            found.add(name)
    return frozenset(found)


def _phrases(text: str, parts: Sequence[Token], reason: str) -> Iterator[RuleCandidate]:
    named = NAMED.get(reason, frozenset())
    for part, run in enumerate(_runs(text, parts)):
        for length in range(1, _PHRASE_WORDS + 1):
            for at in range(len(run) - length + 1):
                made = _phrase(text, run[at : at + length], named)
                if made is not None:
                    yield replace(made, part=part)


def _beginnings(
    text: str, name: str, parts: Sequence[Token], reason: str
) -> Iterator[RuleCandidate]:
    """Yield patterns for the class with the first words of its message."""
    named = NAMED.get(reason, frozenset())
    run = next(_runs(text, parts), [])
    if not run or not re2.search(r"^\W*$", text[text.index(name) + len(name) : run[0].start]):
        return
    for length in range(1, min(_PHRASE_WORDS, len(run)) + 1):
        words = run[:length]
        if all(one.is_common and not _is_named(one, named) for one in words):
            continue
        pattern = rf"{_BEFORE_CLASS}{re2.escape(name)}:\s+\W*{_literally(text, words)}\b"
        beginning = f"{name}: {text[words[0].start : words[-1].end]}"
        about = any(_is_named(one, named) for one in words)
        what = f"lines that begin with `{beginning}`"
        yield RuleCandidate(
            pattern=pattern,
            breadth=PHRASE + length,
            hot=_hot(words),
            named=about,
            worth=-1.0,
            what=what,
        )


def _runs(text: str, parts: Sequence[Token]) -> Iterator[list[Token]]:
    """Yield the runs of consecutive words with nothing that varies between them."""
    run: list[Token] = []
    for one in parts:
        joined = (
            run and one.sort == "word" and _JOINT.search(text[run[-1].end : one.start]) is not None
        )
        if run and not joined:
            yield run
            run = []
        if one.sort == "word":
            run.append(one)
    if run:
        yield run


def _phrase(text: str, words: Sequence[Token], named: frozenset[str]) -> RuleCandidate | None:
    telling = [one for one in words if not one.is_common or _is_named(one, named)]
    strong = [one for one in telling if one.is_technical or _is_named(one, named)]
    wording = text[words[0].start : words[-1].end]
    troubled = is_trouble(wording)
    if any(
        one not in telling and not _is_part_of_trouble(text, words, one)
        for one in (words[0], words[-1])
    ):
        return None  # common words at the ends add no information
    plain = len(words) == 1 and words[0].text.lower() not in NAMES and not words[0].is_technical
    if plain and (words[0] not in telling or len(wording) < _PLAIN_LETTERS):
        return None
    if len(words) == 1 and (
        not (plain or strong)
        or is_trouble(wording)
        or (wording.isupper() and not _is_named(words[0], named))
    ):
        return None  # such as ECC, but not PCI
    if len(words) == 2 and not strong and len(telling) < 2:
        return None
    if len(words) > 2 and len(telling) < 2:
        return None
    phrase = r"\b" + _literally(text, words) + r"\b"
    pattern = f"(?i:{phrase})"
    what = f"lines with `{wording}`"
    if not troubled and len(words) <= 2:
        rest = f"{text[: words[0].start]} {text[words[-1].end :]}"
        if not is_trouble(rest):
            return None
        pattern = f"{TROUBLE}.*{pattern}|{pattern}.*{TROUBLE}"
        what += " and a word of trouble"
    hot = _hot(words)
    if not hot:
        return None
    # A single plain word is ambiguous. For example, a closed `remote` end is not a lost NCCL peer.
    about = any(_is_named(one, named) for one in words) and not plain
    worth = 2.0 * about + 0.5 * len([one for one in telling if one.is_technical]) + 0.5 * troubled
    worth -= words[0].start / 100
    breadth = PHRASE + len(words) - 1
    return RuleCandidate(
        pattern=pattern,
        breadth=breadth,
        hot=hot,
        named=about,
        only_shared=plain,
        worth=worth,
        what=what,
    )


def _is_part_of_trouble(text: str, words: Sequence[Token], one: Token) -> bool:
    """Return True if a word belongs to a report of a problem.

    Examples are `refused`, and `out` in `out of memory`.
    """
    return is_trouble(one.text) or (
        one is words[0] and len(words) > 1 and is_trouble(text[one.start : words[1].end])
    )


def _is_named(word: Token, named: frozenset[str]) -> bool:
    lowered = word.text.lower()
    return lowered in named or any(part in named for part in lowered.replace(".", "_").split("_"))


def _literally(text: str, words: Sequence[Token]) -> str:
    """Return a pattern for `words` in the order of `text`, with any blanks between them."""
    parts, at = [], words[0].start
    for one in words:
        between = text[at : one.start]
        parts.append(r"\s+" if between.isspace() else re2.escape(between))
        parts.append(re2.escape(one.text))
        at = one.end
    return "".join(parts)


def _template(text: str) -> str:
    parts, at = [r"^\s*"], 0
    for one in tokens(text[:_TEMPLATE_CHARACTERS]):
        if one.sort == "word":
            continue
        parts += [_blanks(text[at : one.start]), ".*" if one.sort == "quoted" else r"\S*"]
        at = one.end
    rest = text[at:_TEMPLATE_CHARACTERS]
    return "".join((*parts, _blanks(rest), "" if len(text) > _TEMPLATE_CHARACTERS else r"\s*$"))


def _blanks(text: str) -> str:
    return r"\s+".join(re2.escape(part) for part in re2.split(r"\s+", text)) if text else ""


def _hot(words: Sequence[Token]) -> tuple[str, ...]:
    """Return the longest plain word, which the prefilter searches for."""
    parts = [part for one in words for part in one.text.lower().split(".") if part.isascii()]
    best = max(parts, key=len, default="")
    return (best,) if len(best) > 1 else ()
