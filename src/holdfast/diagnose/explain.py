"""Events to a diagnosis: which line states the root, what followed from it, what was survived."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from holdfast.diagnose.diagnosis import Alternative, Diagnosis, Evidence, LogLine, Role, mask_varying
from holdfast.diagnose.scan import Event
from holdfast.diagnose.tracebacks import is_exception

ROOT_LINES: Final = 3
_EVIDENCE_LIMITS: Final[dict[Role, int]] = {"root": ROOT_LINES, "cascade": 6, "recovered": 4, "teardown": 4}
_SCOPE_LIMIT: Final = 64

# Weights of the choice among unsurvived events, on the scale of `Rule.depth`.
_HARDWARE_DEPTH: Final = 70
"""From here on an event stands outside any one rank's fate: another rank's death says nothing against it."""
_AFTER_A_DEATH: Final = 40
"""An error of another rank than the one that something killed first came after that death."""
_AFTER_A_SILENT_END: Final = 15
"""A lost peer, reported by another rank than the one that ended first and said nothing."""
_BARE_EXCEPTION: Final = 5
"""A line that looks like an exception but ends no traceback may have been logged and handled."""
_FIRST_TO_END: Final = 3
"""Little: two ranks' exits a few milliseconds apart may be seen in either order."""
_PLACEHOLDER_DEPTH: Final = 10
"""Rules below only say that a rank ended."""
_POSSIBLE_SCORE: Final = 25
"""Below, an event is explained by the root and no alternative to it: deaths, lost peers."""
_CLOSE: Final = 5
"""Scores nearer than this leave the answer in doubt."""

_UNKNOWN: Final = (
    "No line of the logs states a cause that is known. Read the end of the log of the rank that ended first;"
    " if the failure comes back at the same step, a restart does not mend it."
)


@dataclass(frozen=True)
class _FirstEnd:
    """The rank that ended first, as far as someone saw it."""

    rank: int | None
    certain: bool
    """Something that no peer can cause ended it."""
    silent: bool = False
    """Nothing in its own log says why: then what its peers say of a lost connection follows from its end."""
    rule_id: str = ""


def explain(events: Sequence[Event], observed: Sequence[Event] = ()) -> Diagnosis:
    """Choose the root among `events` (from files) and `observed` (told by the supervisor, in no file).

    The order of files and of lines of different ranks does not matter: the choice goes by what can cause what
    (`Rule.depth`), by who died first, and by what was followed by progress.
    """
    told = {(event.rule.id, _rank(event)) for event in events}
    everything = [*events, *(event for event in observed if (event.rule.id, _rank(event)) not in told)]
    first = _first_end(everything)
    terminal = [
        event
        for event in everything
        if event.rule.role in ("root", "cascade") and not event.recovered and not event.demoted
    ]
    ranked = sorted(terminal, key=lambda event: _order(event, first))
    root = ranked[0] if ranked else None
    doubt = 1.0
    if root is not None and root.rule.depth < _PLACEHOLDER_DEPTH:
        buffered = _survived_only_in_print(everything, first)
        if buffered is not None:
            root, doubt = buffered, 0.7
    if root is None:
        return Diagnosis(
            reason="Unknown",
            category="Unknown",
            evidence=_evidence(everything, ()),
            action="restart",
            restart_helps=True,
            mitigation=_UNKNOWN,
            confidence=0.2,
        )
    return _diagnosis(root, ranked, everything, first, doubt)


def _diagnosis(
    root: Event, ranked: Sequence[Event], everything: Sequence[Event], first: _FirstEnd, doubt: float
) -> Diagnosis:
    same = [root] + [event for event in ranked if event is not root and event.rule.reason == root.rule.reason]
    same = [event for event in same if event.rule.role == root.rule.role]
    stating = [event for event in same if event.line > 0][:ROOT_LINES]
    if root.line == 0:
        stating = []  # the supervisor's word; what logs say of the same reason is another matter
    others = _alternatives(root, ranked, first)
    if others and _score(root, first) - _score(others[0], first) < _CLOSE:
        doubt *= 0.85
    decided_by = [root.rule.id]
    if first.rank is not None and first.rank == _rank(root) and first.rule_id != root.rule.id:
        decided_by.append(first.rule_id)
    lines = tuple(LogLine(file=event.file, line=event.line, text=event.cited) for event in stating)
    return Diagnosis(
        reason=root.rule.reason,
        category=root.rule.category,
        root_line=lines[0] if lines else None,
        root_lines=lines,
        evidence=_evidence(everything, stating),
        scope=_scope(root, same, everything),
        action=root.rule.action,
        restart_helps=root.rule.restart_helps,
        mitigation=root.rule.mitigation,
        confidence=min(0.99, root.rule.confidence * doubt * (0.9 if _is_bare(root) else 1.0)),
        alternatives=tuple(
            Alternative(
                reason=event.rule.reason,
                confidence=round(event.rule.confidence * 0.4, 3),
                decided_by=event.rule.id,
            )
            for event in others
        ),
        decided_by=tuple(decided_by),
        root_text=root.text.strip(),
    )


