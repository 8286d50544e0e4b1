"""The far end of `slurm`: what each element of the job array runs, as `python -m holdfast.cluster.slurm_task MANIFEST`.

An element runs its share of the tasks of the manifest one after the other, and leaves a record a task: a file with the
exit code. A requeued element (its node died, it was preempted) runs those again that have neither a result nor a
record, or whose record is of a signal, which may have been the requeue itself.
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
    """What the array is to run.

    Attributes:
        elements: of the array; element E has the tasks E, E + elements, E + 2 elements, ….
        records: the folder of the records.
        commands: argv of each task.
        results: path of each task's result.
        logs: path of each task's log.
    """

    elements: int
    records: str
    commands: tuple[tuple[str, ...], ...]
    results: tuple[str, ...]
    logs: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        write_atomic(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        told = json.loads(path.read_bytes())
        return cls(
            elements=told["elements"],
            records=told["records"],
            commands=tuple(tuple(command) for command in told["commands"]),
            results=tuple(told["results"]),
            logs=tuple(told["logs"]),
        )


def read_record(records: Path, number: int) -> int | None:
    """The exit code that task `number` left, None if it left none."""
    try:
        return int((records / str(number)).read_text())
    except FileNotFoundError:
        return None


def run_element(manifest: Manifest, element: int) -> bool:
    """Run the tasks of one element; whether all have their result."""
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
