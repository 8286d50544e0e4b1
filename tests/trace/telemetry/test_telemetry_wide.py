"""Compare wide CSV with the csv module: every value counted once, every bad field found, for any
file.
"""

import csv
import math
import random
import tracemalloc
from collections import Counter, defaultdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.core.errors import BadUse
from holdfast.trace.errors import BadTrace
from holdfast.trace.telemetry import value_counts, wide_csv
from holdfast.trace.telemetry.metrics import METRICS, is_sentinel, metric_named
from holdfast.trace.telemetry.scan import scan_wide
from holdfast.trace.telemetry.values import FieldValues
from holdfast.trace.telemetry.wide_csv import blocks, open_wide, parse_time

START = datetime(2023, 7, 1, tzinfo=UTC)


def write_wide(
    path: Path, rows: list[list[str]], *, devices: int | None = None, step_s: int = 15
) -> Path:
    names = [f"10.0.0.{index // 8}-{index % 8}" for index in range(devices or len(rows[0]))]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["Time", *names])
        for number, row in enumerate(rows):
            writer.writerow([(START + timedelta(seconds=step_s * number)).isoformat(" "), *row])
    return path


def counted(
    path: Path, *, decimals: int, low: float, high: float, factor: float = 1.0
) -> Counter[float]:
    """Count with the csv module, float() and round()."""
    counts: Counter[float] = Counter()
    with path.open(newline="") as file:
        for row in list(csv.reader(file))[1:]:
            for field in row[1:]:
                value = float(field or "nan") * factor
                if low <= value <= high:
                    counts[round(value, decimals)] += 1
    return counts


def as_counter(distribution) -> Counter[float]:
    return Counter(
        {
            round(float(v), 6): int(n)
            for v, n in zip(distribution.values, distribution.weights, strict=True)
        }
    )


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_counts_are_those_of_the_csv_module(tmp_path, threads):
    rng = random.Random(threads)
    texts = [
        "",
        "0",
        "0.0",
        "100",
        "100.0",
        "7",
        "+7",
        "7e0",
        "99.4",
        " 12 ",
        "nan",
        "NaN",
        "1e2",
        "007",
    ]
    path = write_wide(
        tmp_path / "GPU_UTIL.csv", [[rng.choice(texts) for _ in range(9)] for _ in range(700)]
    )
    scan = scan_wide(path, METRICS["GPU_UTIL"], threads=threads)
    values, counts = scan.counts.result()
    expected = counted(path, decimals=0, low=0, high=100)
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == expected
    assert scan.rows == 700
    assert scan.dropped["missing"] == 700 * 9 - sum(expected.values())


def test_a_hundred_thousand_distinct_decimals(tmp_path):
    rng = np.random.default_rng(0)
    rows = [[f"{value:.3f}" for value in row] for row in rng.uniform(0, 100, (800, 120))]
    path = write_wide(tmp_path / "SM_ACTIVE.csv", rows)
    found = as_counter(value_counts(path))
    expected = counted(path, decimals=3, low=0, high=100)
    assert len(expected) > 60_000
    assert found == Counter({round(value, 6): n for value, n in expected.items()})


