"""Replace possible secrets by `<redacted>` in text that leaves the machine.

Three kinds of text are removed, one after another:

1. tokens and keys of a known form
2. values after names of secrets, such as `password:`, `HF_TOKEN=` or `Authorization:`
3. words that look machine-generated

This removes too much rather than too little. For example, digests, GPU identifiers and mangled
names are removed too. All patterns use RE2, which matches in linear time.
"""

from collections.abc import Iterable
from typing import Any, Final

import re2

PLACEHOLDER: Final = "<redacted>"
_MIN_SECRET_LENGTH: Final = 6
"""The least length of a literal secret that is searched for; a shorter one would match everywhere.
"""

_FORMS: Final[tuple[str, ...]] = (
    # on one line, as in JSON
    r"-----BEGIN[A-Z ]*PRIVATE KEY-----.*?(?:-----END[A-Z ]*PRIVATE KEY-----|$)",
    r"\b(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA|ANVA|ABIA|ACCA)[A-Z0-9]{8,}",  # AWS
    r"\bAIza[\w-]{16,}",  # Google
    r"\bya29\.[\w.-]+",
    r"\bhf_[A-Za-z0-9]{12,}",  # Hugging Face
    r"\bgh[pousr]_[A-Za-z0-9]{8,}",  # GitHub
    r"\bgithub_pat_\w{8,}",
    r"\bgl[a-z]{2,5}-[\w-]{12,}",  # GitLab
    r"\b(?:sk|pk|rk)[-_](?:[A-Za-z]+[-_])*[\w-]{12,}",  # OpenAI, Anthropic, OpenRouter, Stripe
    r"\bxox[a-z]-[\w-]{6,}",  # Slack
    r"\bxapp-[\w-]{6,}",
    r"\bhooks\.slack\.com/services/\S+",
    r"\bdiscord(?:app)?\.com/api/webhooks/\S+",
    r"\beyJ[\w-]{6,}(?:\.[\w-]*)*",  # a JSON web token
    r"\b(?:nvapi|dapi|npm|pypi|gsk|r8|hvs|hvb|dckr_pat|dop_v1|wandb_v\d|SG)[-_.][\w.-]{12,}",
    r"\bdapi[0-9a-f]{16,}",  # Databricks
    r"\b\d{8,10}:[\w-]{30,}",  # Telegram
)
_SEPARATOR: Final = r"(?:\\*[\"']?\s*(?:=>|:=|==|[=:>])\s*|\\*[\"']\s*,\s*)"
"""Matches the text between the name of a secret and its value, also if both are strings of a tuple
or parts of a tag.
"""
_VALUE: Final = r"(?:\\*[\"'][^\"']*[\"']?\S*|\S+)"
_HEADERS: Final = r"(?:proxy-)?authorization|x-api-key|api-key|x-auth-token|x-amz-security-token|x-goog-api-key|(?:set-)?cookie"  # noqa: E501
_PASSWORDS: Final = r"passw(?:or)?d|passphrase|passcode"
_NAMES: Final = (
    r"[\w.-]*(?:secret[\w.-]*(?: (?:access )?key)?|token|(?:api|access)[ _.-]?keys?(?:[ _.-]?id)?"
    r"|(?:private|account|shared|encryption|signing|license|master|deploy|ssh)[_.-]?key|credentials?|signature"
    r"|session[_.-]?id|connection[_.-]?string|webhook[\w.-]*)|\b(?:sig|auth|authkey|dsn|\w+_(?:auth|pass|pw))"
    r"|\b(?:key|token|secret) (?:provided|given|used|value|is|was)"
)
_TAKEN: Final[tuple[tuple[Any, str], ...]] = tuple(
    (re2.compile(pattern), replacement)
    for pattern, replacement in (
        ("|".join(_FORMS), PLACEHOLDER),
        (r"(?i)(\bbearer[\s:=]+)\S+", rf"\1{PLACEHOLDER}"),
        # A password may contain blanks, and the value of a header has several parts, so the rest of
        # the line is removed.
        (
            rf"(?i)(\b(?:{_HEADERS}){_SEPARATOR}).+",
            rf"\1{PLACEHOLDER}",
        ),
        (
            rf"(?i)([\w.-]*(?:{_PASSWORDS}|\bpwd)[\w.-]*(?:{_SEPARATOR}|\s+(?:is|was)\s+|\s+\\*[\"']))\S.*",
            rf"\1{PLACEHOLDER}",
        ),
        (rf"(?i)((?:{_NAMES}){_SEPARATOR}){_VALUE}", rf"\1{PLACEHOLDER}"),
        (rf"(\b[A-Z0-9_]+_(?:KEY|PASS|PW|PAT)=){_VALUE}", rf"\1{PLACEHOLDER}"),
        (
            rf"(?i)(--?[\w-]*(?:{_PASSWORDS}|token|secret|api-?key|access-?key|credentials?)[\s=]+){_VALUE}",
            rf"\1{PLACEHOLDER}",
        ),
        (r"(\s(?:-u|--user)[\s=]+[^\s:]*:)\S+|(\bsshpass\s+-p\s*)\S+", rf"\1\2{PLACEHOLDER}"),
        (r"(://)(?:[^\s/?#]*|[^\s:/?#]*:\S*)@", rf"\1{PLACEHOLDER}@"),
        (r"[\w.+-]+:[^\s@/]+@", f"{PLACEHOLDER}@"),  # a URL without its scheme
        (r"[\pL\pN._%+-]+@[\pL\pN-]+(?:\.[\pL\pN-]+)+", PLACEHOLDER),
    )
)
_WORD: Final = re2.compile(r"[A-Za-z0-9+/=_~%-]{16,}")
_PARTS: Final = re2.compile(r"[A-Za-z0-9]+")
_LETTERS: Final = r"(?:[a-z]*|[A-Z]*|[a-z]*(?:[A-Z]{1,5}[a-z]{2,})+[A-Z]{0,4})"
_PLAIN: Final = re2.compile(
    rf"^(?:{_LETTERS}[0-9]*{_LETTERS}|[0-9]+(?:x[0-9]+)+|0x[0-9a-f]{{1,16}})$"
)
"""Matches a part of an identifier that a person would write: a word or camel case, with at most one
number before, after or within it; also sizes and memory addresses."""
_PLAIN_LETTERS_LIMIT: Final = 30
_PLAIN_MIXED_LIMIT: Final = 20
_PEM_BEGIN: Final = re2.compile(r"-----BEGIN[A-Z ]*PRIVATE KEY")
_PEM_END: Final = re2.compile(r"-----END[A-Z ]*PRIVATE KEY")
_PEM_BODY: Final = re2.compile(r"(?:^|[\s:])[A-Za-z0-9+/=]+\s*$")
_PEM_LINES: Final = 120
"""The largest number of lines of a private key: more than the longest key in use, since RSA with
8192 bits takes about 100 lines.
"""


