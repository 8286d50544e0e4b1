"""Merge results objects into one, as lm-eval would have written it; write samples as files.

The formats are those that lm-eval 0.4.13 defines in `lm_eval/result_schema.py` and
`lm_eval/loggers/evaluation_tracker.py`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from holdfast.core.atomic import write_atomic
from holdfast.evaluate.types.scores import sanitized

_BY_NAME = ("configs", "versions", "n-shot", "higher_is_better")
"""Parts of a results object that map tasks and groups to values; sorted by name."""


def merge(
    results: Sequence[Mapping[str, Any]],
    *,
    model_name: str = "",
    model_source: str = "holdfast",
    start_s: float | None = None,
    end_s: float | None = None,
) -> dict[str, Any]:
    """Merge the results objects of entries into one object that lm-eval's own tools can read.

    Args:
        results: the results object of each entry, in the suite's order; at least one.
        model_name: the user's name for the model.
        model_source: the name of the program that ran the model.
        start_s: the start of the evaluation as Unix time; None for the earliest `date` of the
            entries.
        end_s: the end of the evaluation as Unix time, from which the duration is computed.

    Two entries may have a task of the same name, with other settings or within a group. A task with
    equal results appears once. A task with other results appears as `NAME#2`, then `NAME#3`, and so
    on.
    """
    merged: dict[str, Any] = {"results": {}, "groups": {}, "group_subtasks": {}}
    merged |= {part: {} for part in (*_BY_NAME, "n-samples", "task_hashes")}
    taken: dict[str, Any] = {}
    renamed = [_set_apart(one, taken) for one in results]
    for is_group in (False, True):  # lm-eval has all tasks first, then the groups
        for one in renamed:
            chosen = {
                name: row
                for name, row in one["results"].items()
                if (name in one["group_subtasks"]) is is_group
            }
            merged["results"] |= chosen
    for part in merged:
        if part != "results":
            for one in renamed:
                merged[part] |= one.get(part, {})
    for part in _BY_NAME:
        merged[part] = dict(sorted(merged[part].items()))
    if not merged["groups"]:
        del merged["groups"]
    merged["config"] = _common([one.get("config", {}) for one in renamed])
    dates = [one["date"] for one in renamed if "date" in one]
    start_s = min(dates, default=0.0) if start_s is None else start_s
    merged |= _common(
        [{key: value for key, value in one.items() if key not in merged} for one in renamed]
    )
    merged |= {
        "date": start_s,
        "model_source": model_source,
        "model_name": model_name,
        "model_name_sanitized": sanitized(model_name),
    }
    if end_s is not None:
        merged["total_evaluation_time_seconds"] = str(end_s - start_s)
    return merged


def _set_apart(one: Mapping[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    """Rename an entry's tasks whose names are in `taken` with other results.

    The entry's names are added to `taken` (task name to results).
    """
    names: dict[str, str] = {}
    for name, row in one["results"].items():
        number, free = 1, name
        while free in taken and taken[free] != row:
            number += 1
            free = f"{name}#{number}"
        names[name] = free
        taken[free] = row
    changed = {old: new for old, new in names.items() if old != new}
    renamed = dict(one)
    for part in ("results", "groups", "group_subtasks", "n-samples", "task_hashes", *_BY_NAME):
        renamed[part] = {
            changed.get(name, name): value for name, value in one.get(part, {}).items()
        }
    renamed["group_subtasks"] = {
        group: [changed.get(name, name) for name in members]
        for group, members in renamed["group_subtasks"].items()
    }
    for old, new in changed.items():
        row = renamed["results"][new]
        renamed["results"][new] = {**row, "alias": f"{row.get('alias', old)}{new[len(old) :]}"}
    return renamed


def _common(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all keys of the tables; the value of a key is None if the tables differ in it."""
    keys = dict.fromkeys(key for table in tables for key in table)
    common = {}
    for key in keys:
        values = [table.get(key) for table in tables]
        common[key] = values[0] if all(value == values[0] for value in values) else None
    return common


def plain(value: Any, default: Callable[[Any], Any]) -> Any:
    """Convert a results object to JSON and back, so that it equals the content of lm-eval's file.

    `default` is lm-eval's function for values that JSON lacks.
    """
    return json.loads(json.dumps(value, default=default, ensure_ascii=False))


def task_hash(samples: Iterable[Mapping[str, Any]]) -> str:
    """Return lm-eval's fingerprint of a task's documents, prompts and targets."""
    text = "".join(
        sample["doc_hash"] + sample["prompt_hash"] + sample["target_hash"] for sample in samples
    )
    return hashlib.sha256(text.encode()).hexdigest()


def write_samples(
    folder: Path,
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    sanitize: Callable[[Any], Any],
    default: Callable[[Any], Any],
) -> list[Path]:
    """Write `samples_TASK_DATE.jsonl` for each task atomically, one line per sample and filter.

    `sanitize` and `default` are lm-eval's functions. Files that an earlier attempt left in the
    folder are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = set(folder.glob("samples_*.jsonl"))
    date = datetime.now().isoformat().replace(":", "-")  # noqa: DTZ005  local time, as lm-eval's names have it
    paths = []
    for task, rows in samples.items():
        lines = [
            json.dumps(_line(row, sanitize), default=default, ensure_ascii=False) + "\n"
            for row in rows
        ]
        path = folder / f"samples_{sanitized(task)}_{date}.jsonl"
        write_atomic(path, "".join(lines).encode("utf-8", "surrogatepass"))
        paths.append(path)
    for path in earlier.difference(paths):
        path.unlink()
    return paths


def _line(sample: Mapping[str, Any], sanitize: Callable[[Any], Any]) -> dict[str, Any]:
    arguments = {
        f"gen_args_{number}": {f"arg_{place}": value for place, value in enumerate(values)}
        for number, values in enumerate(sample["arguments"])
    }
    return {
        **sample,
        "resps": sanitize(sample["resps"]),
        "filtered_resps": sanitize(sample["filtered_resps"]),
        "arguments": arguments,
        "target": str(sample["target"]),
    }
