"""A recording's rows are held in columns: order, None, damaged numbers, memory."""

import json
import tracemalloc
from pathlib import Path

from holdfast.profile import Recording, RecordingWriter, SeriesId
from holdfast.profile.report.summary import summarize

PHASES = ("data", "forward", "backward", "communication", "optimizer")


def clocks() -> tuple[int, int]:
    return 0, 0


def test_rows_that_were_written_late_are_in_the_order_of_time(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, node="n", rank=1, clocks=clocks) as writer:
        writer.spans(2, [("forward", 30, 40), ("backward", 40, 60)])
        writer.spans(None, [("checkpoint_stall", 5, 9)])
        writer.spans(2, [("communication", 40, 50)])
        for at_ns in (7, 3):
            writer.memory(at_ns, None, allocated_bytes=1, reserved_bytes=1, peak_bytes=at_ns)
    with RecordingWriter(tmp_path, node="m", rank=0, clocks=clocks) as writer:
        writer.spans(1, [("forward", 100, 110)])

    recording = Recording.read(tmp_path)

    assert [(one.rank, one.node, one.start_ns, one.phase, one.step) for one in recording.spans] == [
        (0, "m", 100, "forward", 1),
        (1, "n", 5, "checkpoint_stall", None),
        (1, "n", 30, "forward", 2),
        (1, "n", 40, "backward", 2),
        (1, "n", 40, "communication", 2),
    ]
    assert [(rank, len(own)) for rank, own in recording.spans_by_rank()] == [(0, 1), (1, 4)]
    assert recording.spans_of(1) == recording.spans[1:]
    assert recording.spans_of(2) == ()
    assert [(one.at_ns, one.peak_bytes) for one in recording.memory_of(1)] == [(3, 3), (7, 7)]


def test_a_number_that_cannot_be_leaves_all_columns_alike(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, node="n", rank=0, clocks=clocks) as writer:
        writer.spans(1, [("forward", 10, 20)])
        for end_ns, step in ((1 << 70, 1), (1, 1 << 70)):
            spans = {"kind": "spans", "step": step, "base_ns": 0, "spans": [["data", 0, end_ns]]}
            with writer.path.open("a") as file:
                file.write(json.dumps(spans) + "\n")
        writer.spans(2, [("forward", 30, 40)])

    found = Recording.read(tmp_path).spans

    assert [(one.start_ns, one.end_ns, one.step) for one in found] == [(10, 20, 1), (30, 40, 2)]


def test_a_reader_and_a_summary_need_less_than_a_hundred_bytes_a_span(tmp_path: Path) -> None:
    steps = 4000  # so many that what a report needs without any span does not count
    with RecordingWriter(tmp_path, node="n", rank=0, clocks=clocks) as writer:
        for step in range(steps):
            at_ns = step * 1_000_000_000
            spans = [
                (name, at_ns + n * 1000, at_ns + n * 1000 + 900) for n, name in enumerate(PHASES)
            ]
            writer.spans(step, spans)
    Recording.read(tmp_path)  # what is loaded or interned once is not counted

    tracemalloc.start()
    recording = Recording.read(tmp_path)
    summary = summarize(recording, name="r")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(recording.spans) == steps * len(PHASES)
    assert len(summary.steps) == steps
    assert peak_bytes < 100 * len(recording.spans)


def test_series_of_a_node_share_their_moments_and_may_have_gaps(tmp_path: Path) -> None:
    power, busy = (
        SeriesId("gpu_power", "nvml", device=0),
        SeriesId("gpu_sm_active", "gpm", device=0),
    )
    with RecordingWriter(tmp_path, node="n", clocks=clocks) as writer:
        for at_ns in range(1, 7):
            writer.sample(at_ns, {power: at_ns} | ({} if at_ns in (3, 4) else {busy: at_ns}))

    of_power, of_busy = Recording.read(tmp_path).series

    assert list(of_power.times_ns) == list(of_power.values) == [1, 2, 3, 4, 5, 6]
    assert list(of_busy.times_ns) == list(of_busy.values) == [1, 2, 5, 6]


def test_a_reader_needs_less_than_twelve_bytes_a_sample(tmp_path: Path) -> None:
    series = [SeriesId("gpu_power", "nvml", device=gpu) for gpu in range(40)]
    with RecordingWriter(tmp_path, node="n", clocks=clocks) as writer:
        for at_s in range(500):
            writer.sample(at_s * 10**9, dict.fromkeys(series, 412.25 + at_s % 7))
    Recording.read(tmp_path)

    peaks_bytes = []
    for _ in range(3):  # the other threads of the test's process allocate now and then
        tracemalloc.start()
        recording = Recording.read(tmp_path)
        peaks_bytes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    peak_bytes = min(peaks_bytes)

    values = sum(len(one.values) for one in recording.series)
    assert values == 20_000
    assert peak_bytes < 12 * values, peak_bytes / values