def redact(text: str, known: Iterable[str] = ()) -> str:
    """Return `text` without secrets; `known` are literal secrets. A second call changes nothing."""
    return "\n".join(redact_lines(text.split("\n"), known))


def redact_lines(lines: Iterable[str], known: Iterable[str] = ()) -> list[str]:
    """Return `lines` without their secrets. A private key may span several lines."""
    given, literal = list(lines), [one for one in known if len(one) >= _MIN_SECRET_LENGTH]
    within = _within_private_keys(given)
    return [
        PLACEHOLDER if at in within else _redact_line(line, literal)
        for at, line in enumerate(given)
    ]


def _redact_line(line: str, known: Iterable[str]) -> str:
    for secret in known:
        line = line.replace(secret, PLACEHOLDER)
    for pattern, replacement in _TAKEN:
        line = pattern.sub(replacement, line)
    return str(_WORD.sub(lambda word: PLACEHOLDER if _by_machine(word[0]) else word[0], line))


def _by_machine(word: str) -> bool:
    return not all(_plain(part) for part in _PARTS.findall(word))


def _plain(part: str) -> bool:
    if part.isdigit():
        return True
    limit = _PLAIN_LETTERS_LIMIT if part.isalpha() else _PLAIN_MIXED_LIMIT
    return len(part) <= limit and _PLAIN.search(part) is not None


def _within_private_keys(lines: list[str]) -> set[int]:
    found: set[int] = set()
    for begin, line in enumerate(lines):
        if begin in found or not _PEM_BEGIN.search(line) or _PEM_END.search(line):
            continue
        last = min(begin + _PEM_LINES, len(lines))
        end = next((at for at in range(begin, last) if _PEM_END.search(lines[at])), None)
        if end is None:  # the end is missing: remove up to the first line that is unlike a key's
            end = begin
            while end + 1 < last and _PEM_BODY.search(lines[end + 1]):
                end += 1
        found.update(range(begin, end + 1))
    return found
