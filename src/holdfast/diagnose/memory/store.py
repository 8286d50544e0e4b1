"""Store incidents and people's judgements in the ledger, and learn rules from the judgements."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, get_args

import re2

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import Incident, Ledger
from holdfast.core.ledger.records import MEMORY_LIMIT_BYTES, LearnedRule, Memory
from holdfast.core.processes import whoami
from holdfast.diagnose.explain.answer import conclude
from holdfast.diagnose.explain.compress import Compressed, Kept, compress
from holdfast.diagnose.explain.diagnosis import Diagnosis
from holdfast.diagnose.explain.scan import scan
from holdfast.diagnose.logs.files import find_files
from holdfast.diagnose.logs.filters import Filter
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.memory.candidates import PHRASE
from holdfast.diagnose.memory.case import ROOTS_LIMIT, Case, distinct, kept_with
from holdfast.diagnose.memory.embeddings import Embedder, EmbeddingsFailed, packed, unpacked
from holdfast.diagnose.memory.gate import Gate
from holdfast.diagnose.memory.learn import AUTHOR, learn
from holdfast.diagnose.memory.own_rules import own_topics
from holdfast.diagnose.memory.recall import Past
from holdfast.diagnose.memory.topics import BARE_ORDER, Learned
from holdfast.diagnose.memory.words import search_words, tokens
from holdfast.diagnose.rules.packaged import packaged_rules, packaged_topics
from holdfast.diagnose.rules.rules import Rule, RuleSet
from holdfast.diagnose.rules.taxonomy import CATEGORIES, Action, Category

_KEY: Final = re2.compile(r"^(m?)([0-9]{1,9})$")
_SHOWN_LINE: Final = re2.compile(r"^([0-9]+)(?: x([0-9]+))?: (.*)$")
_HEADING: Final = "== "


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The result of a judgement."""

    memory: Memory
    learned: tuple[Learned, ...] = ()
    """The rules that were learned from the judgement, and are now in force."""
    notes: tuple[str, ...] = ()


def key_of(memory: Memory) -> str:
    """Return the name of an incident for people: `7`, or `m3` if it belongs to no run."""
    return f"m{memory.memory_id}" if memory.incident_id is None else str(memory.incident_id)


def memory_of(ledger: Ledger, key: str) -> Memory:
    """Return the record of incident `key` in the memory; add a run's incident if it is missing.

    Raises:
        NotFound: there is no such incident.
        BadUse: `key` does not have the form of an incident's name.
    """
    match = _KEY.search(key)
    if match is None:
        raise BadUse(
            f"{key!r} is not an incident: give a number, or m and a number. "
            "List them: holdfast incidents ls"
        )
    if match[1]:
        found = ledger.memory(int(match[2]))
        if found.incident_id is None:
            return found
        raise NotFound(f"{key} is incident {found.incident_id} of run {found.run_id}. Name it so.")
    incident = ledger.incident(int(match[2]))
    there = ledger.memories(incident_id=incident.incident_id)
    return there[0] if there else ledger.memory(ledger.add_memory(_of_incident(incident)))


def remember(
    ledger: Ledger,
    diagnosis: Diagnosis,
    text: str | Compressed,
    *,
    suggested: Mapping[str, Any] | None = None,
    clock: Clock | None = None,
) -> Diagnosis:
    """Record a diagnosis that belongs to no run in the memory.

    Args:
        ledger: the ledger.
        diagnosis: the answer of the rules or the model.
        text: the compressed log, as `compress` made it.
        suggested: the fields of a rule that a model suggested.
        clock: the clock for the time of the record.

    Returns:
        The diagnosis with similar incidents added. If the case was open, one of these may have
        decided it.

    Raises:
        LedgerError: the ledger cannot be read or written.
    """
    from holdfast.diagnose.memory.known import Known

    kept = text.lines if isinstance(text, Compressed) else lines_of(text)
    decided = Known.of_ledger(ledger).recall(diagnosis, lambda: kept)
    kept = kept_with(decided.root_lines, kept)
    now_s = (SystemClock() if clock is None else clock).now_s()
    memory_id, notes = _add(ledger, _of_diagnosis(decided.to_json(), kept, now_s))
    if suggested is not None:
        keep_suggestion(ledger, f"m{memory_id}", suggested, now_s=now_s)
        how = f"`holdfast incidents confirm m{memory_id}` accepts the rule if it changes no other answer."
        notes = (*notes, f"The model suggests a rule. If its answer is right, {how}")
    return replace(decided, id=f"m{memory_id}", notes=(*decided.notes, *notes))


