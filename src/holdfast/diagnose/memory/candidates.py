"""A root line to the patterns that might know its like, from the most general to the line itself.

| breadth | what the pattern knows | of `botocore.errorfactory.NoSuchKey: An error occurred (NoSuchKey) …` |
|---|---|---|
| 0 | every class whose name ends as the reason's | (for KeyError: `KeyError`, `BatchKeyError`) |
| 1 | the reason's own class, and Python's classes below it | (for ImportError: `ModuleNotFoundError` too) |
| 2 | every exception of its package | `botocore.*` |
| 3 | its class, whatever package | `NoSuchKey` |
| 4 to 7 | one to four telling words of the message in a row | `NoSuchKey`, with a word of trouble on the line |
| 5 to 7 | the class and the first words of the message | `NoSuchKey: An error occurred` |
| 9 | the line but for what varies | |

A class that Python itself has says only its own reason: a DataLoader's RuntimeError is known by its message.
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
"""Of a long message: the cause stands at its beginning, advice at its end."""
_TEMPLATE_CHARACTERS: Final = 400
_TEMPLATE_LETTERS: Final = 12
"""A template with fewer letters would know lines that have nothing in common."""
_HEAD: Final = re2.compile(r"^\s*(?P<package>(?:[A-Za-z_]\w*\.)*)(?P<name>[A-Za-z_]\w*)(?::\s|:?$)")
_BEFORE_CLASS: Final = r"^\s*(?:[\w.]+(?:\(|: ))*(?:\w+\.)*"
"""What may stand before a class: a logger's name, a wrapper that repeats it, its packages (as in rules/script.yaml)."""
_AFTER_CLASS: Final = r"(?:\)|:|$)"
_MANY_USES: Final = """
urllib3 requests http httpx aiohttp httpcore torch numpy jax jaxlib tensorflow ray builtins multiprocess pandas
deepspeed lightning pytorch_lightning transformers accelerate megatron vllm __main__
"""
_GENERAL_PACKAGES: Final = frozenset(_MANY_USES.split()) | frozenset(sys.stdlib_module_names)
"""Packages of so many uses that an exception of theirs says nothing of the reason."""
_JOINT: Final = re2.compile(r"^[\s:,;()\[\]'\"=/-]{1,4}$")
"""What may stand between two words of a phrase."""
_STEMS: Final = {"OutOfMemoryError": ("OutOfMemoryError", "MemoryError")}
"""Where a class may say a reason in other words than its name."""
_ARGPARSE: Final = r"^\s*[\w./-]+\.py: error: "
"""How Python's argparse begins what it says of wrong arguments."""
_BUILTIN: Final = {
    name: one
    for name, one in vars(builtins).items()
    if isinstance(one, type) and issubclass(one, BaseException)
}


@dataclass(frozen=True, kw_only=True)
class RuleCandidate:
    """A pattern that might become a rule."""

    pattern: str
    breadth: int
    """0 the most general, 9 the line itself."""
    hot: tuple[str, ...]
    """Words in lower case of which every line that the pattern matches has one."""
    named: bool = False
    """It holds a word, or a class, of what the reason is about."""
    only_shared: bool = False
    """A plain word: it tells something only where the root lines of several incidents have it."""
    part: int = 0
    """Where in the line its words stand: phrases of different parts may both be learned."""
    worth: float = 0.0
    """Among candidates of one breadth: how much its words tell of the reason."""
    what: str
    """What it knows, for people."""


def candidates(root: str, reason: str) -> list[RuleCandidate]:
    """Patterns for lines like `root`, the most general first; each matches `root` itself."""
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
    # `train.py: error: …` reads like `module.Class: message`.
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
    """Whether `root` is an exception of Python's own, which says nothing but its own reason."""
    head = _HEAD.search(root.strip())
    return head is not None and head["name"] in _BUILTIN


