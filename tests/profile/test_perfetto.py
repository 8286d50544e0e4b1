"""The Perfetto export, parsed by the protos of Perfetto's own package."""

import shutil
import subprocess
from pathlib import Path

import pytest

from deferred import Deferred, needs
from holdfast.profile.incidents import IncidentMark
from holdfast.profile.perfetto import nested_lanes, perfetto_trace, write_perfetto
from holdfast.profile.recording import MemoryUse, Recording, Series, Span

protos = Deferred("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
pytestmark = needs("perfetto", "perfetto is not installed")

GOLDEN = Path(__file__).parent / "golden.pftrace"
"""The trace of `recorded(2)`; written anew by `GOLDEN.write_bytes(perfetto_trace(recorded(2)))`."""
START_NS = 1_700_000_000_000_000_000
MS = 1_000_000


def recorded(ranks, steps=3):
    """Ranks on nodes of eight, with nested phases, counters, memory, and two incidents."""
    spans, memory, series = [], [], []
    nodes = [f"node-{number}" for number in range(-(-ranks // 8))]
    for rank in range(ranks):
        node = nodes[rank // 8]
        for step in range(steps):
            at = START_NS + step * 100 * MS + rank
            phases = {"data": (0, 10), "forward": (10, 40), "backward": (40, 90), "communication": (60, 85),
                      "optimizer": (90, 100)}  # fmt: skip
            spans += [
                Span(phase=phase, start_ns=at + start * MS, end_ns=at + end * MS, step=step, rank=rank, node=node)
                for phase, (start, end) in phases.items()
            ]  # fmt: skip
            memory.append(
                MemoryUse(
                    at_ns=at + 100 * MS,
                    step=step,
                    rank=rank,
                    node=node,
                    allocated_bytes=10 + step,
                    reserved_bytes=20,
                    peak_bytes=15,
                )
            )
        for metric, unit in (("gpu_sm_active", "%"), ("gpu_memory_used", "B")):
            series.append(
                Series(metric=metric, unit=unit, source="gpm", node=node, device=rank % 8, rank=None, interval_s=0.1,
                       times_ns=[START_NS + one * 100 * MS for one in range(steps)], values=[1.5 * rank] * steps)
            )  # fmt: skip
    for node in nodes:
        series.append(
            Series(metric="cpu_utilization", unit="%", source="proc", node=node, device=None, rank=None, interval_s=0.1,
                   times_ns=[START_NS], values=[12.0])
        )  # fmt: skip
    incidents = tuple(
        IncidentMark(incident_id=number, kind="exit", reason=reason, start_ns=START_NS + start * MS,
                     end_ns=end and START_NS + end * MS, rank=0, step=1)
        for number, reason, start, end in ((1, "ECCError", 50, 150), (2, "", 120, None))
    )  # fmt: skip
    return Recording(
        series=tuple(sorted(series, key=lambda one: (one.metric, one.node, one.device or 0))),
        spans=tuple(sorted(spans, key=lambda one: (one.rank, one.start_ns, -one.end_ns))),
        memory=tuple(memory),
        incidents=incidents,
    )


class Parsed:
    """A parsed trace of TrackEvents: tracks by uuid, slices closed by a stack per track, counters."""

    def __init__(self, data):
        self.trace = protos.Trace.FromString(data)
        self.tracks, self.sequence_of, self.names = {}, {}, {}
        self.slices, self.counters = [], {}
        stacks = {}
        for packet in self.trace.packet:
            sequence = packet.trusted_packet_sequence_id
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in self.tracks, "a track is described once"
                assert track.uuid > 0
                if track.HasField("parent_uuid"):
                    assert self.tracks[track.parent_uuid].name, "a parent is described first"
                    assert self.sequence_of[track.parent_uuid] == sequence
                self.tracks[track.uuid] = track
                self.sequence_of[track.uuid] = sequence
            if packet.sequence_flags & 1:
                self.names[sequence] = {
                    one.iid: one.name for one in packet.interned_data.event_names
                }
            if not packet.HasField("track_event"):
                continue
            event, at = packet.track_event, packet.timestamp
            assert self.sequence_of[event.track_uuid] == sequence, (
                "a track is written by one sequence"
            )
            if event.type == event.TYPE_COUNTER:
                assert self.tracks[event.track_uuid].HasField("counter")
                self.counters.setdefault(event.track_uuid, []).append(
                    (at, event.double_counter_value)
                )
                continue
            stack = stacks.setdefault(event.track_uuid, [])
            if event.type == event.TYPE_SLICE_BEGIN:
                name = self.names[sequence][event.name_iid] if event.name_iid else event.name
                assert all(at >= start for start, _, _ in stack)
                stack.append(
                    (at, name, {one.name: one.int_value for one in event.debug_annotations})
                )
            else:
                start, name, facts = stack.pop()
                assert at >= start
                self.slices.append((event.track_uuid, len(stack), name, start, at, facts))
        assert not any(stacks.values()), "every slice ends"

    def group(self, name):
        """The uuids of the tracks below a track, by name."""
        (top,) = [uuid for uuid, track in self.tracks.items() if track.name == name]
        return {track.name: uuid for uuid, track in self.tracks.items() if track.parent_uuid == top}


def test_64_ranks_are_one_small_file_with_a_sequence_each(tmp_path):
    recording = recorded(64)
    size = write_perfetto(tmp_path / "made" / "run.pftrace", recording)
    data = (tmp_path / "made" / "run.pftrace").read_bytes()
    parsed = Parsed(data)
    assert size == len(data) < 200_000
    events = [packet for packet in parsed.trace.packet if packet.HasField("track_event")]
    assert sum(packet.ByteSize() for packet in events) / len(events) < 40, (
        "small: names are interned"
    )
    tops = {
        track.name: uuid
        for uuid, track in parsed.tracks.items()
        if not track.HasField("parent_uuid")
    }
    assert {f"rank {rank}, node-{rank // 8}" for rank in range(64)} | {
        f"node node-{number}" for number in range(8)
    } == {name for name in tops if not name.startswith("incidents")}
    sequences = [parsed.sequence_of[uuid] for uuid in tops.values()]
    assert len(set(sequences)) == 64 + 8 + 1
    assert sorted(parsed.tracks) == list(range(1, len(parsed.tracks) + 1))


def test_phases_nest_and_keep_their_times_and_steps():
    recording = recorded(3)
    parsed = Parsed(perfetto_trace(recording))
    for rank in range(3):
        track = parsed.group(f"rank {rank}, node-0")["phases"]
        found = [(name, start, end, facts["step"], depth)
                 for uuid, depth, name, start, end, facts in parsed.slices if uuid == track]  # fmt: skip
        assert sorted((name, start, end, step) for name, start, end, step, _ in found) == sorted(
            (one.phase, one.start_ns, one.end_ns, one.step)
            for one in recording.spans
            if one.rank == rank
        )
        assert {name for name, *_, depth in found if depth == 1} == {"communication"}
        assert {depth for name, *_, depth in found if name != "communication"} == {0}


def test_all_timestamps_are_of_one_clock_that_is_tied_to_unix_time():
    parsed = Parsed(perfetto_trace(recorded(9)))
    (snapshot,) = [
        one.clock_snapshot for one in parsed.trace.packet if one.HasField("clock_snapshot")
    ]
    clocks = {one.clock_id: one.timestamp for one in snapshot.clocks}
    assert clocks == {
        protos.BUILTIN_CLOCK_BOOTTIME: START_NS,
        protos.BUILTIN_CLOCK_REALTIME: START_NS,
    }
    assert not any(one.HasField("timestamp_clock_id") for one in parsed.trace.packet)
    stamps = [one.timestamp for one in parsed.trace.packet if one.HasField("track_event")]
    assert min(stamps) == START_NS
    assert max(stamps) == START_NS + 300 * MS + 8


def test_counters_belong_to_their_rank_or_node_and_have_units():
    recording = recorded(9)
    parsed = Parsed(perfetto_trace(recording))
    below = parsed.group("rank 8, node-1")
    assert set(below) == {
        "phases", "gpu_sm_active GPU 0 (gpm)", "gpu_memory_used GPU 0 (gpm)",
        "torch_allocated", "torch_reserved", "torch_peak",
    }  # fmt: skip
    assert [value for _, value in parsed.counters[below["gpu_sm_active GPU 0 (gpm)"]]] == [12.0] * 3
    assert [value for _, value in parsed.counters[below["torch_allocated"]]] == [10, 11, 12]
    counter = parsed.tracks[below["torch_peak"]].counter
    assert counter.unit == counter.UNIT_SIZE_BYTES
    assert parsed.tracks[below["gpu_sm_active GPU 0 (gpm)"]].counter.unit_name == "%"
    host = parsed.group("node node-1")
    assert list(host) == ["cpu_utilization (proc)"]
    assert parsed.counters[host["cpu_utilization (proc)"]] == [(START_NS, 12.0)]


def test_incidents_that_overlap_stand_on_tracks_of_their_own():
    parsed = Parsed(perfetto_trace(recorded(1), title="run-1"))
    tracks = {uuid: track.name for uuid, track in parsed.tracks.items()}
    found = [(tracks[uuid], name, start - START_NS, end - START_NS)
             for uuid, _, name, start, end, _ in parsed.slices if "incident" in name]  # fmt: skip
    assert found == [
        ("incidents of run-1", "incident 1: ECCError", 50 * MS, 150 * MS),
        ("incidents of run-1, overlapping 1", "incident 2: exit", 120 * MS, 300 * MS),
    ]


def test_slices_that_overlap_without_nesting_go_to_a_further_lane():
    slices = [(0, 10, "a", 0), (2, 4, "b", 0), (3, 12, "c", 0), (10, 12, "d", 0), (12, 12, "e", 0)]
    lanes = [[name for _, _, name, _ in lane] for lane in nested_lanes(slices)]
    assert lanes == [["a", "b", "d", "e"], ["c"]]


def test_the_golden_file_is_what_is_written():
    data = perfetto_trace(recorded(2))
    assert protos.Trace.FromString(GOLDEN.read_bytes()) == protos.Trace.FromString(data)
    assert data == perfetto_trace(recorded(2)), "equal recordings give equal bytes"
    Parsed(GOLDEN.read_bytes())


def test_an_empty_recording_is_a_trace_without_events():
    assert Parsed(perfetto_trace(Recording())).slices == []


@pytest.mark.skipif(
    shutil.which("trace_processor_shell") is None, reason="needs trace_processor_shell"
)
def test_trace_processor_reads_the_golden_file(tmp_path):
    query = tmp_path / "query.sql"
    query.write_text("select count(*) as slices, min(ts) as first from slice;")
    done = subprocess.run(
        ["trace_processor_shell", "--query-file", str(query), str(GOLDEN)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    expected = 2 * 3 * 5 + 2
    assert f"{expected},{START_NS}" in done.stdout
