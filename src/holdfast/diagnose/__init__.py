"""Diagnose why a job ended: find the root cause in its logs, the location, and a safe next action.

The input is the log files or folders of one job and, optionally, the observations of a supervisor
(`JobContext`). The output is a `Diagnosis`. No file is written. The network is not used, unless
`known` has an embeddings endpoint. Memory is bounded for logs of any size.

| stage | module | from → to |
|---|---|---|
| 1 | `logs.files`, `logs.records`, `logs.flight_recorder` | paths → files, blocks of lines |
| | `logs.prefixes` | sample of lines → the prefix that the launcher puts before lines |
| | `logs.lines`, `logs.times`, `logs.progress` | raw line → clean text, time, host, rank, step |
| | `logs.tracebacks` | lines of a rank → the exception at the end of a traceback, and its chain of causes |
| | `logs.programs` | scripts in tracebacks → the job's own scripts |
| | `shapes` | a line → the cached result of an earlier line that differs only in its numbers |
| 2 | `rules` | `rules/topics/*.yaml`, `rules/tables/*.tsv` → the event that a line means |
| | `explain.scan`, `explain.life` | files → events, and for each event if the job survived it |
| 3 | `explain.outcome` | events and exit codes → how the job ended |
| | `explain.explain`, `explain.arborescence` | events, causes → the least-cost explanation, and its rivals |
| | `explain.timing` | times of cause and effect → a surcharge on the cost of their edge |
| | `explain.answer`, `explain.locate` | explanation → reason, cited lines, location, action |
| | `explain.confidence` | an explanation and its rivals → the confidence |
| 4 | `memory` | past incidents, good runs → learned rules and similar incidents |
| | `agents` | a language model's proposal → a checked proposal |

`logs.job_context` defines the supervisor's observations; `explain.diagnosis` defines the published
answer. `watch` diagnoses a job that still runs. `study` serves the command line: besides the
diagnosis, `study` returns the compressed log and the lines around the root.
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
    """Diagnose from the logs in `paths` how a job ended, and why the job failed.

    Missing and unreadable files are left out and listed in `Diagnosis.notes`.

    Args:
        paths: log files or folders of one job; a folder means all `*.log*` files in it. The rank of
            a line is read from a file name such as `rank-N.log`, or from a prefix such as
            `[rank1]:`.
        context: the observations of a supervisor.
        known: the learned knowledge (`memory.Known.load`). Learned rules are applied together with
            the packaged rules. If no rule decides the case, past incidents are searched.

    Raises:
        NotFound: none of the paths exists, and there is no `context`.
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
