"""Run the tasks of one element of a Slurm job array, for `slurm`.

Each element runs `python -m holdfast.cluster.slurm_task MANIFEST`, which runs the element's share
of the manifest's tasks, one after another. Each task leaves a record, a file with its exit code.
Slurm requeues an element after preemption or the death of its node. A requeued element skips tasks
that have a result, and tasks whose recorded exit code is 0 or more. A task whose record shows a
signal runs again, because the signal may have come from the requeue.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from holdfast.cluster.leash import run_on_leash
from holdfast.core.atomic import write_atomic


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The tasks of a job array, in the file that all elements read.

    Attributes:
        elements: the number of elements; element E has the tasks E, E + elements, E + 2 elements,
            ….
        records: the folder of the records.
        commands: the command of each task.
        results: the path of each task's result.
        logs: the path of each task's log.
    """

    elements: int
    records: str
    commands: tuple[tuple[str, ...], ...]
    results: tuple[str, ...]
    logs: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Write the manifest, whole or not at all."""
        write_atomic(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest that `write` wrote."""
        fields = json.loads(path.read_bytes())
        return cls(
            elements=fields["elements"],
            records=fields["records"],
            commands=tuple(tuple(command) for command in fields["commands"]),
            results=tuple(fields["results"]),
            logs=tuple(fields["logs"]),
        )


def read_record(records: Path, number: int) -> int | None:
    """Return the exit code that task `number` has recorded; None if there is no record."""
    try:
        return int((records / str(number)).read_text())
    except FileNotFoundError:
        return None


def run_element(manifest: Manifest, element: int) -> bool:
    """Run the tasks of one element; return True if all of them have a result."""
    records = Path(manifest.records)
    for number in range(element, len(manifest.commands), manifest.elements):
        exit_code = read_record(records, number)
        if exit_code is not None and exit_code >= 0:
            continue
        if not Path(manifest.results[number]).exists():
            exit_code = run_on_leash(
                manifest.commands[number], Path(manifest.logs[number]), append=True
            )
        write_atomic(records / str(number), str(exit_code or 0).encode())
    return all(Path(result).exists() for result in manifest.results[element :: manifest.elements])


if __name__ == "__main__":
    sys.exit(
        0
        if run_element(Manifest.read(Path(sys.argv[1])), int(os.environ["SLURM_ARRAY_TASK_ID"]))
        else 1
    )
