"""Parse single fields of Slurm: states, times, exit codes, trackable resources (TRES), node lists.

All functions are pure, and are used for both `sacct --parsable2` and `sacct --json`. If a field
cannot be parsed, a function raises a ValueError that states the expected form. Sources: the manual
pages sacct(1), slurm.conf(5) and scontrol(1) of Slurm 22.05 to 24.11.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from holdfast.core.errors import BadUse
from holdfast.trace.sources.mig import is_slice, mig_share

NEVER: Final = frozenset({"", "Unknown", "None", "N/A", "NONE", "Invalid"})
"""Texts that Slurm prints for a time in the future or for a missing value."""
NO_NODES: Final = frozenset({"", "None assigned", "(null)", "None"})
LAST_UNIX_S: Final = 253_402_300_799
"""The end of the year 9999, because later years would have five digits."""
MAX_NODES: Final = 65_536
"""Slurm's own limit for a cluster (MAX_SLURM_NODES). A list with more nodes is damaged."""

_STATES: Final = {
    "COMPLETED": "COMPLETED",
    "CANCELLED": "CANCELLED",
    "REVOKED": "CANCELLED",  # A sibling of the federation ran the job instead.
    "FAILED": "FAILED",
    "LAUNCH_FAILED": "FAILED",
    "RECONFIG_FAIL": "FAILED",
    "TIMEOUT": "TIMEOUT",
    "DEADLINE": "TIMEOUT",
    "NODE_FAIL": "NODE_FAIL",
    "BOOT_FAIL": "NODE_FAIL",
    "OUT_OF_MEMORY": "OUT_OF_MEMORY",
    "PREEMPTED": "PREEMPTED",
    "REQUEUED": "PREEMPTED",  # Ended in order to run again; the job did not fail.
    "RUNNING": "RUNNING",
    "SUSPENDED": "RUNNING",
    "COMPLETING": "RUNNING",
    "CONFIGURING": "RUNNING",
    "POWER_UP_NODE": "RUNNING",
    "SIGNALING": "RUNNING",
    "STAGE_OUT": "RUNNING",
    "STOPPED": "RUNNING",
    "PENDING": "PENDING",
    "REQUEUE_FED": "PENDING",
    "REQUEUE_HOLD": "PENDING",
    "RESV_DEL_HOLD": "PENDING",
    "SPECIAL_EXIT": "PENDING",
    "EXPEDITING": "PENDING",
    "RESIZING": "UNKNOWN",  # This record ended; the job continued in another record.
}
_REASONS: Final = {
    "NODE_FAIL": "NodeFailure",
    "BOOT_FAIL": "NodeFailure",
    "OUT_OF_MEMORY": "OutOfMemory",
}
"""States that imply a failure reason: a name from the study's Table 3, or Slurm's own."""
_FAILURE_REASONS: Final = frozenset(
    {
        "NonZeroExitCode",
        "TimeLimit",
        "InactiveLimit",
        "NodeDown",
        "JobLaunchFailure",
        "SystemFailure",
        "OutOfMemory",
    }
)
"""Values of Slurm's Reason that mean a failure; all other values are reasons for waiting."""

_RAW_STATE = re.compile(r"([A-Z][A-Z_]*)\+?(?: by .*)?$", re.DOTALL)
_EXIT_CODE = re.compile(r"(\d+):(\d+)$")
_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?$")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([KMGTPE]?)", re.IGNORECASE)
_UNITS: Final = {unit: 1024**power for power, unit in enumerate(("", "K", "M", "G", "T", "P", "E"))}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?$", re.ASCII)
_OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)$")


@lru_cache(maxsize=1024)
def state_of(words: str) -> tuple[str, str | None]:
    """Return a state of `schema.STATES`, and the failure reason that the state implies.

    Args:
        words: a state as Slurm prints it, such as `CANCELLED by 1000`, or several states joined by
            commas, as in JSON. The first known state counts.

    Returns:
        The state, which is UNKNOWN if Slurm's manual does not list it, and a reason or None.
    """
    for word in words.split(","):
        match = _RAW_STATE.match(word.strip())
        if match and match[1] in _STATES:
            return _STATES[match[1]], _REASONS.get(match[1])
    return "UNKNOWN", None


def is_known(words: str) -> bool:
    """Return True if Slurm's manual lists this state."""
    return state_of(words)[0] != "UNKNOWN" or words.startswith("RESIZING")


def failure_reason(words: str | None) -> str | None:
    """Return Slurm's Reason if it means a failure; None if it is a reason for waiting."""
    if words and (words in _FAILURE_REASONS or words.startswith("RaisedSignal")):
        return words
    return None


@lru_cache(maxsize=1024)
def exit_code_of(text: str) -> int | None:
    """Parse an exit code of the form `CODE:SIGNAL`.

    If a signal killed the job, the result is 128 plus the signal's number, as in bash and other
    shells. POSIX.1-2017, Shell Command Language 2.8.2, requires only more than 128.
    """
    if text in NEVER:
        return None
    match = _EXIT_CODE.match(text)
    if match is None:
        raise ValueError("expected an exit code and a signal, such as 1:0")
    code, signal = int(match[1]), int(match[2])
    return 128 + signal if signal else code


