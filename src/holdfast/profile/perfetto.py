"""Write a recording as a Perfetto trace: counters, phases and incidents of all ranks in one file.

The file is a sequence of `TracePacket` messages with `TrackEvent`s, which ui.perfetto.dev and
`trace_processor` open. Each rank has one track with its phases and counters below, each node one
track with the counters of the host, and the run one track with its incidents. Every rank and every
node has a packet sequence of its own. All timestamps are Unix nanoseconds, of one clock.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

from holdfast.core.atomic import replacing
from holdfast.core.errors import HoldfastError
from holdfast.profile.columns import column, fields
from holdfast.profile.metrics import PHASES
from holdfast.profile.recording import Recording, Series, Span
from holdfast.profile.valleys import local_ranks, ranks_of

if TYPE_CHECKING:
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

_STATE_CLEARED: Final = 1
_NEEDS_STATE: Final = 2
"""`sequence_flags` of a packet: its names are interned in this sequence."""
_BYTES_UNIT: Final = 3
"""`CounterDescriptor.UNIT_SIZE_BYTES`."""
_NAMES: Final = {phase: number for number, phase in enumerate(PHASES, start=1)}


def write_perfetto(path: Path, recording: Recording, *, title: str = "run") -> int:
    """Write a recording as a Perfetto trace, whole or not at all.

    Args:
        path: the file; its folder is made.
        recording: the run.
        title: the name of the track of incidents.

    Returns:
        The size of the file in bytes.

    Raises:
        HoldfastError: the package `perfetto` is not installed.
        OSError: the file could not be written; an earlier one at `path` is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("xb") as file:
        _write(recording, title, file)
        return file.tell()


def perfetto_trace(recording: Recording, *, title: str = "run") -> bytes:
    """Return the bytes of the trace; see `write_perfetto`. Equal recordings give equal bytes."""
    target = io.BytesIO()
    _write(recording, title, target)
    return target.getvalue()


def _write(recording: Recording, title: str, target: BinaryIO) -> None:
    try:
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder
    except ImportError as error:
        raise HoldfastError(
            "The export needs perfetto, which is not installed."
            " Run: pip install 'holdfast[profile]'"
        ) from error
    trace = _Trace(StreamingTraceProtoBuilder(target))
    trace.clocks(_first_ns(recording))
    trace.incidents(recording, title)
    local = local_ranks(recording)
    node_of = {rank: node for node, ranks in local.items() for rank in ranks}
    by_rank: dict[int, list[Series]] = {rank: [] for rank in sorted(node_of)}
    by_node: dict[str, list[Series]] = {}
    for one in recording.series:
        ranks = ranks_of(one, local)
        alone = one.rank is not None or (one.device is not None and len(ranks) == 1)
        if alone and ranks[0] in by_rank:
            by_rank[ranks[0]].append(one)
        else:
            by_node.setdefault(one.node, []).append(one)
    for rank, series in by_rank.items():
        memory = recording.memory_of(rank)
        sequence = trace.group(f"rank {rank}, {node_of[rank]}", order=rank)
        sequence.phases(recording.spans_of(rank))
        for one in series:
            sequence.counter(_named(one), one.unit, zip(one.times_ns, one.values, strict=True))
        if memory:
            for name in ("allocated_bytes", "reserved_bytes", "peak_bytes"):
                values = fields(memory, "at_ns", name)
                sequence.counter(f"torch_{name.removesuffix('_bytes')}", "B", values)
    for number, (node, series) in enumerate(sorted(by_node.items())):
        sequence = trace.group(f"node {node}", order=len(by_rank) + number)
        for one in series:
            sequence.counter(_named(one), one.unit, zip(one.times_ns, one.values, strict=True))


class _Trace:
    """Writes packets, and gives each track its uuid and each sequence its id, from 1."""

    def __init__(self, builder: "StreamingTraceProtoBuilder") -> None:
        self._builder = builder
        self._uuid = 0
        self._sequences = 1

    def clocks(self, at_ns: int) -> None:
        """Write that the trace's clock is Unix time."""
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = 1
        for clock in (protos.BUILTIN_CLOCK_BOOTTIME, protos.BUILTIN_CLOCK_REALTIME):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=at_ns)
        self._builder.write_packet(packet)

    def incidents(self, recording: Recording, title: str) -> None:
        """Write the track of the run's incidents, in the first sequence."""
        if not recording.incidents:
            return
        last_ns = _last_ns(recording)
        slices = []
        for one in recording.incidents:
            end_ns = max(one.start_ns, last_ns if one.end_ns is None else one.end_ns)
            name = f"incident {one.incident_id}: {one.reason or one.kind}"
            facts = {"kind": one.kind, "rank": one.rank, "step": one.step}
            slices.append((one.start_ns, end_ns, name, facts))
        sequence = _Sequence(self, 1)
        sequence.slices(f"incidents of {title}", slices, parent=None)

    def group(self, name: str, *, order: int) -> "_Sequence":
        """Begin the sequence of a rank or of a node, with its track."""
        self._sequences += 1
        return _Sequence(self, self._sequences, self.track(self._sequences, name, order=order))

    def track(
        self,
        sequence: int,
        name: str,
        *,
        parent: int | None = None,
        order: int = 0,
        unit: str | None = None,
    ) -> int:
        """Describe a track; return its uuid."""
        self._uuid += 1
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = sequence
        track = packet.track_descriptor
        track.uuid = self._uuid
        track.name = name
        track.child_ordering = track.EXPLICIT
        track.sibling_order_rank = order
        if parent is not None:
            track.parent_uuid = parent
        if unit == "B":
            track.counter.unit = _BYTES_UNIT
        elif unit is not None:
            track.counter.unit_name = unit
        self._builder.write_packet(packet)
        return self._uuid

    def event(self, sequence: int, at_ns: int, track: int) -> Any:
        """Begin a packet with one event; `written` ends it."""
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = sequence
        packet.timestamp = at_ns
        packet.track_event.track_uuid = track
        return packet

    def written(self, packet: Any) -> None:
        """Append a packet to the file."""
        self._builder.write_packet(packet)


