"""What a model may not do, whatever it answers: the checks that hold also where it obeys a line of the log.

- Each line it cites exists and contains what it quotes.
- Not all cited lines are ones that the rules know as teardown, or as survived.
- Where a rule is sure of what the root's line means, the model's reason is that rule's; and routine is no root.
- A reason that the rules name gives way only to one that a rule names of the line that the model cites, and where that
  line is not one that follows from failures.
- An action that stops the job for good needs a unanimous model and a line that reads as an error by itself; one that
  takes hardware out, that the rules thought of the same reason. On anything less the job is started again, which costs
  one attempt.
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

QUOTE_LEAST: Final = 8
"""Characters of a quote, where the line has so many: a single word is no citation."""
SURE: Final = 0.6
"""A rule's confidence from which on a model does not overrule what it says of a line."""
_AFTERMATH: Final = frozenset({"teardown", "recovered"})
_NO_ROOTS: Final = frozenset({ROUTINE, ENDING, "teardown"})
_FOLLOW: Final = OF_PEERS | {"exit", "suspect", "teardown", ROUTINE, ENDING}
"""Kinds of lines that follow from a failure more often than they begin one."""
_STATES_AN_ERROR: Final = re2.compile(r"^\S+: (?:fatal )?error: \S+ \S+")
"""argparse, compilers, shells."""
HELPS: Final[dict[Action, bool]] = {
    "restart": True,
    "wait_and_retry": True,
    "exclude_and_restart": True,
    "reset_gpu": True,
    "change_config": False,
    "user_must_fix": False,
}
"""Of each action, whether the job is started again."""
assert set(HELPS) == set(get_args(Action))


def cites_well(shown: Shown, number: int, quote: str) -> bool:
    """Whether line `number` contains the quote, and the quote is more than a word."""
    least = min(QUOTE_LEAST, len(shown.lines[number - 1].strip()))
    return len(quote.strip()) >= least and shown.has(number, quote)


def aftermath_only(cited: Iterable[Kept], diagnosis: Diagnosis) -> bool:
    """Whether the rules know all cited lines as what others did about the failure, or as survived."""
    role = {(one.file, one.line): one.role for one in diagnosis.evidence}
    return all(role.get((one.file, one.line)) in _AFTERMATH for one in cited)


def contradicted_by(reason: str, line: Kept, rules: RuleSet) -> Rule | None:
    """The rule that is sure of what `line` means, and it is not `reason`; None where there is none."""
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
    """Whether a rule, too, says `reason` of `line`, and such a line can begin a failure."""
    text = cleaned(line).text
    where: Where = "library_exception" if is_exception(text) else "line"
    found = rules.find(text, where)
    return found is not None and found[0].reason == reason and found[0].kind not in _FOLLOW


def _names_a_cause(rule: Rule) -> bool:
    """Others than these say only that something failed: for an exception that nobody listed, whose code it was."""
    return rule.reason != "Unknown" and not (rule.reason == "Others" and rule.where != "line")


def category_of(reason: str, said: Category) -> Category:
    """The category of Table 3; what the model says counts only for what has no row there."""
    return said if reason == "Others" else CATEGORIES[reason]


def safe_action(
    action: Action,
    reason: str,
    category: Category,
    roots: Sequence[Kept],
    *,
    unanimous: bool,
    considered: Collection[str],
) -> Action:
    """`action`, or `restart` where nothing but a model's word carries it.

    `considered` are the reasons that the rules thought of.
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
    """A kept line with its prefixes parted."""
    return clean_line(line.text.encode("utf-8", "replace"), line.line)


def _states_an_error(text: str) -> bool:
    named = is_exception(text.lstrip()) and len(text.partition(":")[2].split()) > 1
    return named or _STATES_AN_ERROR.search(text) is not None
