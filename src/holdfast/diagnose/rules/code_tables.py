"""Make rules from tables of error codes of NVIDIA's driver (Xid) and the CUDA runtime.

`tables/xid.tsv` has a row for each Xid, `xid_nvlink5.tsv` a row for each error word of a Blackwell
NVLink unit (Xid 144 to 150), `cuda.tsv` a row for each CUDA error that matters. Rows with equal
meanings become one rule.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import Final, NamedTuple, cast

from holdfast.core.errors import BadUse
from holdfast.diagnose.rules.causes import kinds
from holdfast.diagnose.rules.rules import ROUTINE, Rule
from holdfast.diagnose.rules.taxonomy import CATEGORIES, Action

ORDER: Final = 25
"""The place of the tables among the topics: after rules for quoted lines, before the general GPU
rules."""
HOT: Final = frozenset({
    "xid", "cuda error", "cuda failure", "cuda runtime", "cuda driver", "[cuda]", "cudaerror", "cuda_error",
    "cudasuccess", "hiperror", "hip error", "error_ecc", "returned error", "(code #", "error=",
})  # fmt: skip
"""Each line that a rule of a table matches has one of these words, or one of the texts in
`cuda.tsv`.
"""

_ADVICE: Final[dict[str, str]] = {
    "restart": "Restart; if the same GPU fails again, exclude its node; if every GPU fails at the same step, look "
    "for the fault in the program.",
    "exclude_and_restart": "Restart without this node; reboot it, and have the card replaced if the fault comes back.",
    "reset_gpu": "Restart elsewhere; drain the node and reset the GPU. Have the card replaced if the fault comes back.",
    "change_config": "A restart changes nothing: make the job's request, its image and the node's driver fit together.",
    "user_must_fix": "A restart changes nothing: run with CUDA_LAUNCH_BLOCKING=1 to see the call, and check the batch.",
}
_CONFIDENCE: Final = {
    "gpu_memory": 0.95,
    "gpu_link": 0.95,
    "gpu_lost": 0.95,
    "gpu_fault": 0.8,
    "cuda_error": 0.8,
}
_HELPLESS: Final = frozenset({"change_config", "user_must_fix"})


class Meaning(NamedTuple):
    """The meaning of an error code, from its row in the table."""

    what: str
    kind: str
    reason: str
    action: str
    alone: str
    """The cost, in nats, of beginning a failure without a cause; empty to use the cost of the kind.
    """


def table_rules() -> tuple[Rule, ...]:
    """Return the rules of all tables, specific rules before general ones.

    Raises:
        BadUse: a row has an unknown kind, reason or action; the message lists the allowed values.
    """
    return (*_nvlink5_rules(), *_xid_rules(), *_cuda_rules())


def table_hot_words() -> frozenset[str]:
    """Return words in lower case. Each line that these rules match has at least one of the words."""
    texts = (text for row in read_table("cuda") for text in _texts(row))
    return HOT | {text.lower() for text in texts if not text.startswith(_AFTER_CUDA)}


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of `tables/<name>.tsv`."""
    text = (resources.files("holdfast.diagnose.rules") / "tables" / f"{name}.tsv").read_text(
        "utf-8"
    )
    return list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


# --- Xid -----------------------------------------------------------------------------------------

_XID: Final = r"Xid \((?:PCI:)?(?P<gpu>[0-9A-Fa-f:.]+)[^)]*\): "
_PID: Final = r"(?:, pid='?(?P<pid>\d+))?"
_LINK: Final = r"(?:.*?\b[Ll]ink (?P<link>\d+))?"
_OTHER_SPELLING: Final = r"(?i:\bxid(?:criticalerror| error| code| event)?[ :=#]{1,3})"
"""Matches the forms in which monitors repeat an Xid: DCGM, gpud, the Kubernetes device plugin."""


