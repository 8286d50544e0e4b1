"""How a job ended and why: from its logs to a located, cited root and a safe next action.

In: log files or folders of one job, and what a supervisor saw (`JobContext`, optional). Out: a `Diagnosis`.
Nothing is written, nothing is asked of a network (but by `known`, where an embeddings endpoint is configured), and a
log of any size takes bounded memory.

| stage | module | from → to |
|---|---|---|
| 1 | `logs.files`, `logs.records`, `logs.flight_recorder` | paths → files, rotated parts in order → blocks of lines |
| | `logs.prefixes` | a sample of lines → the prefix that the log's launcher puts before each |
| | `logs.lines`, `logs.times`, `logs.progress` | a raw line → clean text, its time, host, rank and step |
| | `logs.tracebacks` | lines of one rank → the exception that ends a traceback, its chain and its catcher |
| | `logs.programs` | scripts of tracebacks → which of them are the job's own |
| | `shapes` | a line → what was found in another line that differs in its numbers alone |
| 2 | `rules` | `rules/topics/*.yaml`, `rules/tables/*.tsv` → the event that one line means |
| | `explain.scan`, `explain.life` | files → events, and whether the job lived on after each |
| 3 | `explain.outcome` | events and exit codes → how the job ended |
| | `explain.explain`, `explain.arborescence` | events, `rules/causes.yaml` → the least-cost explanation, its rivals |
| | `explain.timing` | the times of a cause and an effect → what they add to the edge's cost |
| | `explain.answer`, `explain.locate` | an explanation → reason, cited lines, who is at fault, action |
| | `explain.confidence` | an explanation and its rivals → how sure the answer is |
| 4 | `memory` | past incidents, good runs → rules that were learned, and similar incidents |
| | `agents` | a language model's proposal, checked against the log |

`logs.job_context` holds the supervisor's observations, `explain.diagnosis` the published answer. `watch` does the same
for a job that still runs; `study` does all of it for the command line, with the compressed log and the lines around
the root.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import NotFound
from holdfast.diagnose.explain.answer import conclude
from holdfast.diagnose.explain.diagnosis import Alternative, Diagnosis, Evidence, LogLine
from holdfast.diagnose.explain.scan import scan, scan_texts
from holdfast.diagnose.logs.files import Found, Reading, find_files
from holdfast.diagnose.logs.job_context import (
    BrokenLoss,
    Hang,
    JobContext,
    RankExit,
    observed_lines,
)
from holdfast.diagnose.rules.packaged import packaged_rules
from holdfast.diagnose.watch import LogWatcher

__all__ = [
    "CATEGORIES",
    "ENDS_IN_WORDS",
    "VERSION",
    "Action",
    "Advice",
    "Alternative",
    "BrokenLoss",
    "Cluster",
    "Compressed",
    "Diagnosis",
    "Evidence",
    "Explanation",
    "Hang",
    "JobContext",
    "Kept",
    "LogLine",
    "LogWatcher",
    "Outcome",
    "RankExit",
    "Reckoning",
    "Role",
    "RuleSet",
    "Topic",
    "compress",
    "diagnose",
    "find_files",
    "observed_lines",
    "packaged_rules",
    "packaged_topics",
    "rank_by_name",
    "scan",
]

if TYPE_CHECKING:
    from holdfast.diagnose.explain.compress import Compressed, Kept, compress
    from holdfast.diagnose.explain.diagnosis import ENDS_IN_WORDS, VERSION, Role
    from holdfast.diagnose.explain.explain import Cluster, Explanation, Reckoning
    from holdfast.diagnose.logs.files import rank_by_name
    from holdfast.diagnose.memory import Known
    from holdfast.diagnose.rules.packaged import packaged_topics
    from holdfast.diagnose.rules.rules import RuleSet, Topic
    from holdfast.diagnose.rules.taxonomy import CATEGORIES, Action, Advice, Outcome

_HOMES = {
    "CATEGORIES": "rules.taxonomy",
    "ENDS_IN_WORDS": "explain.diagnosis",
    "VERSION": "explain.diagnosis",
    "Action": "rules.taxonomy",
    "Advice": "rules.taxonomy",
    "Cluster": "explain.explain",
    "Compressed": "explain.compress",
    "Explanation": "explain.explain",
    "Kept": "explain.compress",
    "Outcome": "rules.taxonomy",
    "Reckoning": "explain.explain",
    "Role": "explain.diagnosis",
    "RuleSet": "rules.rules",
    "Topic": "rules.rules",
    "compress": "explain.compress",
    "packaged_topics": "rules.packaged",
    "rank_by_name": "logs.files",
}

PathLike = str | os.PathLike[str]


def diagnose(
    paths: PathLike | Iterable[PathLike],
    context: JobContext | None = None,
    *,
    known: "Known | None" = None,
) -> Diagnosis:
    """Say how the one job behind `paths` ended, and why it failed.

    `paths` are files or folders (a folder stands for its own `*.log*` files). The name `rank-N.log` and
    prefixes such as `[rank1]:` tell the rank of a line. What is missing or unreadable is passed over. `known` is what
    was learned (`memory.Known.load`): its rules are asked too, and past incidents where rules leave the case open.

    Raises:
        NotFound: none of the paths exists, and there is no `context` to go by either.
    """
    rules = packaged_rules() if known is None else known.rules
    try:
        found = find_files([paths] if isinstance(paths, str | os.PathLike) else paths)
    except NotFound:
        if context is None:
            raise
        found = Found()
    reading = Reading(notes=list(found.notes))
    observed = [] if context is None else scan_texts(observed_lines(context), rules)
    events = scan(found.files, rules, reading)
    decided = replace(conclude(events, observed, context), notes=tuple(sorted(reading.notes)))
    if known is None:
        return decided
    from holdfast.diagnose.explain.compress import compress

    return known.recall(decided, lambda: compress(found.files, events, known.filters).lines)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.diagnose' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.diagnose.{_HOMES[name]}"), name)
