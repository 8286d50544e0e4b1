"""Answer as people do without a tool: first error line, last error line, list of patterns.

Each baseline names a line. `reason_of` names the reason of a line, for all baselines and for the
restart agent's line. A restart helps if the reason's category is Infrastructure. The rank is the
one in the line.
"""

# ruff: noqa: E501  (a pattern stands on one line)

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from diagnosing.scoring import Answer
from holdfast.diagnose.rules.taxonomy import CATEGORIES

ERROR: Final = re.compile(
    r"\b(?:\w*Error|\w*Exception|error|ERROR|FATAL|fatal|Fatal)\b|Xid|[Ff]ailed|[Kk]illed|oom-kill|timed out|NCCL WARN"
    r"|<warn>"
)
_OF_A_STACK: Final = re.compile(r"Traceback \(most recent call last\)|frame #\d+:")
"""Lines of a stack belong to an error but do not state it; another line does."""

PRIORITIES: Final[tuple[tuple[str, "re.Pattern[str]"], ...]] = tuple(
    (reason, re.compile(pattern))
    for reason, pattern in (
        ("ECCError", r"(?i)uncorrectable ECC|double.bit ECC|Xid.{0,40}: (?:48|63|64|94|95)\b"),
        ("NVLinkError", r"(?i)NVLink.{0,40}(?:error|fault|fail|down)|Xid.{0,40}: (?:74|14[4-9]|150)\b|SXid"),
        ("NodeFailure", r"(?i)fallen off the bus|node fail|NODE_FAIL|NodeNotReady|machine check|Xid.{0,40}: 79\b"),
        ("DataloaderKilled", r"DataLoader worker \(pid.{0,30}(?:killed|exited|is killed)"),
        ("OutOfMemoryError", r"(?i)out of memory|OutOfMemory|oom.?kill|MemoryError|can't allocate memory"),
        ("NetworkError", r"(?i)IBV_WC|status=12|local protection|no route to host|network is unreachable|name resolution|\befa\b|libfabric"),
        ("S3StorageError", r"(?i)\bs3\b|botocore|NoSuchKey|AccessDenied|SlowDown"),
        ("ModelLoadingError", r"(?i)size mismatch|Missing key\(s\) in state_dict|Error\(s\) in loading|safetensors"),
        ("DatasetLoadingError", r"(?i)DatasetGenerationError|DatasetNotFound|ArrowInvalid|datasets\.exceptions"),
        ("CUDAError", r"CUDA error|CUDAError|CUDA_ERROR|cudaError|cudaGetDevice|CUBLAS_STATUS|CUDNN_STATUS|Xid"),
        ("NCCLRemoteError", r"(?i)ncclRemoteError|remote process exited|closed by remote|Connection closed by (?:remote )?peer"),
        ("NCCLTimeoutError", r"(?i)watchdog caught collective|collective operation timeout|NCCL operations have failed or timed out|Timed out waiting \d+ms"),
        ("ConnectionError", r"(?i)connection (?:refused|reset|aborted|error)|failed to connect|broken pipe|DistStoreError|DistNetworkError"),
        ("SyntaxError", r"SyntaxError|IndentationError|TabError|syntax error"),
        ("ImportError", r"ImportError|ModuleNotFoundError|cannot open shared object"),
        ("ArgumentError", r"(?i)unrecognized arguments|invalid choice|no such option|argparse|the following arguments are required"),
        ("CalledProcessError", r"CalledProcessError|returned non-zero exit status"),
        ("FileNotFoundError", r"(?i)FileNotFoundError|no such file or directory"),
        ("PermissionError", r"(?i)PermissionError|permission denied"),
        ("ZeroDivisionError", r"ZeroDivisionError|division by zero"),
        ("AssertionError", r"AssertionError"),
        ("AttributeError", r"AttributeError"),
        ("KeyError", r"KeyError"),
        ("IndexError", r"IndexError"),
        ("NameError", r"NameError|UnboundLocalError"),
        ("TypeError", r"TypeError"),
        ("ValueError", r"ValueError"),
        ("OSError", r"OSError|IOError|(?i:no space left|read-only file system|too many open files|address already in use)"),
        ("RuntimeError", r"RuntimeError"),
        ("Others", r"(?i)preempt|time limit|SIGKILL|SIGTERM|scancel"),
    )
)  # fmt: skip
"""The patterns, most specific first, from Table 3's names and from usual searches in the field."""

_RANK: Final = re.compile(r"(?i)\b(?:rank|default)[\s:=]{0,2}(\d+)\b")


def reason_of(line: str) -> str:
    """Return the reason of a line: the first pattern of the list that matches."""
    return next((reason for reason, pattern in PRIORITIES if pattern.search(line)), "Unknown")


def first_error_line(path: Path) -> Answer:
    """Answer with the first line that looks like an error."""
    return _answer(next(_errors(path), None))


def last_error_line(path: Path) -> Answer:
    """Answer with the last line that looks like an error."""
    last = None
    for last in _errors(path):  # noqa: B007
        pass
    return _answer(last)


def priority_list(path: Path) -> Answer:
    """Answer with the first line of the most specific pattern that matches any line."""
    best: tuple[int, int, str] | None = None
    for number, line in _lines(path):
        for place, (_, pattern) in enumerate(PRIORITIES if best is None else PRIORITIES[: best[0]]):
            if pattern.search(line):
                best = (place, number, line)
                break
    return _answer(None if best is None else best[1:])


BASELINES: Final[dict[str, Callable[[Path], Answer]]] = {
    "first error line": first_error_line,
    "last error line": last_error_line,
    "priority list": priority_list,
}


def answer_of_line(number: int, line: str, **known: Any) -> Answer:
    """Return the answer of a system that has found one line and nothing else."""
    reason, rank = reason_of(line), _RANK.search(line)
    helps = CATEGORIES[reason] == "Infrastructure"
    given = {
        "scope": {"rank": int(rank[1])} if rank else {},
        "restart_helps": helps,
        "decided_by": "line",
        **known,
    }
    return Answer(
        reason=reason, root_lines=(number,), action="restart" if helps else "user_must_fix", **given
    )


def _answer(found: tuple[int, str] | None) -> Answer:
    if found is None:
        return Answer(reason="Unknown", restart_helps=True, action="restart")
    return answer_of_line(*found)


def _errors(path: Path) -> Iterator[tuple[int, str]]:
    return (
        (number, line)
        for number, line in _lines(path)
        if ERROR.search(line) and not _OF_A_STACK.search(line)
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from enumerate(file, 1)