def test_fields_hardly_ever_alike_are_parsed_one_by_one(tmp_path):
    rng = np.random.default_rng(1)
    rows = [[f"{value:.3f}" for value in row] for row in rng.uniform(0, 9e9, (300, 40))]
    rows[7][3], rows[8][4], rows[9][5], rows[9][6] = (
        "",
        "9223372036854775794",
        "-5",
        "12345678901234567890123456.5",
    )
    path = write_wide(tmp_path / "NODE_IB_SEND.csv", rows)
    metric = METRICS["NODE_IB_SEND"]
    wide = open_wide(path)
    few, many = FieldValues(metric, 1.0, limit=50), FieldValues(metric, 1.0)
    by_few = np.concatenate(
        [block.values for block in blocks(wide, few, wide.body, wide.size_bytes)]
    )
    by_many = np.concatenate(
        [block.values for block in blocks(wide, many, wide.body, wide.size_bytes)]
    )
    assert few.dictionary is None
    assert many.dictionary is not None
    np.testing.assert_array_equal(by_few, by_many)
    expected = np.array([[float(np.float32(float(text or "nan"))) for text in row] for row in rows])
    expected[8, 4] = expected[9, 5] = expected[9, 6] = math.nan
    np.testing.assert_array_equal(by_few, expected)
    assert few.dropped["sentinel"] == 2  # a number beyond an int64 is no value either
    assert few.dropped["out-of-range"] == 1


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.lists(
        st.lists(
            st.one_of(
                st.just(""),
                st.integers(-5, 120).map(str),
                st.floats(0, 130).map(repr),
                st.just("0.0"),
            ),
            min_size=3,
            max_size=3,
        ),
        min_size=1,
        max_size=30,
    ),
    block_bytes=st.integers(1, 400),
    crlf=st.booleans(),
    last_newline=st.booleans(),
    blank=st.booleans(),
)
def test_any_file_in_blocks_of_any_size(tmp_path, rows, block_bytes, crlf, last_newline, blank):
    path = write_wide(tmp_path / "GPU_UTIL.csv", rows)
    text = path.read_text()
    if blank:
        text = text.replace("\n", "\n\n")
    if not last_newline:
        text = text.rstrip("\n")
    path.write_bytes((text.replace("\n", "\r\n") if crlf else text).encode())
    wide = open_wide(path)
    fields = FieldValues(METRICS["GPU_UTIL"], 1.0)
    read = [
        block.values
        for block in blocks(wide, fields, wide.body, wide.size_bytes, block_bytes=block_bytes)
    ]
    numbers = [[float(np.float32(float(field or "nan"))) for field in row] for row in rows]
    expected = [[value if 0 <= value <= 100 else math.nan for value in row] for row in numbers]
    np.testing.assert_array_equal(np.concatenate(read), expected)


def test_totals_are_those_of_a_plain_loop(tmp_path):
    rng = random.Random(3)
    rows = [[rng.choice(["0", "5", "97", "100", ""]) for _ in range(11)] for _ in range(900)]
    for number in (100, 101, 102, 500):
        rows[number][2] = ""
    path = write_wide(tmp_path / "GPU_UTIL.csv", [[*row, ""] for row in rows])
    for threads in (1, 3):
        scan = scan_wide(path, METRICS["GPU_UTIL"], threads=threads)
        by_device = [[float(row[index]) for row in rows if row[index]] for index in range(11)]
        assert scan.totals.n.tolist() == [*map(len, by_device), 0]
        assert scan.totals.sum.tolist() == [*map(sum, by_device), 0]
        assert scan.totals.n_zero.tolist() == [*(values.count(0) for values in by_device), 0]
        assert scan.totals.min[:11].tolist() == [*map(min, by_device)]
        assert scan.totals.max[:11].tolist() == [*map(max, by_device)]
        hours = defaultdict(list)
        gaps, gap_s = 0, 0.0
        last: dict[int, int] = {}
        for number, row in enumerate(rows):
            for index, field in enumerate(row):
                if field:
                    hours[number * 15 // 3600 + int(START.timestamp()) // 3600].append(float(field))
                    if number - last.get(index, number) > 2:
                        gaps += 1
                        gap_s += (number - last[index] - 1) * 15
                    last[index] = number
        assert {h: (len(v), sum(v), v.count(0)) for h, v in hours.items()} == scan.totals.hours
        assert gaps > 10
        assert (scan.totals.gaps.sum(), scan.totals.gap_s.sum()) == (gaps, gap_s)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_repeated_time_counts_once_wherever_it_is(tmp_path, threads):
    path = write_wide(tmp_path / "GPU_UTIL.csv", [[str(number % 100)] * 3 for number in range(400)])
    header, *lines = path.read_text().splitlines()
    again = lines[3].replace(",3,3,3", ",50,50,50")
    path.write_text("\n".join([header, *lines[:300], again, again, *lines[300:]]) + "\n")
    scan = scan_wide(path, METRICS["GPU_UTIL"], threads=threads)
    values, counts = scan.counts.result()
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {
        float(value): 12 for value in range(100)
    }
    assert scan.rows == 400
    assert len(scan.duplicates) == 2
    assert scan.backward_steps == 1  # the second copy is no step, because its time is the same
    assert scan.duplicates[0] == round((START.timestamp() + 45) * 1e6)


@pytest.mark.parametrize(
    ("line", "field", "problem", "column"),
    [
        (3, "idle", "'idle' is not a number", "10.0.0.0-1"),
        (8903, "1_0", "'1_0' is not a number", "10.0.0.0-1"),
        (8903, "a text that is longer than sixteen bytes", "is not a number", "10.0.0.0-1"),
        (8903, "1,2", "5 fields, where the first line has 4", None),
    ],
)
def test_a_bad_field_is_found(tmp_path, line, field, problem, column):
    path = write_wide(
        tmp_path / "GPU_UTIL.csv", [["1", "2", "3"] for _ in range(9000)]
    )  # two blocks
    lines = path.read_text().splitlines()
    parts = lines[line - 1].split(",")
    lines[line - 1] = ",".join([*parts[:2], field, *parts[3:]])
    path.write_text("\n".join(lines))
    for threads in (1, 3):
        with pytest.raises(BadTrace, match=problem) as caught:
            scan_wide(path, METRICS["GPU_UTIL"], threads=threads)
        assert caught.value.line == line
        assert caught.value.column == column
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no wide table"),
        ("Time,\x00\x01", "no wide table"),
        ("job_id,duration\n1,2\n", "first column is 'job_id'"),
        ("Time\n", "no wide table"),
        (f"Time,{'a' * 200_000}\n", "no wide table"),
        ("Time,a\nyesterday,1\n", "'yesterday' is not a time stamp"),
        (
            "Time,a,b\n2023-07-01 00:00:00,1,2\n2023-07-01 00:00:15,1",
            "2 fields, where the first line has 3",
        ),
    ],
)
def test_what_is_no_wide_file_is_said(tmp_path, text, problem):
    path = tmp_path / "GPU_UTIL.csv"
    path.write_text(text)
    with pytest.raises(BadTrace, match=problem):
        value_counts(path)