def remember_incident(ledger: Ledger, incident_id: int, kept: Iterable[Kept]) -> None:
    """Add a run's incident with its compressed log to the memory.

    Raises:
        NotFound: there is no such incident.
        LedgerError: the ledger cannot be read or written.
    """
    _add(ledger, _of_incident(ledger.incident(incident_id), kept))


def adopt_incidents(ledger: Ledger) -> int:
    """Add all incidents of runs that are not in the memory yet; return their number."""
    new = ledger.incidents_not_remembered()
    for incident in new:
        _add(ledger, _of_incident(incident))
    return len(new)


def judge(
    ledger: Ledger,
    key: str,
    *,
    reason: str = "",
    roots: Sequence[str] = (),
    action: str = "",
    kept: Sequence[Kept] = (),
    home: Path | None = None,
    clock: Clock | None = None,
    by: str = "",
) -> Judged:
    """Record a person's judgement of an incident, and learn rules from it.

    Args:
        ledger: the ledger.
        key: the name of the incident.
        reason: the correct reason; if it is not given, the reason of the diagnosis is confirmed.
        roots: the lines that state the root, if the diagnosis named other lines.
        action: the action that helped.
        kept: the compressed log, if the log can be read again.
        home: the folder that contains the folder `rules` with the user's own rules.
        clock: the clock for the time of the record.
        by: the name of the person; by default the current user.

    Raises:
        NotFound: there is no such incident.
        BadUse: the reason is unknown, or the diagnosis has no reason to confirm.
        LedgerError: the ledger cannot be read or written.
    """
    memory = memory_of(ledger, key)
    if not reason and memory.reason == "Unknown":
        raise BadUse(
            f"Incident {key} was left Unknown: there is nothing to confirm. Run "
            f"`holdfast incidents correct {key} --reason R`."
        )
    if reason and (reason not in CATEGORIES or reason == "Unknown"):
        allowed = ", ".join(one for one in CATEGORIES if one != "Unknown")
        raise BadUse(f"{reason!r} is not a reason. Allowed: {allowed}.")
    if action and action not in get_args(Action):
        raise BadUse(f"{action!r} is not an action. Allowed: {', '.join(get_args(Action))}.")
    now_s = (SystemClock() if clock is None else clock).now_s()
    named = [clean_line(line.encode("utf-8", "replace"), 0).text.strip() for line in roots]
    changes: dict[str, Any] = {
        "verdict": "corrected" if reason and (reason != memory.reason or roots) else "confirmed",
        "true_reason": reason or memory.reason,
        "true_action": action,
        "judged_by": by or whoami(),
        "judged_at_s": now_s,
    }
    if named:
        changes["roots"] = list(distinct(named))
    if kept or named:
        there = [Kept(file=one[0], line=one[1], text=one[2]) for one in memory.lines]
        changes["lines"] = _bounded([*_with_roots(named, kept or there), *(kept or there)])
        changes["words"] = search_words(
            [*changes.get("roots", memory.roots), *(one[2] for one in changes["lines"])]
        )
    assert memory.memory_id is not None
    ledger.set_memory(memory.memory_id, **changes)
    judged = ledger.memory(memory.memory_id)
    notes = (
        []
        if judged.roots
        else [
            f"No line of incident {key} states the root: name it with --line FILE:LINE to learn from it."
        ]
    )
    learned = learn_from_ledger(ledger, home, now_s=now_s)
    return Judged(memory=judged, learned=tuple(learned), notes=tuple(notes))


def learn_from_ledger(ledger: Ledger, home: Path | None = None, *, now_s: float) -> list[Learned]:
    """Learn rules from the judged incidents; put the new rules in force, and return them."""
    cases = [case_of(one) for one in ledger.memories(judged=True) if one.roots]
    in_force = [learned_of(one) for one in ledger.learned_rules("rule")]
    rules, good = RuleSet((*packaged_topics(), *own_topics(home))), good_lines(ledger)
    suggested = accepted_suggestions(
        ledger.learned_rules(SUGGESTION), cases, Gate(rules, cases, good, in_force)
    )
    withdrawn = [one.rule_id for one in ledger.learned_rules("rule", withdrawn=True)]
    learned = learn(cases, rules, good, learned=[*in_force, *suggested], withdrawn=withdrawn)
    for author, found in ((MODEL, suggested), (AUTHOR, learned)):
        for one in found:
            ledger.add_learned_rule(
                LearnedRule(
                    rule_id=one.rule.id,
                    kind="rule",
                    body=one.to_json(),
                    author=author,
                    sources=list(one.sources),
                    made_at_s=now_s,
                )
            )
    return [*suggested, *learned]


def kept_of(paths: Sequence[str]) -> tuple[Kept, ...]:
    """Return the compressed log of the job at `paths`, with the lines around its root.

    Raises:
        NotFound: none of the paths exists.
    """
    files = find_files(paths).files
    events = scan(files, packaged_rules())
    return kept_with(conclude(events).root_lines, compress(files, events).lines)


def good_lines(ledger: Ledger) -> list[str]:
    """Return the lines of good runs, one of each shape."""
    return list(dict.fromkeys(str(line[0]) for run in ledger.good_runs() for line in run.lines))


def case_of(memory: Memory) -> Case:
    """Convert the record of a judged incident to a case for learning."""
    return Case(
        key=key_of(memory),
        reason=memory.true_reason,
        roots=tuple(memory.roots),
        lines=tuple(Kept(file=one[0], line=int(one[1]), text=one[2]) for one in memory.lines),
        action=memory.true_action,
    )


def past_of(memory: Memory, model: str = "") -> Past:
    """Convert a record to a past incident; keep its embedding only if `model` made the embedding."""
    category: Category = next(
        (one for one in set(CATEGORIES.values()) if one == memory.category), "Unknown"
    )
    return Past(
        key=key_of(memory),
        reason=memory.true_reason or memory.reason,
        roots=tuple(memory.roots),
        confirmed=bool(memory.verdict),
        done=memory.done,
        action=memory.true_action,
        when_s=memory.remembered_at_s,
        category=category,
        fingerprint=memory.fingerprint,
        embedding=tuple(unpacked(memory.embedding))
        if memory.embedding and memory.embedding_model == model
        else (),
    )


def learned_of(record: LearnedRule) -> Learned:
    """Convert a record of the ledger to a learned rule."""
    return Learned.from_json(record.body, record.sources)


def filter_of(record: LearnedRule) -> Filter:
    """Convert a record of the ledger to a filter."""
    body = record.body
    return Filter(
        id=record.rule_id,
        pattern=body["pattern"],
        source=body["source"],
        match=tuple(body["match"]),
    )


def lines_of(text: str) -> tuple[Kept, ...]:
    """Parse the text of a compressed log to its lines."""
    found, file = [], ""
    for line in text.splitlines():
        if line.startswith(_HEADING):
            file = line.removeprefix(_HEADING)
        elif shown := _SHOWN_LINE.search(line):
            found.append(
                Kept(file=file, line=int(shown[1]), text=shown[3], count=int(shown[2] or 1))
            )
    return tuple(found)


def _add(ledger: Ledger, memory: Memory) -> tuple[int, tuple[str, ...]]:
    embedder = Embedder.from_environment()
    notes: tuple[str, ...] = ()
    if embedder is not None and memory.roots:
        try:
            vector = embedder.embed([memory.roots[0]])[0]
            memory = replace(memory, embedding=packed(vector), embedding_model=embedder.model)
        except EmbeddingsFailed as error:  # full-text search still finds the incident
            notes = (str(error),)
    return ledger.add_memory(memory), notes


def _of_incident(incident: Incident, kept: Iterable[Kept] = ()) -> Memory:
    found = incident.diagnosis
    lines = list(kept) or [
        Kept(file=one["file"], line=one["line"], text=one["text"]) for one in found["evidence"]
    ]
    memory = _of_diagnosis(found, lines, incident.detected_at_s)
    done = ": ".join(part for part in (incident.action, incident.explanation) if part)
    return replace(memory, incident_id=incident.incident_id, run_id=incident.run_id, done=done)


def _of_diagnosis(found: dict[str, Any], kept: Iterable[Kept], at_s: float) -> Memory:
    cited = found.get("root_lines") or ([found["root_line"]] if found.get("root_line") else [])
    roots = distinct(
        clean_line(one["text"].encode("utf-8", "replace"), one["line"]).text.strip()
        for one in cited
    )
    lines = _bounded(kept)
    return Memory(
        remembered_at_s=at_s,
        reason=found["reason"],
        category=found["category"],
        confidence=float(found["confidence"]),
        rule_id=next(iter(found.get("decided_by", ())), ""),
        scope=dict(found.get("scope", {})),
        fingerprint=str(found.get("fingerprint", "")),
        action="" if found["action"] == "none" else str(found["action"]),
        roots=list(roots[:ROOTS_LIMIT]),
        lines=lines,
        words=search_words([*roots, *(one[2] for one in lines)]),
    )


def _bounded(kept: Iterable[Kept]) -> list[list[Any]]:
    """Return as many lines as fit into `MEMORY_LIMIT_BYTES`, in the order of the log."""
    left, found = MEMORY_LIMIT_BYTES, []
    for one in dict.fromkeys(kept):
        left -= len(one.text.encode("utf-8", "replace"))
        if left < 0:
            break
        found.append([one.file, one.line, one.text])
    return sorted(found, key=lambda one: (one[0], one[1]))


def _with_roots(roots: Sequence[str], kept: Iterable[Kept]) -> list[Kept]:
    """Return the roots that are not among the kept lines, as lines without file and line number."""
    texts = {clean_line(one.text.encode("utf-8", "replace"), one.line).text.strip() for one in kept}
    return [Kept(file="", line=0, text=root) for root in roots if root not in texts]


SUGGESTION: Final = "suggestion"
MODEL: Final = "model"
_HOT_LETTERS: Final = 4
_RULE_FIELDS: Final = tuple(field.name for field in fields(Rule))


def keep_suggestion(ledger: Ledger, key: str, rule: Mapping[str, Any], *, now_s: float) -> None:
    """Record the fields of a `Rule` that a model suggested for incident `key`.

    Raises:
        LedgerError: the ledger cannot be written.
    """
    record = LearnedRule(
        rule_id=str(rule["id"]),
        kind=SUGGESTION,
        body=dict(rule),
        author=MODEL,
        sources=[key],
        made_at_s=now_s,
    )
    ledger.add_learned_rule(record)


def accepted_suggestions(
    suggested: Iterable[LearnedRule], cases: Iterable[Case], gate: Gate
) -> list[Learned]:
    """Return the suggestions that pass `gate`, and add them to the rules in `gate`.

    A suggestion is tried only if a person confirmed the same reason for the incident.
    """
    by_key = {case.key: case for case in cases}
    found = []
    for record in suggested:
        case = by_key.get(record.sources[0])
        if case is None or case.reason != record.body["reason"]:
            continue
        made = _learned(record)
        if made is not None and not gate.refusal(made, case):
            gate.accept(made)
            found.append(made)
    return found


def _learned(record: LearnedRule) -> Learned | None:
    given = {name: record.body[name] for name in _RULE_FIELDS if name in record.body}
    category = given.get("category", CATEGORIES[given["reason"]])
    examples = {name: tuple(given[name]) for name in ("match", "no_match")}
    rule = Rule(**{**given, **examples, "category": category})
    hot = _hot(rule)
    if hot is None:
        return None
    what = f"lines that fit a pattern which a model suggested: {rule.pattern}"
    sources = tuple(record.sources)
    return Learned(
        rule=rule, order=BARE_ORDER, breadth=PHRASE, hot=(hot,), sources=sources, what=what
    )


def _hot(rule: Rule) -> str | None:
    """Return the longest word without which the pattern does not match its own example, or None."""
    pattern, example = re2.compile(rule.pattern), rule.match[0]
    words = {
        one.text for one in tokens(example) if one.sort == "word" and len(one.text) >= _HOT_LETTERS
    }
    for word in sorted(words, key=lambda one: (-len(one), one)):
        if not pattern.search(example.replace(word, "")):
            return word.lower()
    return None
