"""Check that contradictions in telemetry are reported with counts, and nothing else."""

from pathlib import Path

from holdfast.trace.telemetry.checks import notes_of
from holdfast.trace.telemetry.metrics import METRICS
from holdfast.trace.telemetry.scan import scan_wide


def notes(path: Path, metric: str, lines: list[str]) -> dict[str, tuple[int, str, tuple[str, ...]]]:
    path.write_text("\n".join(lines) + "\n")
    scan = scan_wide(path, METRICS[metric], factor=None)
    return {note.check: (note.rows, note.action, note.examples) for note in notes_of(scan, "seren")}


def minute(number: int) -> str:
    return f"2023-07-01 {number // 60:02}:{number % 60:02}:00+08:00"


def test_a_clean_file_has_no_notes(tmp_path):
    lines = [
        "Time,a-0,a-1",
        *(f"{minute(number)},{number % 7},{number % 5 + 2}" for number in range(100)),
    ]
    assert notes(tmp_path / "GPU_UTIL.csv", "GPU_UTIL", lines) == {}


def test_a_file_without_a_sample_is_said_to_hold_none(tmp_path):
    for text in (["Time,a-0,a-1"], ["Time,a-0,a-1", ""]):
        assert notes(tmp_path / "GPU_UTIL.csv", "GPU_UTIL", text) == {
            "telemetry-empty": (0, "kept", ())
        }
    scan = scan_wide(tmp_path / "GPU_UTIL.csv", METRICS["GPU_UTIL"])
    assert notes_of(scan, "seren")[0].sentence.startswith("GPU_UTIL.csv: the file has no samples")


def test_silent_and_stuck_devices(tmp_path):
    lines = [
        "Time,a-0,a-1,a-2,a-3",
        *(f"{minute(number)},{60 + number % 3},,71.5,0" for number in range(100)),
    ]
    found = notes(tmp_path / "POWER_USAGE.csv", "POWER_USAGE", lines)
    assert found == {
        "telemetry-silent-device": (1, "kept", ("a-1",)),
        "telemetry-stuck": (1, "kept", ("a-2",)),
    }
    # Fifty minutes are no proof, and a temperature may stay constant.
    assert "telemetry-stuck" not in notes(tmp_path / "POWER_USAGE.csv", "POWER_USAGE", lines[:50])
    assert "telemetry-stuck" not in notes(tmp_path / "GPU_TEMP.csv", "GPU_TEMP", lines)


def test_gaps_are_those_beyond_two_intervals(tmp_path):
    missing = {10, 20, 21, 30, 31, 32}  # one, two and three samples: 2, 3 and 4 intervals apart
    lines = ["Time,a-0,a-1"]
    lines += [
        f"{minute(number)},1,{'' if number in missing else 2}"
        for number in range(100)
        if number not in (50, 51)
    ]
    scan_notes = notes(tmp_path / "GPU_UTIL.csv", "GPU_UTIL", lines)
    assert scan_notes == {"telemetry-gap": (4, "kept", ("a-1", "a-0"))}
    scan = scan_wide(tmp_path / "GPU_UTIL.csv", METRICS["GPU_UTIL"])
    (note,) = notes_of(scan, "seren")
    assert "4 gaps of more than two sampling intervals, 0.1 device hours in all" in note.sentence
    assert scan.totals.gap_s.tolist() == [120, 120 + 180 + 120]


def test_clocks_that_step_back_and_offsets_that_change(tmp_path):
    lines = ["Time,a-0"]
    lines += [f"{minute(number)},{number % 9}" for number in range(40)]
    lines += [f"{minute(number - 5)},{number % 9}" for number in range(40, 45)]  # all repeated
    lines += ["2023-06-30 17:00:00,3", "2023-06-30T16:59:30Z,3"]
    found = notes(tmp_path / "GPU_UTIL.csv", "GPU_UTIL", lines)
    assert found["telemetry-duplicate-time"] == (
        5, "dropped",
        tuple(f"2023-06-30 16:{35 + number}:00 UTC" for number in range(5)),
    )  # fmt: skip
    assert found["telemetry-clock-backwards"][:2] == (2, "kept")
    assert found["telemetry-offsets"][:2] == (42, "kept")


def test_a_coarser_unit_is_said(tmp_path):
    ratios = ["Time,a-0", f"{minute(0)},0.25", f"{minute(1)},1.0", f"{minute(2)},"]
    assert notes(tmp_path / "SM_ACTIVE.csv", "SM_ACTIVE", ratios) == {
        "telemetry-unit": (2, "mended", ())
    }
    megabytes = ["Time,a", f"{minute(0)},23695.482", f"{minute(1)},0.0"]
    path = tmp_path / "NODE_IB_SEND.csv"
    assert notes(path, "NODE_IB_SEND", megabytes) == {"telemetry-unit": (2, "mended", ())}
    scan = scan_wide(path, METRICS["NODE_IB_SEND"], factor=None)
    assert scan.counts.result()[0].tolist() == [0, 23_695_500_000]
