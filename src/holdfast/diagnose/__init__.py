"""Why a job failed: from its logs to a located, cited root and a safe next action.

In: log files or folders of one job, and what a supervisor saw (`JobContext`, optional). Out: a `Diagnosis`.
Nothing is written, nothing is asked of a network, and a log of any size takes bounded memory.

| stage | module | from → to |
|---|---|---|
| 1 | `read` | paths → files, rotated parts in order → blocks of whole lines |
| 2 | `lines` | a raw line → clean text, its rank, the step it reports |
| 3 | `tracebacks` | lines of one rank → the exception that ends a traceback, and its place in a chain |
| 4 | `rules` | `rules/*.yaml` → what one line means |
| 5 | `scan` | files → events, with the progress before and after each |
| 6 | `explain` | events, what the supervisor saw → root, cascade, recovered, teardown, scope, action |

`context` is what the supervisor knows, `diagnosis` the published answer.
"""

import os
from collections.abc import Iterable

from holdfast.core.errors import NotFound
from holdfast.diagnose.context import Hang, JobContext, RankExit, observed_lines
from holdfast.diagnose.diagnosis import Alternative, Diagnosis, Evidence, LogLine
from holdfast.diagnose.explain import explain
from holdfast.diagnose.read import find_files
from holdfast.diagnose.rules import packaged_rules
from holdfast.diagnose.scan import scan, scan_texts

__all__ = [
    "Alternative",
    "Diagnosis",
    "Evidence",
    "Hang",
    "JobContext",
    "LogLine",
    "RankExit",
    "diagnose",
    "observed_lines",
]

PathLike = str | os.PathLike[str]


def diagnose(paths: PathLike | Iterable[PathLike], context: JobContext | None = None) -> Diagnosis:
    """Say why the one job behind `paths` failed.

    `paths` are files or folders (a folder stands for its own `*.log*` files). The name `rank-N.log` and
    prefixes such as `[rank1]:` tell the rank of a line. What is missing or unreadable is passed over.

    Raises:
        NotFound: none of the paths exists, and there is no `context` to go by either.
    """
    rules = packaged_rules()
    try:
        files = find_files([paths] if isinstance(paths, str | os.PathLike) else paths)
    except NotFound:
        if context is None:
            raise
        files = ()
    observed = [] if context is None else scan_texts(observed_lines(context), rules)
    return explain(scan(files, rules), observed)
