"""Complete learned rules by the usual kind, action and category of their reason."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, get_args

import re2

from holdfast.diagnose.rules.rules import ENDING, ROUTINE, Rule
from holdfast.diagnose.rules.taxonomy import CATEGORIES, Action, Category

_WEAK: Final = frozenset({ROUTINE, ENDING, "suspect", "exit", "teardown"})
"""Kinds of events that are no evidence of how a failure began."""
_HOST: Final = re2.compile(
    r"(?i)oom[_-]?kill|out of memory: kill|cgroup|slurmstepd|\btask \d+: out of memory|signal(?:led)?: ?9"
    r"|exit(?:ed)?(?: code)? 137"
)
_FROM_OUTSIDE: Final = re2.compile(r"(?i)sig(?:kill|term)|signal \d|killed|exitcode\s*: -")


@dataclass(frozen=True, slots=True)
class Profile:
    """The fields of a rule besides its pattern and its reason."""

    kind: str
    action: Action
    restart_helps: bool
    category: Category


_SCRIPT: Final = ("exception", "user_must_fix")
_USUAL: Final[dict[str, tuple[str, str]]] = {
    "NVLinkError": ("gpu_link", "exclude_and_restart"),
    "CUDAError": ("cuda_error", "restart"),
    "NodeFailure": ("node", "exclude_and_restart"),
    "ECCError": ("gpu_memory", "exclude_and_restart"),
    "NetworkError": ("fabric", "restart"),
    "ConnectionError": ("service", "wait_and_retry"),
    "S3StorageError": ("service", "wait_and_retry"),
    "NCCLTimeoutError": ("collective_timeout", "restart"),
    "NCCLRemoteError": ("peer_lost", "restart"),
    "DataloaderKilled": ("worker_lost", "restart"),
    "OutOfMemoryError": ("device_memory", "change_config"),
    "OSError": ("disk", "restart"),
    "Others": ("scheduler", "restart"),
    "Unknown": ("suspect", "restart"),
}
"""The usual kind and action of each reason that is not a mistake in the script. For all other
reasons, `_SCRIPT` applies."""

NAMED: Final[dict[str, frozenset[str]]] = {
    reason: frozenset(words.split())
    for reason, words in {
        "NVLinkError": "nvlink nvswitch",
        "CUDAError": "cuda cublas cudnn",
        "NodeFailure": "node",
        "ECCError": "ecc",
        "NetworkError": "network",
        "ConnectionError": "connection",
        "S3StorageError": "s3 bucket",
        "NCCLTimeoutError": "nccl collective",
        "NCCLRemoteError": "nccl remote peer",
        "DataloaderKilled": "dataloader",
        "OutOfMemoryError": "memory oom",
        "ModelLoadingError": "model state_dict checkpoint weights",
        "DatasetLoadingError": "dataset datasets",
        "FileNotFoundError": "file directory",
        "PermissionError": "permission",
        "ImportError": "import module",
        "ArgumentError": "argument arguments option",
        "CalledProcessError": "command",
        "SyntaxError": "syntax",
    }.items()
}
"""The words that logs use for the subject of each reason."""
NAMES: Final = frozenset(
    {"nvlink", "nvswitch", "cuda", "cublas", "cudnn", "ecc", "s3", "dataloader", "oom"}
)
"""The subset of these words that are names. A single name is informative if it stands with a word
that reports a problem.
"""


def profile_of(
    reason: str, roots: Iterable[str], before: Rule | None, rules: Iterable[Rule], action: str = ""
) -> Profile:
    """Return the remaining fields of a rule that is learned for `reason`.

    The kind of the rule is the first of these that exists:

    1. the kind of the rule `before`, if this rule has the same reason and its kind is evidence
    2. the usual kind of the reason, adapted to the words of the root lines, if `_USUAL` has the
       reason or no other rule does
    3. the most frequent kind of other rules with this reason, unless the kind of `before` is evidence
    4. the usual kind of a mistake in the script

    Args:
        reason: the reason of the new rule.
        roots: the lines from which the rule is learned.
        before: the rule that matched these lines until now; None if no rule did.
        rules: the rules in force.
        action: the action that a person chose; empty if nobody did.
    """
    same = [rule for rule in rules if rule.reason == reason and rule.kind not in _WEAK]
    kind, usual = _USUAL.get(reason, _SCRIPT)
    if reason in _USUAL or not same:
        kind = _of_the_line(reason, kind, roots)
    elif before is None or before.kind in _WEAK:
        kind = Counter(rule.kind for rule in same).most_common(1)[0][0]
    if before is not None and before.kind not in _WEAK and before.reason == reason:
        kind = before.kind
    if same and not action:
        usual = Counter(rule.action for rule in same).most_common(1)[0][0]
    decided: Action = next(one for one in get_args(Action) if one == (action or usual))
    category = CATEGORIES[reason]
    if reason == "Others":
        category = (
            before.category if before is not None and before.reason == reason else "Infrastructure"
        )
    return Profile(kind, decided, decided not in ("user_must_fix", "change_config"), category)


def _of_the_line(reason: str, kind: str, roots: Iterable[str]) -> str:
    text = " ".join(roots)
    if reason == "OutOfMemoryError" and _HOST.search(text):
        return "host_memory"
    if reason == "Others" and _FROM_OUTSIDE.search(text):
        return "death"
    if reason in ("ConnectionError", "OSError") and re2.search(
        r"(?:^|\.)\w*(?:Error|Exception)\b", text
    ):
        return "exception"
    return kind
