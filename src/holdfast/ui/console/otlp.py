"""Send the ledger's new events and incidents to an OpenTelemetry collector, by OTLP over HTTP.

The standard variables configure the sending, such as `OTEL_EXPORTER_OTLP_ENDPOINT`. The console
sends, not the supervisor: a collector that does not answer delays no recovery.

Every event is sent at least once. The position of the last sent records is a file, written after
the collector has accepted them: a console that is killed in between sends them again.
"""

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Select, func, select

from holdfast.core import words
from holdfast.core.atomic import write_atomic
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Ledger, schema
from holdfast.ui.console.queries.paging import LIMIT_S, plain

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import ReadableLogRecord

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT")
POSITION_FILE = "otlp-position"
LOOK_S = 5.0
BATCH_LIMIT = 500
"""The most records of each table in one request."""
DATA_LIMIT = 4000
"""The most characters of an event's data."""
WARNINGS = ("proposal", "notify_failed", "node_lost", "trouble")
Position = tuple[int, int]
"""The ids of the last event and of the last incident."""
KEYS = (schema.events.c.event_id, schema.incidents.c.incident_id)
NONE_YET: Position = (0, 0)


def is_configured(environment: Mapping[str, str]) -> bool:
    """Return True if the environment names a collector."""
    return any(environment.get(name) for name in ENDPOINTS)


def rows_query(key: Any, after: int, until: int) -> Select[Any]:
    """Return the query for the rows of a table between two ids."""
    return select(key.table).where(key > after, key <= until).order_by(key).limit(BATCH_LIMIT)


class EventExport:
    """The sending of one console."""

    def __init__(self, ledger: Ledger, home: Path, complain: Callable[[str], None]) -> None:
        """Begin at the recorded position; without one, at the ledger's newest records.

        Raises:
            ImportError: the extra `otel` is not installed.
        """
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

        # This class reports a failure once; the library would report each attempt.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        logging.getLogger("opentelemetry").propagate = False
        self._ledger = ledger
        self._path = home / POSITION_FILE
        self._complain = complain
        self._exporter = OTLPLogExporter()
        self._seen: Position | None = None
        """The newest ids at the look before."""
        self._is_failing = False

    async def run(self) -> None:
        """Send until the task is cancelled."""
        try:
            while True:
                try:
                    is_more = await asyncio.to_thread(self.send_new)
                except (HoldfastError, OSError) as error:
                    self._fail(str(error))
                    is_more = False
                if not is_more:
                    await asyncio.sleep(LOOK_S)
        finally:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def send_new(self) -> bool:
        """Send one batch of new records; return True if there are more to send now.

        Raises:
            HoldfastError: the ledger cannot be read.
            OSError: the position cannot be read or written.
        """
        from opentelemetry.sdk._logs.export import LogRecordExportResult

        with self._ledger.bounded_reading(LIMIT_S) as connection:
            newest = _newest(connection)
            # A row with a lower id may appear after a row with a higher id, if two transactions end
            # in the other order. So export a row only one pass after it was first seen.
            until, self._seen = self._seen, newest
            position = self._position(newest)
            if until is None:
                return False
            events, incidents = (
                plain(connection, rows_query(key, after, last))
                for key, after, last in zip(KEYS, position, until, strict=True)
            )
        if not events and not incidents:
            return False
        records = [*map(_event, events), *map(_incident, incidents)]
        if self._exporter.export(records) is not LogRecordExportResult.SUCCESS:
            self._fail("The collector did not accept events")
            return False
        self._is_failing = False
        self._write(
            (
                events[-1]["event_id"] if events else position[0],
                incidents[-1]["incident_id"] if incidents else position[1],
            )
        )
        return BATCH_LIMIT in (len(events), len(incidents))

    def _position(self, newest: Position) -> Position:
        try:
            event_id, incident_id = map(int, self._path.read_text().split())
        except (FileNotFoundError, ValueError):
            self._write(newest)
            return newest
        if event_id > newest[0] or incident_id > newest[1]:  # the file belongs to another ledger
            self._write(newest)
            return newest
        return event_id, incident_id

    def _write(self, position: Position) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, f"{position[0]} {position[1]}\n".encode())

    def _fail(self, why: str) -> None:
        if not self._is_failing:
            self._complain(f"OpenTelemetry: {why}. The events are kept, and sent later.")
        self._is_failing = True


def _newest(connection: Connection) -> Position:
    event_id, incident_id = (
        int(connection.execute(select(func.max(key))).scalar() or 0) for key in KEYS
    )
    return event_id, incident_id


def _event(row: Mapping[str, Any]) -> "ReadableLogRecord":
    said = words.clean(str(row["data"].get("text") or row["kind"]))
    data = words.shorten(json.dumps(row["data"], default=str), DATA_LIMIT)
    return _record(
        row, f"holdfast.{row['kind']}", row["at_s"], said,
        "WARN" if row["kind"] in WARNINGS else "INFO", {"holdfast.data": data},
    )  # fmt: skip


def _incident(row: Mapping[str, Any]) -> "ReadableLogRecord":
    reason = words.clean(str(row["diagnosis"].get("reason") or "Unknown"))
    attributes = {
        "holdfast.incident.id": row["incident_id"],
        "holdfast.incident.kind": row["kind"],
        "holdfast.incident.reason": reason,
        "holdfast.incident.action": row["action"],
        "holdfast.step": row["step"],
    }
    said = f"{reason}. {words.clean(row['explanation'])}"
    return _record(row, "holdfast.incident", row["detected_at_s"], said, "ERROR", attributes)


def _record(
    row: Mapping[str, Any],
    name: str,
    at_s: float,
    said: str,
    severity: str,
    more: Mapping[str, Any],
) -> "ReadableLogRecord":
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    attributes = {
        "holdfast.run.id": row["run_id"],
        "holdfast.attempt": row["attempt"],
        "holdfast.rank": row["rank"],
        **more,
    }
    at_ns = int(at_s * 1e9)
    service = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "holdfast"}
    return ReadableLogRecord(
        log_record=LogRecord(
            timestamp=at_ns,
            observed_timestamp=at_ns,
            severity_text=severity,
            severity_number=SeverityNumber[severity],
            body=said,
            event_name=name,
            attributes={key: value for key, value in attributes.items() if value is not None},
        ),
        resource=Resource.create(service),
        instrumentation_scope=InstrumentationScope("holdfast", version("holdfast")),
    )
