"""Write results in lm-evaluation-harness's own layout, for tools that read that layout.

`OUTPUT/MODEL/results_TIME.json` is lm-eval's results object. Beside it, `samples_TASK_TIME.jsonl`
has the samples of each task. Both are as lm-eval writes them with `--output_path` and
`--log_samples`. Inspect's logs are in `inspect_TIME/` under their own names, where `inspect view
--log-dir` shows them.
"""

import json
import os
import shutil
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from holdfast.core.atomic import replacing, write_atomic
from holdfast.evaluate.types.evaluation import Evaluation
from holdfast.evaluate.types.scores import sanitized

SAMPLES = "samples"
"""The subfolder of an evaluation with lm-eval's `samples_TASK_TIME.jsonl` files."""
INSPECT = "inspect"
"""The subfolder of an evaluation with inspect-ai's logs, `TIME_TASK_ID.eval`."""


def write_results(evaluation: Evaluation, output: Path) -> Path:
    """Write an evaluation's results, samples and logs below `output`; return the results' file.

    Samples are hard-linked if the file system permits, and copied otherwise.

    Raises:
        OSError: a file could not be written.
    """
    folder = output / sanitized(evaluation.model)
    folder.mkdir(parents=True, exist_ok=True)
    # Use the start time, so that a repeated call replaces its own files. Use local time, as lm-eval
    # does.
    moment = datetime.fromtimestamp(evaluation.started_at_s)  # noqa: DTZ006
    stamp = moment.isoformat(timespec="microseconds").replace(":", "-")
    seen: Counter[str] = Counter()
    for samples in sorted((Path(evaluation.folder) / SAMPLES).rglob("samples_*.jsonl")):
        task = samples.name.rpartition("_")[0]
        seen[task] += 1
        # A task may be in two entries of a suite.
        again = f"#{seen[task]}" if seen[task] > 1 else ""
        _link(samples, folder / f"{task}{again}_{stamp}.jsonl")
    _link_logs(Path(evaluation.folder) / INSPECT, folder / f"inspect_{stamp}")
    path = folder / f"results_{stamp}.json"
    write_atomic(
        path, json.dumps(results_object(evaluation), indent=2, ensure_ascii=False).encode()
    )
    return path


def results_object(evaluation: Evaluation) -> dict[str, Any]:
    """Return the harness's results object; mode, digest and errors are added under `holdfast`."""
    names = ("id", "mode", "numerics", "digest", "errors")
    mine = {name: getattr(evaluation, name) for name in names}
    return {
        **{name: value for name, value in evaluation.results.items() if name != "samples"},
        "holdfast": mine,
    }


def _link_logs(source: Path, target: Path) -> None:
    logs = sorted(source.rglob("*.eval"))
    for log in logs:
        target.mkdir(exist_ok=True)
        _link(log, target / log.name)
    # A repeated run does not overwrite its former logs, because each log's name contains a time.
    for old in {*target.glob("*.eval")} - {target / log.name for log in logs}:
        old.unlink()


def _link(source: Path, target: Path) -> None:
    # Renaming a link onto another link to the same file would leave the temporary name.
    if target.exists() and target.samefile(source):
        return
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, temporary)