def _order(event: Event, first: _FirstEnd) -> tuple[float, float, int, str, int]:
    # By name and number at last: any order of the files gives the same. Cited lines go before a bare word.
    return (-_score(event, first), -event.rule.confidence, int(event.line == 0), event.file, event.line)


def _score(event: Event, first: _FirstEnd) -> float:
    score = float(event.rule.depth)
    rank = _rank(event)
    if first.rank is not None and rank is not None:
        if rank == first.rank:
            score += _FIRST_TO_END
        elif first.silent and event.rule.role == "cascade":
            score -= _AFTER_A_SILENT_END
        elif first.certain and event.rule.depth < _HARDWARE_DEPTH:
            score -= _AFTER_A_DEATH
    if _is_bare(event):
        score -= _BARE_EXCEPTION
    return score


def _is_bare(event: Event) -> bool:
    return not event.whole_traceback and event.rule.id != "python-syntax-error" and is_exception(event.text)


def _rank(event: Event) -> int | None:
    return int(event.captures["rank"]) if "rank" in event.captures else event.rank


def _first_end(events: Sequence[Event]) -> _FirstEnd:
    seen = [
        _FirstEnd(rank=rank, certain=event.rule.first_death, rule_id=event.rule.id)
        for event in events
        if "pid" in event.captures and (rank := _rank(event)) is not None and event.rule.role == "root"
    ]
    first = max(seen, key=lambda one: (one.certain, -(one.rank or 0)), default=_FirstEnd(rank=None, certain=False))
    said = any(_rank(event) == first.rank and "pid" not in event.captures for event in events)
    return replace(first, silent=not said)


def _survived_only_in_print(events: Iterable[Event], first: _FirstEnd) -> Event | None:
    """The last traceback of the rank that ended first, though steps are printed below it.

    A program that does not flush its output prints its traceback first and the buffered steps on leaving.
    """
    causes = [event for event in events if event.rule.role == "root" and not event.demoted]
    own = [event for event in causes if event.whole_traceback and _rank(event) == first.rank]
    return max(own, key=lambda event: event.line, default=None)


def _alternatives(root: Event, ranked: Iterable[Event], first: _FirstEnd) -> list[Event]:
    others: dict[str, Event] = {}
    for event in ranked:
        possible = event.rule.role == "root" and _score(event, first) >= _POSSIBLE_SCORE
        if possible and event.rule.reason != root.rule.reason:
            others.setdefault(event.rule.reason, event)
    return list(others.values())[:3]


def _evidence(events: Sequence[Event], stating: Sequence[Event]) -> tuple[Evidence, ...]:
    by_role: dict[Role, list[Evidence]] = {role: [] for role in _EVIDENCE_LIMITS}
    cited = {(event.file, event.line) for event in stating}
    rest = [event for event in events if event.line > 0 and (event.file, event.line) not in cited]
    for event in [*stating, *sorted(rest, key=lambda one: (-one.rule.depth, one.file, one.line))]:
        role: Role = "cascade"
        if (event.file, event.line) in cited:
            role = "root"
        elif event.rule.role == "teardown":
            role = "teardown"
        elif event.recovered:
            role = "recovered"
        if len(by_role[role]) < _EVIDENCE_LIMITS[role]:
            by_role[role].append(Evidence(file=event.file, line=event.line, text=event.cited, role=role))
    return tuple(one for group in by_role.values() for one in group)


def _scope(root: Event, same: Sequence[Event], everything: Sequence[Event]) -> dict[str, Any]:
    ranks_by_pid = {
        event.captures["pid"]: int(event.captures["rank"])
        for event in everything
        if {"pid", "rank"} <= event.captures.keys()
    }
    text = mask_varying(root.text)
    alike = [event for event in same if event.rule is root.rule and mask_varying(event.text) == text]
    found: dict[str, set[Any]] = {name: set() for name in ("rank", "local_rank", "node", "gpu", "link")}
    for event in alike:
        captures = event.captures
        # Who reports that a peer is lost is not the rank at fault.
        rank = None if event.rule.role == "cascade" and "rank" not in captures else _rank(event)
        if rank is None:
            rank = ranks_by_pid.get(captures.get("pid", ""))
        found["rank"].add(rank)
        found["local_rank"].add(int(captures["local_rank"]) if "local_rank" in captures else event.local_rank)
        found["node"].add(captures.get("node"))
        found["gpu"].add(captures["gpu"].lower() if "gpu" in captures else None)
        found["link"].add(int(captures["link"]) if "link" in captures else None)
    scope: dict[str, Any] = {}
    for name, values in found.items():
        known = sorted(values - {None})[:_SCOPE_LIMIT]
        if known:
            scope[name] = known[0] if len(known) == 1 else known
    return scope
