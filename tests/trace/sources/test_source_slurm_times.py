"""Read the times of Slurm's records: zones, forms, and clocks that change."""

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from normalised_rows import database, notes_of, read_file, rows_of, unix_s
from slurm_records import record, write_records

from holdfast.trace.sources.slurm.fields import zone_of
from holdfast.trace.sources.slurm.sacct import SOURCE, read_sacct


@pytest.fixture
def write(tmp_path):
    return partial(write_records, tmp_path)


def test_local_times_are_of_the_zone_that_is_told(write):
    local = ("2023-03-01T00:18:22", "2023-03-01T00:19:22", "2023-03-01T00:20:22")
    path = write(record(times=local))
    at = datetime(2023, 2, 28, 16, 18, 22, tzinfo=UTC).timestamp()
    reading, (row,) = read_file(SOURCE, path, zone="Asia/Shanghai")
    assert unix_s(row["submit_at"]) == at
    assert reading.clusters[0].utc_offset_h == 8
    assert not reading.notes
    with database() as connection:
        reading = read_sacct(connection, path, "jobs_0", zone=zone_of("+08:00"))
        assert unix_s(rows_of(connection, reading)[0]["submit_at"]) == at


def test_local_times_without_a_zone_are_utc_and_it_is_said(write):
    reading, (row,) = read_file(
        SOURCE, write(record(times=("2023-03-01T00:18:22", "Unknown", "None")))
    )
    assert unix_s(row["submit_at"]) == datetime(2023, 3, 1, 0, 18, 22, tzinfo=UTC).timestamp()
    assert notes_of(reading) == {"slurm-no-zone": 1}


def instants(write, zone, *times):
    """Return the times of each record as Unix times."""
    path = write(*(record(str(number), times=each) for number, each in enumerate(times)))
    _, rows = read_file(SOURCE, path, zone=zone)
    return [
        tuple(unix_s(row[name]) for name in ("submit_at", "start_at", "end_at")) for row in rows
    ]


def test_times_of_every_form(write):
    at = datetime(2023, 2, 28, 16, 18, 22, tzinfo=UTC).timestamp()
    forms = [("2023-02-28T16:18:22Z", "2023-03-01T00:18:22+08:00", "2023-02-28T11:18:22-0500")]
    forms += [
        ("2023-03-01T00:18:22", str(int(at)), "Unknown"),
        ("2023-03-01T00:18:22", "None", "0"),
    ]
    assert instants(write, "Asia/Shanghai", *forms) == [
        (at, at, at),
        (at, at, None),
        (at, None, None),
    ]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "+05:30", "UTC"])
def test_local_times_of_a_whole_year_are_as_python_has_them(write, zone):
    local = [datetime(2023, 1, 1, 0, 30) + timedelta(hours=7 * step) for step in range(1250)]  # noqa: DTZ001
    expected = [at.replace(tzinfo=zone_of(zone)).timestamp() for at in local]
    header = "JobID|State|Submit"
    path = write(*(f"{n}|COMPLETED|{at.isoformat()}" for n, at in enumerate(local)), header=header)
    _, rows = read_file(SOURCE, path, zone=zone)
    assert {int(row["job_id"]): unix_s(row["submit_at"]) for row in rows} == dict(
        enumerate(expected)
    )


def test_the_hour_that_a_clock_goes_through_twice(write):
    # In Berlin on 2023-10-29 the clock went from 03:00 back to 02:00, at 01:00 UTC.
    start = datetime(2023, 10, 29, 0, 50, tzinfo=UTC).timestamp()
    assert instants(
        write,
        "Europe/Berlin",
        ("2023-10-29T01:50:00", "2023-10-29T02:50:00", "2023-10-29T02:10:00"),
        ("2023-10-29T01:50:00", "2023-10-29T02:50:00", "2023-10-29T02:55:00"),
        ("2023-10-29T02:55:00", "2023-10-29T02:50:00", "2023-10-29T03:50:00"),
    ) == [
        (start - 3600, start, start + 1200),
        (start - 3600, start, start + 300),
        (start + 300, start + 3600, start + 7200),
    ]


def test_midnight_and_the_end_of_a_year(write):
    ((before, after, _),) = instants(
        write, "UTC", ("2023-12-31T23:59:59", "2024-01-01T00:00:00", "Unknown")
    )
    assert after - before == 1
    ((before, after, _),) = instants(
        write, "UTC", ("2024-02-28T00:00:00", "2024-03-01T00:00:00", "Unknown")
    )
    assert after - before == 2 * 86400
