"""Learn routine lines from runs that ended well.

For each good run, one line of each shape is kept. Templates are made from the lines of all good
runs: by Drain3 (He et al. 2017) if it is installed, else by masking the parts that vary. Frequent
templates become filters, which `compress` uses, unless the template matches a line that states the
root of an incident, or an example of a rule.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import re2

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import BadUse
from holdfast.core.ledger import Ledger
from holdfast.core.ledger.records import GoodRun, LearnedRule
from holdfast.diagnose.explain.answer import conclude
from holdfast.diagnose.explain.diagnosis import ENDS_IN_WORDS
from holdfast.diagnose.explain.scan import scan
from holdfast.diagnose.logs.files import find_files, read_blocks
from holdfast.diagnose.logs.filters import Filter, Filters, packaged_filters
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.memory.store import learned_of
from holdfast.diagnose.memory.topics import shielded
from holdfast.diagnose.memory.words import mask, tokens
from holdfast.diagnose.rules.packaged import packaged_rules
from holdfast.diagnose.rules.rules import ROUTINE

_SHAPES_LIMIT: Final = 50_000
_KEPT_LINES: Final = 3000
_KEPT_BYTES: Final = 512 << 10
_LINE_CHARACTERS: Final = 400
_OFTEN: Final = 5
"""A template is routine if at least this number of lines of one run match it. If lines of two runs
match, any number is enough.
"""
_MIN_LETTERS: Final = 8
_EXAMPLES: Final = 3
_WILD: Final = "<*>"
_DIGITS: Final = b"0123456789"


@dataclass(frozen=True, kw_only=True)
class Good:
    """The result of adding a good run."""

    good_id: int
    lines: int
    filters: tuple[Filter, ...] = ()
    """The filters that were newly learned."""
    withdrawn: tuple[str, ...] = ()
    """The ids of learned rules that matched a line of the run as an error, and so were withdrawn.
    """


def add_good_run(ledger: Ledger, paths: Sequence[str], *, clock: Clock | None = None) -> Good:
    """Record that the run with the logs `paths` ended well, and learn its routine lines.

    Raises:
        NotFound: none of the paths exists.
        BadUse: the logs have no text, or the packaged rules find a failure in the logs.
        LedgerError: the ledger cannot be read or written.
    """
    now_s = (SystemClock() if clock is None else clock).now_s()
    lines = shapes_of(paths)
    if not lines:
        raise BadUse(
            f"There is no text in {', '.join(paths)}. Name the logs of a run that ended well."
        )
    _refuse_failure(paths)
    digest = hashlib.sha256("\n".join(text for text, _ in lines).encode()).hexdigest()[:16]
    run = GoodRun(
        name=" ".join(paths),
        fingerprint=digest,
        added_at_s=now_s,
        lines=[[text, count] for text, count in lines],
    )
    good_id = ledger.add_good_run(run)
    withdrawn = []
    texts = [text for text, _ in lines]
    for rule in map(learned_of, ledger.learned_rules("rule")):
        pattern = re2.compile(rule.rule.pattern)
        if any(pattern.search(text) and not shielded(rule.rule, text) for text in texts):
            ledger.withdraw_learned_rule(rule.rule.id, at_s=now_s, by=f"good:{good_id}")
            withdrawn.append(rule.rule.id)
    roots = [root for memory in ledger.memories() for root in memory.roots]
    runs = [[(str(line[0]), int(line[1])) for line in run.lines] for run in ledger.good_runs()]
    found = keep_filters(ledger, learn_filters(runs, roots), good_id, now_s=now_s)
    return Good(good_id=good_id, lines=len(lines), filters=found, withdrawn=tuple(withdrawn))


def _refuse_failure(paths: Sequence[str]) -> None:
    # Only the packaged rules are used here. If a learned rule finds a failure in a good run, the
    # rule is wrong and is withdrawn below.
    diagnosis = conclude(scan(find_files(paths).files, packaged_rules()))
    if diagnosis.outcome in ENDS_IN_WORDS:
        return
    root = diagnosis.root_line
    where = f" ({root.file}, line {root.line})" if root else ""
    raise BadUse(
        f"This run did not end well: {diagnosis.summary.rstrip('.')}{where}. The lines of a "
        "failed run are not routine. Name the logs of a run that ended well."
    )


def keep_filters(
    ledger: Ledger,
    filters: Iterable[Filter],
    good_id: int,
    *,
    now_s: float,
    author: str = "learned",
) -> tuple[Filter, ...]:
    """Put filters in force that were learned from a good run.

    Returns:
        The filters that are new, without filters that a person has withdrawn.

    Raises:
        LedgerError: the ledger cannot be read or written.
    """
    there = {
        one.rule_id
        for one in (
            *ledger.learned_rules("filter"),
            *ledger.learned_rules("filter", withdrawn=True),
        )
    }
    new = tuple(one for one in filters if one.id not in there)
    for one in new:
        body = {"pattern": one.pattern, "source": one.source, "match": list(one.match)}
        record = LearnedRule(
            rule_id=one.id,
            kind="filter",
            body=body,
            author=author,
            sources=[f"good:{good_id}"],
            made_at_s=now_s,
        )
        ledger.add_learned_rule(record)
    return new


def shapes_of(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Return one line of each shape in the logs, without prefixes, and the number of such lines.

    The number of shapes is limited.

    Raises:
        NotFound: none of the paths exists.
    """
    counts: Counter[bytes] = Counter()
    first: dict[bytes, bytes] = {}
    for file in find_files(paths).files:
        for block, _ in read_blocks(file.path):
            for raw in block.replace(b"\r", b"\n").split(b"\n"):
                shape = raw.strip()[:_LINE_CHARACTERS].translate(None, _DIGITS)
                if shape in first:
                    counts[shape] += 1
                elif shape and len(first) < _SHAPES_LIMIT:
                    first[shape] = raw[: 4 * _LINE_CHARACTERS]
                    counts[shape] = 1
    merged: Counter[str] = Counter()
    for shape, raw in first.items():
        merged[clean_line(raw, 0).text.strip()[:_LINE_CHARACTERS]] += counts[shape]
    del merged[""]
    left, kept = _KEPT_BYTES, []
    for text, count in sorted(merged.items(), key=lambda one: (-one[1], one[0]))[:_KEPT_LINES]:
        left -= len(text.encode("utf-8", "replace"))
        if left < 0:
            break
        kept.append((text, count))
    return kept


