"""Read Holdfast's own ledger, where every attempt of every supervised run counts as a job.

An attempt is submitted when the previous attempt ended, or when the run began. The time in the
queue is therefore the time that a restart took. The GPUs of a job are its ranks, since the ledger
does not record whether a rank uses a GPU or a CPU. The table does not have the share of time in
which a run made progress; `holdfast.core.accounting` computes this share from the same ledger.
"""

import shlex
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from holdfast.core.ledger import Attempt, Event, Incident, Ledger, Run
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import BadTrace
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.reading import Reading, Source
from holdfast.trace.sources.rows import read_rows

if TYPE_CHECKING:
    import duckdb

NEXT_STEP: Final = "Name a ledger.db, or the URL that `holdfast run --ledger` was given."
COLUMNS: Final = (
    "cluster", "job_id", "attempt", "name", "state", "reason", "exit_code", "submit_at", "start_at", "end_at", "run_s",
    "queue_s", "gpu_num", "node_num", "nodes", "zone_offset",
)  # fmt: skip
_MAGIC: Final = b"SQLite format 3\0"
_STATES: Final = {
    "completed": "COMPLETED",
    "failed": "FAILED",
    "stopped": "CANCELLED",
    "running": "RUNNING",
    "queued": "NODE_FAIL",
}


def read_ledger(connection: "duckdb.DuckDBPyConnection", path: Path, table: str) -> Reading:
    """Read the SQLite ledger at a path.

    Raises:
        BadTrace: the path holds no ledger, or a ledger without a started run.
        LedgerError: the ledger cannot be opened.
    """
    # Opening turns any SQLite file into a ledger, so a read-only check comes first.
    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)
        ) as database:
            found = database.execute(
                "SELECT 1 FROM sqlite_master WHERE name = 'incidents'"
            ).fetchone()
    except sqlite3.Error as error:
        raise BadTrace(path, f"expected a ledger: {error}.", next_step=NEXT_STEP) from None
    if found is None:
        raise BadTrace(
            path, "expected a ledger; this SQLite database has no incidents.", next_step=NEXT_STEP
        )
    return _read(connection, f"sqlite:///{quote(str(path.absolute()))}", table)


def read_url(connection: "duckdb.DuckDBPyConnection", url: str, table: str) -> Reading:
    """Read the ledger at a SQLAlchemy URL.

    Args:
        connection: the database that receives the rows.
        url: the URL, such as `postgresql://HOST/holdfast` or `sqlite:///PATH`.
        table: the name of the table for the rows.

    Raises:
        BadTrace: the URL is malformed, or there is no ledger with a started run at the URL.
        LedgerError: the ledger cannot be opened.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise BadTrace(
            "the ledger", "expected a URL such as postgresql://HOST/holdfast.", next_step=NEXT_STEP
        ) from None
    if parsed.get_backend_name() == "sqlite":
        return read_ledger(connection, Path(parsed.database or ""), table)
    return _read(connection, url, table)


def _read(connection: "duckdb.DuckDBPyConnection", url: str, table: str) -> Reading:
    with Ledger.open(url) as ledger:
        count = read_rows(
            connection, table, {name: JOB_COLUMNS[name] for name in COLUMNS}, _rows(ledger)
        )
    if not count:
        raise BadTrace("the ledger", "It holds no run that was started.", next_step=NEXT_STEP)
    cluster = Cluster(name=SOURCE.name, source=SOURCE.name)
    return replace(Reading.of(connection, table, cluster), ledger_url=url)


def recognises(path: Path) -> bool:
    """Return True if a file is an SQLite database that holds a ledger, or is named ledger.db."""
    try:
        with path.open("rb") as file:
            start = file.read(65536)
    except OSError:
        return False
    # A new ledger may still have all its tables in the write-ahead log beside the file.
    return start.startswith(_MAGIC) and (path.name == "ledger.db" or b"TABLE incidents" in start)


def _rows(ledger: Ledger) -> Iterator[tuple[Any, ...]]:
    for run in ledger.runs():
        attempts = ledger.attempts(run.run_id)
        incidents = {
            incident.attempt: incident for incident in reversed(ledger.incidents(run.run_id))
        }
        events = ledger.events(run.run_id)
        submit_s = run.started_at_s
        for attempt in attempts:
            yield _row(
                run,
                attempt,
                submit_s,
                incidents.get(attempt.number),
                events,
                last=attempt is attempts[-1],
            )
            submit_s = attempt.ended_at_s or submit_s


def _row(
    run: Run,
    attempt: Attempt,
    submit_s: float,
    incident: Incident | None,
    events: Sequence[Event],
    *,
    last: bool,
) -> tuple[Any, ...]:
    # A killed supervisor leaves its last attempt as running; then the run's own state counts.
    outcome = run.state if attempt.outcome == "running" and last else attempt.outcome
    start_s = max(attempt.started_at_s, submit_s)
    end_s = attempt.ended_at_s or (run.ended_at_s if last else None)
    return (
        SOURCE.name,
        run.run_id,
        attempt.number - 1,
        shlex.join(run.command),
        _STATES[outcome],
        incident.diagnosis.get("reason") if incident is not None else None,
        _exit_code(run, attempt, incident, events, last=last),
        submit_s,
        start_s,
        end_s,
        None if end_s is None else end_s - start_s,
        start_s - submit_s,
        _ranks(run, attempt, events),
        1,
        [run.host],
        "+00:00",
    )


def _exit_code(
    run: Run, attempt: Attempt, incident: Incident | None, events: Sequence[Event], *, last: bool
) -> int | None:
    """Return the exit code of the rank that failed first, or of the run if no rank's is known.

    For a rank that was killed by a signal, it is 128 plus the signal's number.
    """
    if attempt.outcome == "completed":
        return 0
    for event in events:
        known = incident is None or incident.rank is None or event.rank == incident.rank
        if (event.kind, event.attempt) == ("rank_exited", attempt.number) and known:
            signal, code = event.data.get("signal"), event.data.get("exit_code")
            return 128 + abs(int(signal)) if signal else int(code) if code is not None else None
    return run.exit_code if last else None


def _ranks(run: Run, attempt: Attempt, events: Sequence[Event]) -> int | None:
    """Return the number of ranks that the ranks reported, else the number in the run's options."""
    for event in events:
        if (event.kind, event.attempt) == ("started", attempt.number) and event.data.get(
            "world_size"
        ):
            return int(event.data["world_size"])
    # torchrun's own command gives the number of ranks; the option `nproc` is then always 1.
    is_torchrun = bool(run.command) and Path(run.command[0]).name == "torchrun"
    return None if is_torchrun else run.options.get("nproc")


SOURCE: Final = Source(
    name="holdfast",
    title="Holdfast's own ledger",
    recognises=recognises,
    read=read_ledger,
)
