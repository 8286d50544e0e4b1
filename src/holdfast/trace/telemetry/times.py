"""Time stamps of telemetry: ISO 8601 with an offset or without, or seconds since the epoch."""

from datetime import UTC, datetime

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def parse_time(text: str) -> tuple[int, str]:
    """Microseconds since the Unix epoch, UTC, and the offset as written; '' where none was: then it is UTC.

    `2023-07-01 08:00:00+08:00`, `2023-07-01T00:00:00Z`, `2023-07-01 00:00:00` and `1688169600` (or with decimals).

    Raises:
        ValueError: it is none of these.
    """
    text = text.strip().strip('"')
    number = text.replace(".", "", 1)
    if number.isascii() and number.isdigit() and "-" not in text:
        if not 1e8 <= (seconds := float(text)) < 1e11:
            raise ValueError(text)
        return round(seconds * 1e6), "Z"
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        return _microseconds(moment.replace(tzinfo=UTC)), ""
    return _microseconds(moment), "Z" if text.endswith("Z") else text[19:].lstrip(".0123456789")


def _microseconds(moment: datetime) -> int:
    # Whole numbers throughout: a float of seconds would lose the microsecond.
    passed = moment - EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds
