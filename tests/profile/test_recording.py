"""A recording is read back on one clock, also after a kill."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import Incident, Ledger, Run
from holdfast.profile import IncidentMark, Recording, RecordingWriter, SeriesId, Span, incidents_of

SM = SeriesId("gpu_sm_active", "gpm", device=0)
CPU = SeriesId("cpu_utilization", "proc")
UNIX_NS = 1_700_000_000_000_000_000


class Clocks:
    """The two clocks of a node, moved by hand."""

    def __init__(self, monotonic_ns: int = 0, unix_ns: int = UNIX_NS) -> None:
        self.monotonic_ns = monotonic_ns
        self.unix_ns = unix_ns

    def __call__(self) -> tuple[int, int]:
        return self.monotonic_ns, self.unix_ns


def test_counters_are_read_back_with_source_unit_and_interval(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, node="a/b", clocks=Clocks()) as writer:
        writer.sample(1_000, {SM: 40.5, CPU: 3})
        writer.sample(2_000, {SM: 41})

    cpu, sm = Recording.read(tmp_path).series

    assert (sm.metric, sm.unit, sm.source, sm.node, sm.device, sm.rank, sm.interval_s) == (
        "gpu_sm_active",
        "%",
        "gpm",
        "a/b",
        0,
        None,
        1.0,
    )
    assert list(sm.times_ns) == [UNIX_NS + 1_000, UNIX_NS + 2_000]
    assert list(sm.values) == [40.5, 41]
    assert (cpu.metric, cpu.device, list(cpu.values)) == ("cpu_utilization", None, [3])


def test_totals_keep_their_digits(tmp_path: Path) -> None:
    energy = SeriesId("gpu_energy", "nvml", device=1)
    with RecordingWriter(tmp_path, node="n", clocks=Clocks()) as writer:
        writer.sample(1, {energy: 123_456_789.25})

    assert list(Recording.read(tmp_path).series[0].values) == [123_456_789.25]


def test_spans_and_memory_are_of_their_rank(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, node="n", rank=3, clocks=Clocks()) as writer:
        writer.spans(
            7, [("forward", 100, 200), ("backward", 200, 500), ("communication", 300, 400)]
        )
        writer.memory(500, 7, allocated_bytes=1, reserved_bytes=3, peak_bytes=2)
        writer.dropped(5)

    recording = Recording.read(tmp_path)

    assert recording.ranks == [3]
    assert recording.spans == tuple(
        Span(phase=phase, start_ns=UNIX_NS + start, end_ns=UNIX_NS + end, step=7, rank=3, node="n")
        for phase, start, end in (
            ("forward", 100, 200),
            ("backward", 200, 500),
            ("communication", 300, 400),
        )
    )
    (memory,) = recording.memory
    assert (memory.rank, memory.at_ns, memory.peak_bytes) == (3, UNIX_NS + 500, 2)
    assert recording.dropped_spans == 5


def test_each_node_has_its_own_clock_and_all_share_one_axis(tmp_path: Path) -> None:
    for rank, monotonic_ns in enumerate((0, 5_000_000_000_000)):
        clocks = Clocks(monotonic_ns)
        with RecordingWriter(tmp_path, node=f"n{rank}", rank=rank, clocks=clocks) as writer:
            writer.spans(1, [("forward", monotonic_ns + 10, monotonic_ns + 20)])

    assert {one.start_ns for one in Recording.read(tmp_path).spans} == {UNIX_NS + 10}


def test_a_set_wall_clock_moves_what_follows_and_its_noise_moves_nothing(tmp_path: Path) -> None:
    clocks = Clocks()
    with RecordingWriter(tmp_path, node="n", rank=0, clocks=clocks) as writer:
        for minute, error_ns in ((1, 1_000), (2, 3_600_000_000_000)):
            now_ns = clocks.monotonic_ns = minute * 60_000_000_000
            clocks.unix_ns = UNIX_NS + now_ns + error_ns
            writer.spans(minute, [("forward", now_ns, now_ns + 1)])

    first, second = Recording.read(tmp_path).spans

    assert first.start_ns == UNIX_NS + 60_000_000_000
    assert second.start_ns == UNIX_NS + 120_000_000_000 + 3_600_000_000_000


def test_a_torn_line_is_left_out_and_the_next_writer_cuts_it_off(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, node="n", clocks=Clocks()) as writer:
        writer.sample(1, {SM: 1})
    with writer.path.open("ab") as file:
        file.write(b'{"kind":"sample","t_mono')

    assert list(Recording.read(tmp_path).series[0].values) == [1]
    with RecordingWriter(tmp_path, node="n", clocks=Clocks()) as writer:
        writer.sample(2, {SM: 2})
    assert list(Recording.read(tmp_path).series[0].values) == [1, 2]


def test_a_damaged_line_costs_that_line_alone(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, node="n", clocks=Clocks()) as writer:
        writer.sample(1, {SM: 1})
        with writer.path.open("ab") as file:
            file.write(b'\x00\x00\n[1]\n{"kind":"sample"}\n{"kind":"series","id":3}\n')
            file.write(b'{"kind":"sample","t_monotonic_ns":1,"values":{"0":"x"}}\n')
        writer.sample(2, {SM: 2})

    assert list(Recording.read(tmp_path).series[0].values) == [1, 2]


def test_the_files_stay_bounded_and_each_part_can_be_read_alone(tmp_path: Path) -> None:
    clocks = Clocks()
    with RecordingWriter(
        tmp_path, node="n", clocks=clocks, part_bytes=1000, kept_parts=2
    ) as writer:
        for number in range(1, 101):
            writer.sample(number, {SM: number, CPU: number})

    files = list(tmp_path.iterdir())
    values = list(Recording.read(tmp_path).of("gpu_sm_active")[0].values)

    assert len(files) == 3
    assert all(file.stat().st_size < 1300 for file in files)
    assert values == list(range(int(values[0]), 101))
    assert 20 < len(values) < 100


def test_a_reader_takes_the_newest_parts_and_begins_at_one_moment_in_all_files(
    tmp_path: Path,
) -> None:
    clocks = Clocks()
    step_ns = 1_000_000
    with (
        RecordingWriter(tmp_path, node="n", clocks=clocks, part_bytes=1000) as counters,
        RecordingWriter(tmp_path, node="n", rank=0, clocks=clocks, part_bytes=1500) as phases,
        RecordingWriter(tmp_path, node="n", rank=1, clocks=clocks) as memory,
    ):
        for number in range(1, 101):
            clocks.monotonic_ns += step_ns
            clocks.unix_ns += step_ns
            now_ns = clocks.monotonic_ns
            counters.sample(now_ns, {SM: number})
            phases.spans(number, [("forward", now_ns, now_ns + 1)])
            memory.memory(now_ns, number, allocated_bytes=1, reserved_bytes=1, peak_bytes=1)
    everything = Recording.read(tmp_path)
    size_bytes = sum(file.stat().st_size for file in tmp_path.iterdir())
    whole = (tmp_path / "spans-rank1.jsonl").stat().st_size

    # The file of rank 1 has one part, which began first: the limit leaves that part out, and older
    # ones.
    some = Recording.read(tmp_path, most_bytes=(size_bytes - whole) // 2)

    assert everything.left_out_bytes == 0
    assert len(everything.series[0].values) == len(everything.spans) == 100
    assert some.left_out_bytes >= whole
    assert some.memory == ()
    firsts = some.series[0].times_ns[0], some.spans[0].start_ns
    assert abs(firsts[0] - firsts[1]) <= step_ns
    assert (some.series[0].values[-1], some.spans[-1].step) == (100, 100)
    assert 10 < len(some.spans) < 90


def test_a_limit_below_one_part_still_reads_the_newest_one(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, node="n", clocks=Clocks()) as writer:
        writer.sample(1, {SM: 1})

    assert len(Recording.read(tmp_path, most_bytes=1).series) == 1


def test_a_killed_writer_loses_no_line_that_was_written(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from holdfast.profile import RecordingWriter, SeriesId
writer = RecordingWriter(Path(sys.argv[1]), node="n")
for number in range(10**9):
    writer.sample(number, {SeriesId("cpu_utilization", "proc"): number % 100})
    if number == 50:
        print("written", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)

    values = list(Recording.read(tmp_path).series[0].values)

    assert values == [number % 100 for number in range(len(values))]
    assert len(values) >= 51


def test_an_unavailable_source_is_named_until_it_answers(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path, node="n", clocks=Clocks()) as writer:
        writer.source("gpm", "this host has no NVIDIA driver")
        writer.source("nvml", "hangs")
        writer.source("nvml", "")

    assert Recording.read(tmp_path).unavailable == {"n": {"gpm": "this host has no NVIDIA driver"}}


def test_an_empty_folder_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holds no profile"):
        Recording.read(tmp_path / "missing")


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    line = {"kind": "begin", "version": 2, "node": "n", "rank": None, "attempt": 0, "pid": 1}
    (tmp_path / "samples-n.jsonl").write_text(json.dumps(line) + "\n")

    with pytest.raises(BadUse, match="version 2"):
        Recording.read(tmp_path)


def test_incidents_are_read_from_the_ledger(tmp_path: Path) -> None:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        ledger.add_run(
            Run(
                run_id="r",
                state="running",
                command=["train"],
                options={},
                cwd="/",
                host="h",
                pid=1,
                started_at_s=1.0,
            )
        )
        incident = Incident(
            run_id="r",
            attempt=1,
            kind="hang",
            rank=2,
            step=10,
            fault_at_s=5.0,
            detected_at_s=6.0,
            diagnosis={"reason": "NVLinkError"},
            resumed_at_s=9.5,
        )
        number = ledger.add_incident(incident)

        marks = incidents_of(ledger, "r")

    assert marks == [
        IncidentMark(
            incident_id=number,
            kind="hang",
            reason="NVLinkError",
            start_ns=5_000_000_000,
            end_ns=9_500_000_000,
            rank=2,
            step=10,
        )
    ]
