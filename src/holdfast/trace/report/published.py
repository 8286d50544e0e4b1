"""The findings, and every named number, as published JSON."""

import json
import math
from dataclasses import asdict
from typing import Any

from holdfast.trace.report.model import Report

SCHEMA = "holdfast.trace.findings"
VERSION = 1


def findings_json(report: Report) -> str:
    """One object: `schema`, `version`, `title`, `clusters`, `findings`, `notes`, `analyses`, `numbers`.

    A number that cannot be told is null. Names of numbers are `CLUSTER.WHAT_UNIT`.
    """
    made = {
        "schema": SCHEMA,
        "version": VERSION,
        "title": report.title,
        "duration": report.duration,
        "parameters": dict(report.parameters),
        "clusters": [
            {
                "name": read.cluster.name,
                "source": read.cluster.source,
                "jobs": read.jobs,
                "gpu_jobs": read.gpu_jobs,
                "gpu_time_s": read.gpu_time_s,
                "first_submission": read.first or None,
                "last_submission": read.last or None,
                "compared": read.compared,
            }
            for read in report.clusters
        ],
        "findings": [asdict(finding) for finding in report.findings],
        "notes": [
            {"cluster": note.cluster, "check": note.check, "rows": note.rows, "action": note.action,
             "sentence": note.sentence, "examples": list(note.examples)}
            for note in report.notes
        ],
        "analyses": [
            {"name": entry.analysis.name, "title": entry.analysis.title, "source": entry.analysis.source,
             "left_out": entry.left_out or None}
            for entry in report.entries
        ],
        "numbers": report.numbers,
    }  # fmt: skip
    return json.dumps(_told(made), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _told(value: Any) -> Any:
    """The same with null for what is no finite number, which JSON has no word for."""
    if isinstance(value, dict):
        return {key: _told(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_told(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    # NumPy's own numbers, if an analysis let one through.
    return value.item() if hasattr(value, "item") else value
