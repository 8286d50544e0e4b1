"""Check a model's answers, so that a model does no harm even if it obeys orders in the log.

* Each cited line exists and contains its quote.
* At least one cited line is neither teardown nor a survived error, according to the rules.
* If a rule is sure of the meaning of the root's line, the model must give the reason of the rule.
* The line of the root is no routine line.
* The model's reason replaces a reason from the rules only if a rule gives the cited line the same
  reason. The kind of this line must not be one that usually follows from other failures.
* An action that ends the job for good is allowed only if all votes agree and a cited line states an
  error.
* An action that excludes hardware is allowed only if all votes agree and the rules considered the
  same reason.

If an action is not allowed, the job is restarted instead, which costs at most one attempt.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Final, get_args

import re2

from holdfast.diagnose.agents.untrusted import Shown
from holdfast.diagnose.explain.compress import Kept
from holdfast.diagnose.explain.diagnosis import Diagnosis
from holdfast.diagnose.explain.explain import OF_PEERS
from holdfast.diagnose.logs.lines import Line, clean_line
from holdfast.diagnose.logs.tracebacks import is_exception
from holdfast.diagnose.rules.rules import ENDING, ROUTINE, Rule, RuleSet, Where
from holdfast.diagnose.rules.taxonomy import CATEGORIES, Action, Category

MIN_QUOTE_LENGTH: Final = 8
"""The least number of characters of a quote, unless the line is shorter. A single word is not
enough for a citation.
"""
SURE: Final = 0.6
"""A rule with at least this confidence about a line cannot be overruled by a model."""
_AFTERMATH: Final = frozenset({"teardown", "recovered"})
_NO_ROOTS: Final = frozenset({ROUTINE, ENDING, "teardown"})
_FOLLOW: Final = OF_PEERS | {"exit", "suspect", "teardown", ROUTINE, ENDING}
"""Kinds of lines that follow from a failure more often than they begin one."""
_STATES_AN_ERROR: Final = re2.compile(r"^\S+: (?:fatal )?error: \S+ \S+")
"""Matches errors in the form that argparse, compilers and shells use."""
HELPS: Final[dict[Action, bool]] = {
    "restart": True,
    "wait_and_retry": True,
    "exclude_and_restart": True,
    "reset_gpu": True,
    "change_config": False,
    "user_must_fix": False,
}
"""For each action, True if the job is started again."""
assert set(HELPS) == set(get_args(Action))


def cites_well(shown: Shown, number: int, quote: str) -> bool:
    """Return True if line `number` contains the quote, and the quote is longer than a word."""
    least = min(MIN_QUOTE_LENGTH, len(shown.lines[number - 1].strip()))
    return len(quote.strip()) >= least and shown.has(number, quote)


def aftermath_only(cited: Iterable[Kept], diagnosis: Diagnosis) -> bool:
    """Return True if the rules class all cited lines as teardown or as survived."""
    role = {(one.file, one.line): one.role for one in diagnosis.evidence}
    return all(role.get((one.file, one.line)) in _AFTERMATH for one in cited)


def contradicted_by(reason: str, line: Kept, rules: RuleSet) -> Rule | None:
    """Return a rule that is sure that `line` has another reason than `reason`, or None."""
    wheres: tuple[Where, ...] = ("line",)
    text = cleaned(line).text
    if is_exception(text):
        wheres = ("user_exception", "library_exception")
    found = [known[0] for where in wheres if (known := rules.find(text, where)) is not None]
    sure = [
        rule
        for rule in found
        if rule.kind in _NO_ROOTS or (rule.confidence >= SURE and _names_a_cause(rule))
    ]
    allowed = any(rule.reason == reason and rule.kind not in _NO_ROOTS for rule in sure)
    return sure[0] if sure and not allowed else None


def rule_agrees(reason: str, line: Kept, rules: RuleSet) -> bool:
    """Return True if a rule gives `line` the reason `reason`, and the line can begin a failure."""
    text = cleaned(line).text
    where: Where = "library_exception" if is_exception(text) else "line"
    found = rules.find(text, where)
    return found is not None and found[0].reason == reason and found[0].kind not in _FOLLOW


def _names_a_cause(rule: Rule) -> bool:
    """Return True if the rule names a cause, instead of matching any unlisted exception."""
    return rule.reason != "Unknown" and not (rule.reason == "Others" and rule.where != "line")


def category_of(reason: str, stated: Category) -> Category:
    """Return the category of `reason` in Table 3; for the reason `Others`, the category `stated`."""
    return stated if reason == "Others" else CATEGORIES[reason]


def safe_action(
    action: Action,
    reason: str,
    category: Category,
    roots: Sequence[Kept],
    *,
    unanimous: bool,
    considered: Collection[str],
) -> Action:
    """Return `action` if the evidence supports it, else `restart`.

    Args:
        action: the action that the model advises.
        reason: the reason that the model gives.
        category: the category of the reason.
        roots: the lines that the model cites as the root.
        unanimous: True if all votes agree on reason and action.
        considered: the reasons in the diagnosis of the rules, including its alternatives.
    """
    if action in ("restart", "wait_and_retry"):
        return action
    if action in ("user_must_fix", "change_config"):
        carried = category != "Infrastructure" and any(
            _states_an_error(cleaned(one).text) for one in roots
        )
    else:
        carried = reason in considered
    return action if carried and unanimous else "restart"


def cleaned(line: Kept) -> Line:
    """Convert a line of the compressed log to a cleaned line without prefixes."""
    return clean_line(line.text.encode("utf-8", "replace"), line.line)


def _states_an_error(text: str) -> bool:
    named = is_exception(text.lstrip()) and len(text.partition(":")[2].split()) > 1
    return named or _STATES_AN_ERROR.search(text) is not None