def _xid_rules() -> Iterator[Rule]:
    # Rules for causes come before rules for their consequences, so that the line `45, … caused by
    # previous Xid 149` counts as Xid 149.
    for meaning, rows in sorted(
        _grouped(read_table("xid")), key=lambda group: float(group[0].alone or 0)
    ):
        codes = [row["code"] for row in rows]
        numbers = _any(codes)
        yield _rule(
            f"xid-{_slug(meaning.what)}",
            rf"{_XID}(?:45\b.* caused by previous Xid )?{numbers}\b{_PID}{_LINK}|{_OTHER_SPELLING}{numbers}\b",
            f"The GPU's driver reports: {meaning.what}.",
            meaning,
            "; ".join(sorted({row["source"] for row in rows})),
            match=[
                f"NVRM: Xid (PCI:0000:4e:00): {code}, pid=7301, name=python, Ch 00000008"
                for code in codes
            ],
            no_match=[
                f"NVRM: Xid (PCI:0000:4e:00): {code}77, pid=7301, name=python, Ch 00000008"
                for code in codes
            ],
        )


_EFFECTS: Final = {
    "none": Meaning("NVLink notice", ROUTINE, "NVLinkError", "restart", ""),
    "memory error": Meaning(
        "memory error in an NVLink unit", "gpu_fault", "ECCError", "reset_gpu", "0.9"
    ),
    "packets lost": Meaning(
        "packets lost on an NVLink", "gpu_fault", "NVLinkError", "restart", "1.5"
    ),
    "program ends": Meaning(
        "NVLink traffic of the program failed", "gpu_link", "NVLinkError", "restart", "0.5"
    ),
    "link lost": Meaning("NVLink lost", "gpu_link", "NVLinkError", "reset_gpu", ""),
    "lost by its peer": Meaning(
        "NVLink lost from the other end", "gpu_link", "NVLinkError", "reset_gpu", "1.0"
    ),
}


def _nvlink5_rules() -> Iterator[Rule]:
    """Make the rules for lines such as `145, RLW_REMAP Nonfatal XC0 i0 Link 04 (0x… 0x… …)`.

    The first word in parentheses contains the sub-code, the second is the error.
    """
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in read_table("xid_nvlink5"):
        groups.setdefault((row["xid"], row["unit"], row["effect"], row["look_at"]), []).append(row)
    for (xid, unit, effect, look_at), rows in groups.items():
        if effect not in _EFFECTS:
            raise BadUse(f"xid_nvlink5.tsv: effect {effect!r}. Allowed: {', '.join(_EFFECTS)}.")
        words = sorted({_words(row) for row in rows})
        hint = "" if look_at == "-" else f" Look at the {look_at} first."
        name = unit.split("/")[-1]
        example = f"NVRM: Xid (PCI:0008:01:00): {xid}, {name} Nonfatal XC0 i0 Link 04 "
        yield _rule(
            _slug(f"xid {xid} {unit} {effect} {look_at}"),
            rf"{_XID}{xid}, (?:{unit.replace('/', '|')})\b[^(]*?(?:Link (?P<link>\d+)\s*)?\({_any(words)}\b",
            f"The GPU's driver reports: {_EFFECTS[effect].what}.{hint}",
            _EFFECTS[effect],
            "Xid catalogue 2025-10, NVLink 5 sub-codes",
            match=[
                f"{example}(0x{int(row['subcode']) << 20:08x} 0x{row['status']:0>8} 0x00000000)"
                for row in rows
            ],
            no_match=[f"{example}(0x00000000 0x77777777 0x00000000)"],
        )


def _words(row: dict[str, str]) -> str:
    """Return a pattern for the two hexadecimal words that contain a sub-code and an error.

    The sub-code is in bits 20 to 25 of the first word; the second word is the error.
    """
    subcode = int(row["subcode"])
    high = "".join(f"{digit:x}" for digit in range(16) if digit & 3 == subcode >> 4)
    return rf"0x[0-9a-f][{high}]{subcode & 15:x}[0-9a-f]{{5}} 0x0*{row['status']}"


# --- CUDA ----------------------------------------------------------------------------------------