def learn_filters(runs: Iterable[Sequence[tuple[str, int]]], roots: Iterable[str]) -> list[Filter]:
    """Return filters for frequent lines of good runs. None of them drops a root or a rule's example."""
    seen: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    examples: dict[str, list[str]] = defaultdict(list)
    every = list(runs)
    template_of = _templates([text for run in every for text, _ in run])
    for number, run in enumerate(every):
        for text, count in run:
            template = template_of[text]
            seen[template][number] += count
            examples[template].append(text)
    packaged = Filters(packaged_filters())
    precious = [*roots, *_known_roots()]
    found = []
    for template, by_run in sorted(seen.items()):
        if max(by_run.values()) < _OFTEN and len(by_run) == 1:
            continue
        pattern = _pattern(template)
        if pattern is None:
            continue
        compiled = re2.compile(pattern)
        matched = [text for text in examples[template] if compiled.search(text)]
        if not matched or all(map(packaged.routine, matched)):
            continue
        if not any(compiled.search(root) for root in precious):
            name = f"good-{hashlib.sha256(pattern.encode()).hexdigest()[:8]}"
            source = f"what {len(by_run)} good run{'s' * (len(by_run) > 1)} printed"
            found.append(
                Filter(id=name, pattern=pattern, source=source, match=tuple(matched[:_EXAMPLES]))
            )
    return found


def _templates(texts: Sequence[str]) -> dict[str, str]:
    """Return one template per text: its words, with `<*>` in place of varying parts."""
    masked = {text: mask(text) for text in texts}
    miner = _drain()
    if miner is None:
        return masked
    clusters = {
        text: miner.add_log_message(masked_text)["cluster_id"]
        for text, masked_text in masked.items()
    }
    templates = {cluster.cluster_id: cluster.get_template() for cluster in miner.drain.clusters}
    return {text: templates[cluster] for text, cluster in clusters.items()}


def _drain() -> Any:
    """Return a template miner of Drain3; None if Drain3 is not installed."""
    try:
        from drain3 import TemplateMiner
        from drain3.template_miner_config import TemplateMinerConfig
    except ImportError:
        return None
    config = TemplateMinerConfig()
    config.drain_sim_th = 0.6
    config.profiling_enabled = False
    return TemplateMiner(config=config)


def _pattern(template: str) -> str | None:
    """Return an RE2 pattern for whole lines of a template; None if it has too few letters."""
    literal = [one for one in tokens(template.replace(_WILD, " ")) if one.sort == "word"]
    if sum(len(one.text) for one in literal) < _MIN_LETTERS:
        return None
    parts = [
        r"\s+".join(re2.escape(word) for word in part.split(" ")) for part in template.split(_WILD)
    ]
    return r"^\s*" + r".{0,120}?".join(parts) + r"\s*$"


def _known_roots() -> list[str]:
    return [
        clean_line(line.encode(), 0).text
        for rule in packaged_rules().rules
        if rule.kind != ROUTINE
        for line in rule.match
    ]
