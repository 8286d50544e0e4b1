"""Write a recording as a Perfetto trace: counters, phases and incidents of all ranks in one file.

The file is a sequence of `TracePacket` messages with `TrackEvent`s, which ui.perfetto.dev and
`trace_processor` can open. It has these tracks:

- one track for each rank, with child tracks for its phases and counters
- one track for each node, with child tracks for the counters of the host
- one track for the run, with its incidents

Each rank and each node also has its own packet sequence. All timestamps are Unix nanoseconds.
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
"""A value of `sequence_flags`: the packet uses names that are interned in its sequence."""
_BYTES_UNIT: Final = 3
"""The value of `CounterDescriptor.UNIT_SIZE_BYTES`."""
_NAMES: Final = {phase: number for number, phase in enumerate(PHASES, start=1)}


def write_perfetto(path: Path, recording: Recording, *, title: str = "run") -> int:
    """Write a recording as a Perfetto trace. A failure leaves no partial file.

    Args:
        path: the file to write; its folder is created if needed.
        recording: the recording of a run.
        title: the name of the track that shows the incidents.

    Returns:
        The size of the file in bytes.

    Raises:
        HoldfastError: the package `perfetto` is not installed.
        OSError: the file could not be written; an earlier file at `path` is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, temporary.open("xb") as file:
        _write(recording, title, file)
        return file.tell()


def perfetto_trace(recording: Recording, *, title: str = "run") -> bytes:
    """Return the Perfetto trace of a recording as bytes; see `write_perfetto`.

    Equal recordings give equal bytes.
    """
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
    """Write packets, and number the tracks (uuid) and the packet sequences (id) from 1."""

    def __init__(self, builder: "StreamingTraceProtoBuilder") -> None:
        self._builder = builder
        self._uuid = 0
        self._sequences = 1

    def clocks(self, at_ns: int) -> None:
        """Write a clock snapshot which declares that the timestamps of the trace are Unix time."""
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = 1
        for clock in (protos.BUILTIN_CLOCK_BOOTTIME, protos.BUILTIN_CLOCK_REALTIME):
            packet.clock_snapshot.clocks.add(clock_id=clock, timestamp=at_ns)
        self._builder.write_packet(packet)

    def incidents(self, recording: Recording, title: str) -> None:
        """Write one track with all incidents of the run, in the first packet sequence."""
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
        """Start a new packet sequence for a rank or a node, and describe its track."""
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
        """Write a packet that describes a track; return the uuid of the track."""
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
        """Start a packet with one event. The caller completes the event and calls `written`."""
        packet = self._builder.create_packet()
        packet.trusted_packet_sequence_id = sequence
        packet.timestamp = at_ns
        packet.track_event.track_uuid = track
        return packet

    def written(self, packet: Any) -> None:
        """Append a finished packet to the trace."""
        self._builder.write_packet(packet)


class _Sequence:
    """Write the events of one rank, one node or the run."""

    def __init__(self, trace: _Trace, number: int, track: int | None = None) -> None:
        self._trace = trace
        self._number = number
        self._track = track
        self._interned = False

    def phases(self, spans: Sequence[Span]) -> None:
        """Write the phases of one rank."""
        slices = [(one.start_ns, one.end_ns, one.phase, {"step": one.step}) for one in spans]
        self.slices("phases", slices, parent=self._track)

    def slices(
        self,
        name: str,
        slices: Sequence[tuple[int, int, str, Mapping[str, Any]]],
        *,
        parent: int | None,
    ) -> None:
        """Write slices to a track.

        A slice that partly overlaps an earlier one, instead of nesting inside it, goes to an
        additional track.
        """
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
        """Write all values of one counter to a track."""
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
    """Distribute slices over as few lanes as possible, so that the slices of each lane nest.

    Slices are placed by start time. Each goes to the first lane whose open slices all end at or
    before its start, or contain it entirely.
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