_AFTER_CUDA: Final = "CUDA: "
"""Marks texts in the table that are meaningful only directly after the words `CUDA error`."""
_CUDA_ERROR: Final = (
    r"(?i:(?:\b(?:cuda|hip)(?: runtime| driver)? (?:error|failure)|error \[cuda\])[^a-z]*)"
)
_RANK: Final = r"(?:\[(?:PG (?:ID )?0 (?:PG GUID 0)?\(default_pg\) )?Rank (?P<rank>\d+)\].*?)?"
"""Matches the text of NCCL's watchdog before the error. In a smaller process group, its number is
not a rank of the job.
"""


def _cuda_rules() -> Iterator[Rule]:
    for meaning, rows in _grouped(read_table("cuda")):
        names = [name for row in rows for name in row["names"].split()]
        codes = [code for row in rows for code in row["codes"].split()]
        texts = [text for row in rows for text in _texts(row)]
        plain = [re.escape(text) for text in texts if not text.startswith(_AFTER_CUDA)]
        after = [
            re.escape(text.removeprefix(_AFTER_CUDA))
            for text in texts
            if text.startswith(_AFTER_CUDA)
        ]
        number = _any(codes)
        ways = [
            rf"\b{_any(names)}\b",
            rf"(?i:\bcuda (?:runtime )?(?:failure|error)[ :=(]+){number}\b",
            rf"cudaSuccess.*\((?:0 vs\. {number}|{number} vs\. 0)\)",
            rf"\breturned error {number}$|\(code #{number}\b|\berror={number} : ",
            *([rf"(?i:{_any(plain)})"] if plain else []),
            *([rf"{_CUDA_ERROR}(?i:{_any(after)})"] if after else []),
        ]
        yield _rule(
            f"cuda-{_slug(meaning.what)}",
            f"{_RANK}(?:{'|'.join(ways)})",
            f"CUDA reports: {meaning.what}.",
            meaning,
            "CUDA Runtime API and Driver API, error codes; HIP's twins",
            match=[f"RuntimeError: CUDA error: {text.removeprefix(_AFTER_CUDA)}" for text in texts]
            + [f"what(): {name}: failed" for name in names]
            + [f"n3:61:90 [2] init.cc:77 NCCL WARN Cuda failure {code}" for code in codes],
            no_match=["CUDA error: no error", "CUDA version 12.4, driver 550.54, 8 devices"],
        )


def _texts(row: dict[str, str]) -> list[str]:
    return [text for text in row["texts"].split(" | ") if text]


# --- all tables ----------------------------------------------------------------------------------


def _grouped(rows: Iterable[dict[str, str]]) -> list[tuple[Meaning, list[dict[str, str]]]]:
    groups: dict[Meaning, list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(Meaning(*(row[name] for name in Meaning._fields)), []).append(row)
    return list(groups.items())


def _rule(
    name: str,
    pattern: str,
    said: str,
    meaning: Meaning,
    source: str,
    *,
    match: Sequence[str],
    no_match: Sequence[str],
) -> Rule:
    for value, allowed in (
        (meaning.kind, (*kinds(), ROUTINE)),
        (meaning.reason, tuple(CATEGORIES)),
        (meaning.action, tuple(_ADVICE)),
    ):
        if value not in allowed:
            raise BadUse(f"tables: {name}: {value!r}. Allowed: {', '.join(allowed)}.")
    return Rule(
        id=name,
        pattern=pattern,
        kind=meaning.kind,
        reason=meaning.reason,
        category=CATEGORIES[meaning.reason],
        action=cast("Action", meaning.action),
        restart_helps=meaning.action not in _HELPLESS,
        mitigation=f"{said} {_ADVICE[meaning.action]}",
        confidence=_CONFIDENCE.get(meaning.kind, 0.8),
        source=source,
        match=tuple(match),
        no_match=tuple(no_match),
        alone=float(meaning.alone) if meaning.alone else None,
    )


def _any(choices: Iterable[str]) -> str:
    return f"(?:{'|'.join(choices)})"


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.partition(",")[0].lower()).strip("-")