def test_a_header_alone_has_no_samples(tmp_path):
    path = tmp_path / "GPU_UTIL.csv"
    path.write_text("Time,a,b\n")
    assert value_counts(path).total == 0


@pytest.mark.parametrize("head", ["Time,a\n2023-07-01 00:00:00,1\n", "Time,a\n", "Time,", ""])
def test_an_endless_line_is_refused_without_being_held(tmp_path, monkeypatch, head):
    monkeypatch.setattr(wide_csv, "LONGEST_LINE_BYTES", 1 << 20)
    path = tmp_path / "GPU_UTIL.csv"
    with path.open("w") as file:
        file.write(head)
        file.truncate(len(head) + (1 << 28))
    tracemalloc.start()
    try:
        with pytest.raises(BadTrace, match="a line is longer than 1 MiB") as caught:
            scan_wide(path, METRICS["GPU_UTIL"], threads=4)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.line == head.count("\n") + 1


def test_dcgms_words_for_no_value_are_dropped_and_counted(tmp_path):
    words = ["9223372036854775794", "9223372036854775792", "9.223372036854776e+18", "2147483632", "2147483634.0",
             "140737488355328.0", "140737488355330"]  # fmt: skip
    path = write_wide(
        tmp_path / "GPU_TEMP.csv", [[word, "65"] for word in words] + [["644245923", "-300"]]
    )
    scan = scan_wide(path, METRICS["GPU_TEMP"])
    assert scan.dropped["sentinel"] == len(words)
    assert scan.dropped["out-of-range"] == 2
    assert scan.counts.result()[1].tolist() == [len(words)]
    assert not is_sentinel(2147483631.0)
    assert not is_sentinel(2147483648.0)
    assert not is_sentinel(140737488355344.0)