def elapsed_s(text: str) -> float | None:
    """Convert a duration of the form `[DAYS-][HOURS:]MINUTES:SECONDS`, or a number, to seconds."""
    if text in NEVER:
        return None
    if text.isdecimal():
        return float(text)
    match = _ELAPSED.match(text)
    if match is None:
        raise ValueError("expected seconds, or DAYS-HOURS:MINUTES:SECONDS such as 1-02:03:04")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def zone_of(text: str) -> tzinfo:
    """Parse a time zone: an IANA name (`Asia/Shanghai`), an offset (`+08:00`) or `UTC`.

    Raises:
        BadUse: the text is none of these.
    """
    if match := _OFFSET.match(text):
        offset = timedelta(hours=int(match[2]), minutes=int(match[3]))
        if offset < timedelta(hours=24):
            return timezone(-offset if match[1] == "-" else offset)
    if text in ("UTC", "Z"):
        return UTC
    try:
        return ZoneInfo(text)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadUse(
            f"{text!r} is no time zone. Give an offset such as +08:00, or a name such as "
            "Asia/Shanghai."
        ) from None


def check_time(text: str) -> None:
    """Raise ValueError unless the text is a time, a Unix time, or Slurm's text for no time."""
    if text in NEVER or (text.isascii() and text.isdecimal() and int(text) <= LAST_UNIX_S):
        return
    with suppress(ValueError):
        if _TIME.match(text):
            datetime.fromisoformat(text)
            return
    raise ValueError("expected a time such as 2023-03-01T00:18:22, or seconds since 1970")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources that a job holds or has requested."""

    gpu_num: float = 0.0
    gpu_model: str | None = None
    cpu_num: float | None = None
    mem_gb: float | None = None
    """Memory in GiB (2**30 bytes), which is Slurm's unit G."""
    node_num: int | None = None
    has_shares: bool = False
    """True if the job holds shards or MPS shares of GPUs, whose size is not recorded."""


_ACCELERATORS: Final = ("gpu", "dcu", "gaudi", "gcu", "hpu", "mlu", "neuron", "npu", "tpu", "xpu")
"""Names of generic resources that sites use for their accelerators."""


@lru_cache(maxsize=65536)
def resources_of(tres: str) -> Resources | None:
    """Parse a TRES text such as `billing=8,cpu=8,gres/gpu:a100=8,gres/gpu=8,mem=500G,node=1`.

    Returns:
        The resources; None for an empty text, which means that nothing was allocated.
    """
    if tres in NEVER:
        return None
    pairs = []
    for item in tres.split(","):
        name, equals, count = item.rpartition("=")
        if not equals:
            raise ValueError("expected resources such as cpu=8,gres/gpu=8,mem=500G,node=1")
        if name in ("cpu", "mem", "node") or name.startswith("gres/"):
            pairs.append((name, _amount(count)))
    return resources_of_pairs(pairs)


def resources_of_pairs(pairs: Iterable[tuple[str, float]]) -> Resources:
    """Convert pairs of name and amount to resources; the amount of `mem` is in bytes.

    `gres/gpu` counts all GPUs, including the GPUs of each type that `gres/gpu:TYPE` counts, so the
    two are never added. A MIG slice (a type such as `1g.5gb`) counts as its share of a GPU.
    Accelerators of other vendors, such as `gres/dcu`, count as GPUs.
    """
    amounts = dict(pairs)
    typed, gpu_num = dict[str, float](), 0.0
    for kind in _ACCELERATORS:
        start = f"gres/{kind}:"
        of_kind = {
            name.removeprefix(start): count
            for name, count in amounts.items()
            if name.startswith(start)
        }
        typed |= of_kind
        gpu_num += amounts.get(f"gres/{kind}", sum(of_kind.values()))
    slices = {kind: count for kind, count in typed.items() if is_slice(kind)}
    shares = sum(mig_share(kind) * count for kind, count in slices.items())
    mem = amounts.get("mem")
    node_num = amounts.get("node")
    return Resources(
        gpu_num=gpu_num - sum(slices.values()) + shares,
        gpu_model="+".join(sorted(typed)) or None,
        cpu_num=amounts.get("cpu"),
        mem_gb=None if mem is None else mem / _UNITS["G"],
        node_num=None if node_num is None else int(node_num),
        has_shares=any(amounts.get(name) for name in ("gres/shard", "gres/mps")),
    )


def _amount(text: str) -> float:
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"expected an amount such as 8 or 500G where there is {text!r}")
    return float(match[1]) * float(_UNITS[match[2].upper()])


@lru_cache(maxsize=65536)
def nodes_of(text: str) -> tuple[str, ...] | None:
    """Expand a node list such as `gpu[001-003,007],login1`; None if no nodes were assigned."""
    if text in NO_NODES:
        return None
    names: list[str] = []
    for part in _parts(text):
        names += _expanded(part)
        if len(names) > MAX_NODES:
            raise ValueError(f"expected at most {MAX_NODES} nodes")
    return tuple(names)


def _parts(text: str) -> list[str]:
    """Split a node list at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    if depth != 0:
        raise ValueError(
            "expected a list of nodes such as gpu[001-003,007] with every bracket closed"
        )
    return [part for part in (*parts, text[start:]) if part]


def _expanded(part: str) -> list[str]:
    """Expand one part of a node list, in which plain text and brackets of numbers alternate."""
    pieces: list[Sequence[str]] = []
    count = 1
    for index, piece in enumerate(re.split(r"\[([^\]]*)\]", part)):
        choices = [piece] if index % 2 == 0 else _numbers(piece)
        count *= len(choices)
        if count > MAX_NODES:
            raise ValueError(f"expected at most {MAX_NODES} nodes")
        pieces.append(choices)
    return ["".join(name) for name in itertools.product(*pieces)]


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        first, dash, last = item.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"expected numbers such as 001-003,007 where there is [{text}]")
        if dash and not 0 <= int(last) - int(first) < MAX_NODES:
            raise ValueError(
                f"expected a range of at most {MAX_NODES} nodes where there is [{text}]"
            )
        numbers += (
            [first]
            if not dash
            else [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
        )
    return numbers