class _Sequence:
    """Writes the events of one rank, of one node, or of the run."""

    def __init__(self, trace: _Trace, number: int, track: int | None = None) -> None:
        self._trace = trace
        self._number = number
        self._track = track
        self._interned = False

    def phases(self, spans: Sequence[Span]) -> None:
        """Write the phases of a rank."""
        slices = [(one.start_ns, one.end_ns, one.phase, {"step": one.step}) for one in spans]
        self.slices("phases", slices, parent=self._track)

    def slices(
        self,
        name: str,
        slices: Sequence[tuple[int, int, str, Mapping[str, Any]]],
        *,
        parent: int | None,
    ) -> None:
        """Write slices that nest; a slice that overlaps another one goes to a further track."""
        for number, lane in enumerate(nested_lanes(slices)):
            shown = name if number == 0 else f"{name}, overlapping {number}"
            track = self._trace.track(self._number, shown, parent=parent, order=number)
            ends: list[int] = []
            for start_ns, end_ns, label, facts in lane:
                while ends and ends[-1] <= start_ns:
                    self._end(ends.pop(), track)
                self._begin(start_ns, track, label, facts)
                ends.append(end_ns)
            while ends:
                self._end(ends.pop(), track)

    def counter(self, name: str, unit: str, values: Iterable[tuple[Any, ...]]) -> None:
        """Write one counter."""
        track = self._trace.track(self._number, name, parent=self._track, order=10, unit=unit)
        for at_ns, value in values:
            packet = self._trace.event(self._number, at_ns, track)
            packet.track_event.type = packet.track_event.TYPE_COUNTER
            packet.track_event.double_counter_value = float(value)
            self._trace.written(packet)

    def _begin(self, at_ns: int, track: int, label: str, facts: Mapping[str, Any]) -> None:
        packet = self._trace.event(self._number, at_ns, track)
        event = packet.track_event
        event.type = event.TYPE_SLICE_BEGIN
        if label in _NAMES:
            packet.sequence_flags = _NEEDS_STATE
            if not self._interned:
                packet.sequence_flags |= _STATE_CLEARED
                for phase, number in _NAMES.items():
                    packet.interned_data.event_names.add(iid=number, name=phase)
                self._interned = True
            event.name_iid = _NAMES[label]
        else:
            event.name = label
        for key, value in facts.items():
            if isinstance(value, int):
                event.debug_annotations.add(name=key, int_value=value)
            elif value is not None:
                event.debug_annotations.add(name=key, string_value=str(value))
        self._trace.written(packet)

    def _end(self, at_ns: int, track: int) -> None:
        packet = self._trace.event(self._number, at_ns, track)
        packet.track_event.type = packet.track_event.TYPE_SLICE_END
        self._trace.written(packet)


_Facts = TypeVar("_Facts")


def nested_lanes(
    slices: Iterable[tuple[int, int, str, _Facts]],
) -> list[list[tuple[int, int, str, _Facts]]]:
    """Sort slices into as few lanes as the order permits, in each of which slices nest.

    A slice belongs to the first lane whose open slices all end at or before its start, or hold the
    slice whole.
    """
    lanes: list[list[tuple[int, int, str, _Facts]]] = []
    open_ends: list[list[int]] = []
    for one in sorted(slices, key=lambda one: (one[0], -one[1])):
        start_ns, end_ns = one[0], one[1]
        for ends in open_ends:
            while ends and ends[-1] <= start_ns:
                ends.pop()
        free = (at for at, ends in enumerate(open_ends) if not ends or end_ns <= ends[-1])
        at = next(free, len(lanes))
        if at == len(lanes):
            lanes.append([])
            open_ends.append([])
        open_ends[at].append(end_ns)
        lanes[at].append(one)
    return lanes


def _named(series: Series) -> str:
    device = "" if series.device is None else f" GPU {series.device}"
    return f"{series.metric}{device} ({series.source})"


def _first_ns(recording: Recording) -> int:
    starts = [one.times_ns[0] for one in recording.series if one.times_ns]
    starts += [min(column(recording.spans, "start_ns"))] if recording.spans else []
    starts += [one.start_ns for one in recording.incidents]
    return min(starts, default=0)


def _last_ns(recording: Recording) -> int:
    ends = [one.times_ns[-1] for one in recording.series if one.times_ns]
    ends += [max(column(recording.spans, "end_ns"))] if recording.spans else []
    return max(ends, default=0)
