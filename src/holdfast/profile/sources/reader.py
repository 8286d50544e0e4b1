"""Read the GPUs in a process of its own, because a call into a GPU driver may never return.

`reader INTERVAL_S` opens the first source that works and prints JSON lines. The first line is
`{"source": …, "missing": …}`. After that, each byte on the standard input requests one line with
values. If the source ends, the reader opens the next one and prints a new first line.

The sampler waits for each answer only up to a deadline, and replaces a reader that does not answer.
The reader ends when its standard input is closed or its parent process ends.
"""

import json
import os
import sys
import time
from typing import Any

from holdfast.core.processes import die_with_parent
from holdfast.profile.recording import SeriesId
from holdfast.profile.sources.probe import Open, gpu_sources, probe
from holdfast.profile.sources.source import CannotRead, SourceEnded


def main() -> None:
    """Serve requests until the standard input is closed."""
    die_with_parent()
    serve(gpu_sources(float(sys.argv[1])))


def serve(sources: dict[str, Open]) -> None:
    """Answer each byte on the standard input with a line of values, until the input is closed."""
    source, missing = probe(sources)
    _print_line({"source": None if source is None else source.name, "missing": missing})
    has_given = False
    while source is not None and os.read(0, 1):
        try:
            values = source.read(now_ns := time.monotonic_ns())
        except SourceEnded as error:
            ended = source.name
            source.close()
            if not has_given:  # a source without values would end again
                sources = {name: one for name, one in sources.items() if name != ended}
            source, missing = probe(sources)
            if source is None or source.name != ended:
                missing = {ended: str(error), **missing}
            _print_line({"source": None if source is None else source.name, "missing": missing})
            has_given = False
            continue
        except CannotRead as error:
            _print_line({"error": str(error)})
            continue
        has_given = has_given or bool(values)
        rows = [
            [key.metric, key.source, key.device, key.interval_s, value]
            for key, value in values.items()
        ]
        _print_line({"t_ns": now_ns, "values": rows})


def values_of(answer: dict[str, Any]) -> dict[SeriesId, float]:
    """Parse the values in a line that `serve` printed."""
    return {
        SeriesId(metric, source, device=device, interval_s=interval_s): float(value)
        for metric, source, device, interval_s, value in answer["values"]
    }


def _print_line(answer: dict[str, Any]) -> None:
    line = json.dumps(answer).encode() + b"\n"
    while line:
        line = line[os.write(1, line) :]


if __name__ == "__main__":
    main()