def test_ratios_become_per_cent_and_per_cent_stays(tmp_path):
    ratios = write_wide(tmp_path / "SM_ACTIVE.csv", [["0", "0.25"], ["1", "0.5"]])
    assert value_counts(ratios).values.tolist() == [0, 25, 50, 100]
    per_cent = write_wide(tmp_path / "DRAM_ACTIVE.csv", [["0", "0.25"], ["1", "1.5"]])
    assert value_counts(per_cent).values.tolist() == [0, 0.25, 1, 1.5]
    exported = write_wide(tmp_path / "DCGM_FI_PROF_SM_ACTIVE.csv", [["0", "0.25"], ["1", "0.5"]])
    assert value_counts(exported).values.tolist() == [0, 25, 50, 100]


def test_names_of_metrics():
    assert metric_named("GPU_UTIL-2023-07")[0] is METRICS["GPU_UTIL"]
    assert metric_named("DCGM_FI_DEV_GPU_UTIL") == (METRICS["GPU_UTIL"], 1.0)
    assert metric_named("DCGM_FI_PROF_DRAM_ACTIVE") == (METRICS["DRAM_ACTIVE"], 100.0)
    assert metric_named("SM_OCCUPANCY") == (METRICS["SM_OCCUPANCY"], None)
    assert metric_named("GPU_AB_Power")[0].name == "GPU_SERVER_POWER"
    assert metric_named("trace_seren") is None
    assert "any kernel" in METRICS["GPU_UTIL"].note
    assert METRICS["POWER_USAGE"].resolution == pytest.approx(0.1)


def test_a_file_of_no_known_metric_is_refused(tmp_path):
    path = write_wide(tmp_path / "mine.csv", [["1"]])
    with pytest.raises(BadUse, match="Name it after the metric that it holds"):
        value_counts(path)
    assert value_counts(path, "GPU_UTIL").total == 1
    with pytest.raises(BadUse, match="no metric 'NOISE'"):
        value_counts(path, "NOISE")


@pytest.mark.parametrize(
    ("text", "seconds", "offset"),
    [
        ("2023-07-01 08:00:00+08:00", 1688169600, "+08:00"),
        ("2023-07-01 00:00:00", 1688169600, ""),
        ("2023-07-01T00:00:00Z", 1688169600, "Z"),
        ("2023-07-01T00:00:00.250-03:30", 1688182200.25, "-03:30"),
        ("1688169600", 1688169600, "Z"),
        ("1688169600.5", 1688169600.5, "Z"),
    ],
)
def test_times(text, seconds, offset):
    assert parse_time(text) == (round(seconds * 1e6), offset)


@pytest.mark.parametrize("text", ["", "12", "-1688169600", "2023-13-01 00:00:00", "1.2.3", "noon"])
def test_what_is_no_time(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the message is the library's
        parse_time(text)


def plain_onsets(rows: list[list[str]]) -> list[tuple[int, int, int]]:
    """Return row, device and code of each change from no fault into a fault.

    Garbage counts as not measured.
    """
    found, gauge = [], {}
    for number, row in enumerate(rows):
        for device, field in enumerate(row):
            if field != "644245923":
                code = int(field or 0)
                if code and gauge.get(device) == 0:
                    found.append((number, device, code))
                gauge[device] = code
    return sorted(found)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_onsets_are_those_of_a_plain_loop_however_the_file_is_cut(tmp_path, threads):
    rng = random.Random(5)
    rows, state = [], [rng.choice(["", "43", "0"]) for _ in range(6)]
    for _ in range(400):
        state = [
            rng.choice(["", "0", "43", "31", "644245923"]) if rng.random() < 0.3 else field
            for field in state
        ]
        rows.append(state)
    path = write_wide(tmp_path / "XID_ERRORS.csv", rows)
    expected = plain_onsets(rows)
    assert len(expected) > 100
    scan = scan_wide(path, METRICS["XID_ERRORS"], threads=threads)
    start_us = round(START.timestamp() * 1e6)
    found = [
        ((onset.at_us - start_us) // 15_000_000, onset.device, onset.code)
        for onset in scan.xid_onsets
    ]
    assert found == expected
    assert scan.onsets.left_censored == sum(
        next(field for row in rows if (field := row[device]) != "644245923") not in ("", "0")
        for device in range(6)
    )
