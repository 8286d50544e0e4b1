"""Find the cause of a failure and an action by several votes of a model on the compressed log.

Each vote is an independent answer to the same prompt, and cites lines of the log. A vote is dropped
if the vote is malformed, cites a line that does not exist, quotes text that the line does not
contain, or contradicts the rules. A finding needs more than half of all requested votes for the
same reason.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

from holdfast.diagnose.agents import checks
from holdfast.diagnose.agents.answers import (
    Malformed,
    choice_field,
    json_object,
    line_number,
    list_field,
    text_field,
    with_fields,
)
from holdfast.diagnose.agents.endpoint import Endpoint, Prompt
from holdfast.diagnose.agents.prompts import FAILURE_INSTRUCTIONS
from holdfast.diagnose.agents.proposal import PATTERN_CHARACTERS, RuleIdea
from holdfast.diagnose.agents.untrusted import Draw, Shown, draw_mark, fenced, sentence, show
from holdfast.diagnose.explain.compress import Compressed, Kept
from holdfast.diagnose.explain.diagnosis import Diagnosis
from holdfast.diagnose.rules.rules import RuleSet
from holdfast.diagnose.rules.taxonomy import CATEGORIES, Action, Category

SAMPLES: Final = 3
TEMPERATURE: Final = 0.7
"""The sampling temperature. It is above 0, since several votes are informative only if they can
differ.
"""
_CITED_LIMIT: Final = 5
_ROOTS_LIMIT: Final = 3
_INCIDENTS: Final = 3
_INCIDENT_CHARACTERS: Final = 600
_QUERIES: Final = 32
"""The largest number of log lines for which the memory is searched."""
_FIELDS: Final = ("cause", "reason", "category", "action", "mitigation", "cited", "rule")

Similar = Callable[[str], Sequence[Mapping[str, Any]]]
"""A search in the memory. The argument is the text of a root's line; the result is past incidents
with a similar root, each with its `similarity` (0 to 1)."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One answer of the model that passed all checks."""

    reason: str
    category: Category
    action: Action
    cause: str
    mitigation: str
    cited: tuple[Kept, ...]
    rule: RuleIdea | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result on which more than half of the votes agree."""

    reason: str
    category: Category
    advised: Action
    """The action that the votes advise."""
    action: Action
    """The action that is allowed if only the votes support it (`checks.safe_action`)."""
    cause: str
    mitigation: str
    roots: tuple[Kept, ...]
    """The first cited line of each vote, without repetitions; the lines with the most votes come
    first.
    """
    agreement: float
    """The share of all requested votes that have this reason; above 0.5."""
    others: tuple[tuple[str, float], ...]
    """Other reasons in the votes, with their shares."""
    rule: RuleIdea | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A finding or None, and a sentence for each problem that occurred."""

    finding: Finding | None
    notes: tuple[str, ...] = ()


def find_cause(
    diagnosis: Diagnosis,
    compressed: Compressed,
    endpoint: Endpoint,
    rules: RuleSet,
    *,
    similar: Similar | None = None,
    samples: int = SAMPLES,
    draw: Draw = draw_mark,
) -> Outcome:
    """Collect votes of the model on the cause of a failure.

    Args:
        diagnosis: the rules' answer.
        compressed: the compressed log.
        endpoint: the model.
        rules: the rules that check the votes.
        similar: a function that finds past incidents with a root like a given text.
        samples: the number of votes.
        draw: returns random marks, which are put around outside text in prompts.
    """
    shown = show((_described(one, diagnosis) for one in compressed.lines), endpoint.known_secrets)
    kept = compressed.lines[: len(shown.lines)]
    data = fenced("The log", shown.lines, draw())
    if past := show(_incidents(similar, diagnosis, kept), endpoint.known_secrets).lines:
        data += fenced("Past incidents", past, draw())
    data += _considered(diagnosis)
    prompt = Prompt(instructions=FAILURE_INSTRUCTIONS, data=data)
    votes: list[Vote] = []
    problems: list[str] = []
    for reply in endpoint.ask([prompt] * samples, temperature=TEMPERATURE):
        if reply.failed:
            problems.append(reply.failed)
            continue
        try:
            vote = _vote(reply.text, shown, kept)
            _check(vote, diagnosis, rules)
        except Malformed as error:
            problems.append(f"An answer of the model {endpoint.model} was dropped: {error}.")
        else:
            votes.append(vote)
    notes = [f"{problem} ({count} of {samples})" for problem, count in Counter(problems).items()]
    if shown.withheld:
        notes.append(
            f"{shown.withheld} lines that look like instructions were not shown to the model."
        )
    considered = {diagnosis.reason, *(one.reason for one in diagnosis.alternatives)}
    return Outcome(finding=_agreed(votes, samples, considered), notes=tuple(notes))


def _described(line: Kept, diagnosis: Diagnosis) -> str:
    roles = {(one.file, one.line): one.role for one in diagnosis.evidence}
    role = roles.get((line.file, line.line))
    known = [str(role)] if role in ("recovered", "teardown") else []
    known += [f"seen {line.count} times"] if line.count > 1 else []
    return f"({', '.join(known)}) {line.text}" if known else line.text


def _incidents(similar: Similar | None, diagnosis: Diagnosis, kept: Sequence[Kept]) -> list[str]:
    """Return the past incidents whose roots are most similar to lines that could be the root.

    The search is local: no text is sent anywhere.
    """
    if similar is None:
        return []
    queries = [
        diagnosis.root_text.strip(),
        *(checks.cleaned(one).text.strip() for one in kept[:_QUERIES]),
    ]
    every = [one for text in dict.fromkeys(queries) if text for one in similar(text)]
    every.sort(key=lambda one: -float(one.get("similarity", 0.0)))
    lines = (
        "; ".join(f"{name}: {value}" for name, value in one.items())[:_INCIDENT_CHARACTERS]
        for one in every
    )
    return list(dict.fromkeys(lines))[:_INCIDENTS]


def _considered(diagnosis: Diagnosis) -> str:
    named = [
        (diagnosis.reason, diagnosis.confidence),
        *((one.reason, one.confidence) for one in diagnosis.alternatives),
    ]
    listed = ", ".join(
        f"{reason} ({confidence:.2f})" for reason, confidence in named if reason != "Unknown"
    )
    return f"The rules considered: {listed}.\n" if listed else "No rule recognises the cause.\n"


def _vote(text: str, shown: Shown, kept: Sequence[Kept]) -> Vote:
    given = with_fields(json_object(text), _FIELDS)
    reason = choice_field(given, "reason", CATEGORIES)
    category = cast("Category", choice_field(given, "category", get_args(Category)))
    cited = [_cited(one, shown, kept) for one in list_field(given, "cited", most=_CITED_LIMIT)]
    if not cited and reason != "Unknown":
        raise Malformed("it cites no line")
    return Vote(
        reason=reason,
        category=checks.category_of(reason, category),
        action=cast("Action", choice_field(given, "action", get_args(Action))),
        cause=sentence(text_field(given, "cause", most=1000), 300),
        mitigation=sentence(text_field(given, "mitigation", most=1500), 400),
        cited=tuple(dict.fromkeys(cited)),
        rule=_rule_idea(given["rule"]),
    )


def _cited(given: Any, shown: Shown, kept: Sequence[Kept]) -> Kept:
    fields = with_fields(given, ("line", "quote"))
    number = line_number(fields["line"], len(shown.lines))
    if not checks.cites_well(shown, number, text_field(fields, "quote", most=1000)):
        raise Malformed("it quotes what the line does not contain")
    return kept[number - 1]


def _rule_idea(given: Any) -> RuleIdea | None:
    if given is None:
        return None
    fields = with_fields(given, ("pattern", "match", "no_match"))
    for name, least in (("match", 1), ("no_match", 1)):
        if not all(
            isinstance(one, str) and one.strip()
            for one in list_field(fields, name, most=5, least=least)
        ):
            raise Malformed(f"{name} of its rule has no lines")
    pattern = text_field(fields, "pattern", most=PATTERN_CHARACTERS)
    return RuleIdea(
        pattern=pattern, match=tuple(fields["match"]), no_match=tuple(fields["no_match"])
    )


def _check(vote: Vote, diagnosis: Diagnosis, rules: RuleSet) -> None:
    if vote.reason == "Unknown":
        return
    if checks.aftermath_only(vote.cited, diagnosis):
        raise Malformed("it names a consequence of the failure as the cause")
    if rule := checks.contradicted_by(vote.reason, vote.cited[0], rules):
        raise Malformed(
            f"it says {vote.reason} for a line that the rule {rule.id} recognises as another cause"
        )


def _agreed(votes: Sequence[Vote], samples: int, considered: Collection[str]) -> Finding | None:
    counts = Counter(one.reason for one in votes)
    reason, count = counts.most_common(1)[0] if counts else ("Unknown", 0)
    if 2 * count <= samples or reason == "Unknown":
        return None
    agreeing = [one for one in votes if one.reason == reason]
    # If two actions are equally frequent, the milder one is chosen, which comes earlier in `HELPS`.
    advised = max(checks.HELPS, key=lambda action: sum(one.action == action for one in agreeing))
    chosen = next(one for one in agreeing if one.action == advised)
    unanimous = (
        all(one.reason == reason and one.action == advised for one in votes)
        and len(votes) == samples > 1
    )
    roots = _roots(agreeing)
    return Finding(
        reason=reason,
        category=chosen.category,
        advised=advised,
        action=checks.safe_action(
            advised, reason, chosen.category, roots, unanimous=unanimous, considered=considered
        ),
        cause=chosen.cause,
        mitigation=chosen.mitigation,
        roots=roots,
        agreement=count / samples,
        others=tuple(
            (other, number / samples) for other, number in counts.most_common() if other != reason
        ),
        rule=next((one.rule for one in agreeing if one.rule is not None), None),
    )


def _roots(votes: Iterable[Vote]) -> tuple[Kept, ...]:
    first = Counter(one.cited[0] for one in votes)
    ranked = sorted(first, key=lambda line: (-first[line], line.file, line.line))
    return tuple(ranked[:_ROOTS_LIMIT])