def _family(reason: str) -> frozenset[str]:
    """The names of Python's own classes that say `reason` and no reason more precise."""
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
    """The class with the first words of its message."""
    named = NAMED.get(reason, frozenset())
    run = next(_runs(text, parts), [])
    if not run or not re2.search(r"^\W*$", text[text.index(name) + len(name) : run[0].start]):
        return
    for length in range(1, min(_PHRASE_WORDS, len(run)) + 1):
        words = run[:length]
        if all(one.is_common and not _is_named(one, named) for one in words):
            continue
        pattern = rf"{_BEFORE_CLASS}{re2.escape(name)}:\s+\W*{_literally(text, words)}\b"
        said = f"{name}: {text[words[0].start : words[-1].end]}"
        about = any(_is_named(one, named) for one in words)
        what = f"lines that begin with `{said}`"
        yield RuleCandidate(
            pattern=pattern,
            breadth=PHRASE + length,
            hot=_hot(words),
            named=about,
            worth=-1.0,
            what=what,
        )


def _runs(text: str, parts: Sequence[Token]) -> Iterator[list[Token]]:
    """Words in a row, with nothing that varies between them."""
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
    said = text[words[0].start : words[-1].end]
    troubled = is_trouble(said)
    if any(
        one not in telling and not _is_part_of_trouble(text, words, one)
        for one in (words[0], words[-1])
    ):
        return None  # it gains nothing by a common word at its ends
    plain = len(words) == 1 and words[0].text.lower() not in NAMES and not words[0].is_technical
    if plain and (words[0] not in telling or len(said) < _PLAIN_LETTERS):
        return None
    if len(words) == 1 and (
        not (plain or strong)
        or is_trouble(said)
        or (said.isupper() and not _is_named(words[0], named))
    ):
        return None  # ECC, but not PCI
    if len(words) == 2 and not strong and len(telling) < 2:
        return None
    if len(words) > 2 and len(telling) < 2:
        return None
    phrase = r"\b" + _literally(text, words) + r"\b"
    pattern = f"(?i:{phrase})"
    what = f"lines with `{said}`"
    if not troubled and len(words) <= 2:
        rest = f"{text[: words[0].start]} {text[words[-1].end :]}"
        if not is_trouble(rest):
            return None
        pattern = f"{TROUBLE}.*{pattern}|{pattern}.*{TROUBLE}"
        what += " and a word of trouble"
    hot = _hot(words)
    if not hot:
        return None
    # A plain word by itself names many things: a closed `remote` end is not a lost NCCL peer.
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
    """`refused`, and `out` in `out of memory`."""
    return is_trouble(one.text) or (
        one is words[0] and len(words) > 1 and is_trouble(text[one.start : words[1].end])
    )


def _is_named(word: Token, named: frozenset[str]) -> bool:
    said = word.text.lower()
    return said in named or any(part in named for part in said.replace(".", "_").split("_"))


def _literally(text: str, words: Sequence[Token]) -> str:
    """The words as they stand there, any blanks between them."""
    said, at = [], words[0].start
    for one in words:
        between = text[at : one.start]
        said.append(r"\s+" if between.isspace() else re2.escape(between))
        said.append(re2.escape(one.text))
        at = one.end
    return "".join(said)


def _template(text: str) -> str:
    said, at = [r"^\s*"], 0
    for one in tokens(text[:_TEMPLATE_CHARACTERS]):
        if one.sort == "word":
            continue
        said += [_blanks(text[at : one.start]), ".*" if one.sort == "quoted" else r"\S*"]
        at = one.end
    rest = text[at:_TEMPLATE_CHARACTERS]
    return "".join((*said, _blanks(rest), "" if len(text) > _TEMPLATE_CHARACTERS else r"\s*$"))


def _blanks(text: str) -> str:
    return r"\s+".join(re2.escape(part) for part in re2.split(r"\s+", text)) if text else ""


def _hot(words: Sequence[Token]) -> tuple[str, ...]:
    """The longest plain word: what the prefilter looks for."""
    parts = [part for one in words for part in one.text.lower().split(".") if part.isascii()]
    best = max(parts, key=len, default="")
    return (best,) if len(best) > 1 else ()
