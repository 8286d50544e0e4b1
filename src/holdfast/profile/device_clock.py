"""Convert times of a GPU to the host's clock without synchronising the two.

CUDA events give only the time between two events, and no time of the host. But the GPU reaches an
event after the host has recorded it and before the host sees it completed. Each event therefore
gives a lower and an upper bound for the offset between the clocks. An idle GPU reaches an event at
once, so the lower bound is then tight.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

WAITING_STEPS: Final = 8
"""The most steps whose events may be pending. A step that waits longer gets the host's times."""


class DeviceClock:
    """An estimate of the offset between a device's clock and the host's, in nanoseconds."""

    def __init__(self) -> None:
        self._offset_ns: int | None = None

    def reached(self, device_ns: int, recorded_ns: int, seen_ns: int) -> None:
        """Narrow the estimate of the offset by the times of one completed event.

        Args:
            device_ns: when the device reached the event, by the device's clock.
            recorded_ns: when the host recorded the event, by the host's clock.
            seen_ns: when the host first saw the event completed, by the host's clock.
        """
        least_ns, most_ns = recorded_ns - device_ns, seen_ns - device_ns
        if self._offset_ns is None:
            self._offset_ns = least_ns
        self._offset_ns = max(least_ns, min(self._offset_ns, most_ns))

    def host_ns(self, device_ns: int) -> int:
        """Convert a time of the device's clock to the host's clock."""
        assert self._offset_ns is not None
        return device_ns + self._offset_ns


class Event(Protocol):
    """A CUDA event that was created with timing enabled."""

    def record(self) -> Any:
        """Record the event on the current stream."""

    def query(self) -> bool:
        """Return True if the device has reached the event; return at once in any case."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this event to `end_event`."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment: the host's time, and the CUDA event recorded at that time, if any."""

    host_ns: int
    event: Event | None = None


@dataclass(frozen=True, slots=True)
class Marked:
    """One phase, with the moments of its start and its end."""

    phase: str
    start: Mark
    end: Mark


class DeviceTimes:
    """Read the events of past steps after the device has reached them.

    All methods must be called from the same thread.
    """

    def __init__(self, make_event: Callable[[], Event], now_ns: Callable[[], int]) -> None:
        """Store where events and the host's time come from.

        Args:
            make_event: creates an event.
            now_ns: returns the host's monotonic time in nanoseconds.
        """
        self._make_event = make_event
        self._now_ns = now_ns
        self._free: list[Event] = []
        self._steps: deque[tuple[int | None, Sequence[Marked]]] = deque()
        self._clock = DeviceClock()
        self._reference: tuple[Event, int] | None = None
        """An event that the device has reached, and the device's time at which it did."""

    def mark(self) -> Mark:
        """Record an event on the device; return it together with the host's time."""
        event = self._free.pop() if self._free else self._make_event()
        host_ns = self._now_ns()
        event.record()
        return Mark(host_ns, event)

    def end_step(self, step: int | None, phases: Sequence[Marked]) -> None:
        """Queue the phases of a step until their events can be read."""
        self._steps.append((step, phases))

    def completed(self) -> list[tuple[int | None, list[tuple[str, int, int]]]]:
        """Remove the steps that the device has finished from the queue, and return them.

        Each step comes with its phases: name, start and end by the host's clock, in nanoseconds.
        The queue holds at most `WAITING_STEPS` steps. Older steps are returned even if the device
        has not finished them; their times are those at which the host recorded the events.
        """
        found = []
        while self._steps and self._is_complete(self._steps[0][1]):
            step, phases = self._steps.popleft()
            found.append((step, self._read(phases)))
        while len(self._steps) > WAITING_STEPS:
            step, phases = self._steps.popleft()
            found.append(
                (step, [(one.phase, one.start.host_ns, one.end.host_ns) for one in phases])
            )
        return found

    @staticmethod
    def _is_complete(phases: Sequence[Marked]) -> bool:
        # The events of a stream complete in order, so it suffices to query the last event.
        last = max((one.end for one in phases), key=lambda mark: mark.host_ns, default=None)
        return last is None or last.event is None or last.event.query()

    def _read(self, phases: Sequence[Marked]) -> list[tuple[str, int, int]]:
        seen_ns = self._now_ns()
        marks = sorted(
            {id(mark): mark for one in phases for mark in (one.start, one.end)}.values(),
            key=lambda mark: mark.host_ns,
        )
        device_ns: dict[int, int] = {}
        for mark in marks:
            if mark.event is None or not mark.event.query():
                continue
            if self._reference is None:
                self._reference = mark.event, 0
            event, at_ns = self._reference
            device_ns[id(mark)] = at_ns + round(event.elapsed_time(mark.event) * 1e6)
            self._clock.reached(device_ns[id(mark)], mark.host_ns, seen_ns)
        times = {
            id(mark): self._clock.host_ns(device_ns[id(mark)])
            if id(mark) in device_ns
            else mark.host_ns
            for mark in marks
        }
        self._renew_reference(marks, device_ns)
        return [(one.phase, times[id(one.start)], times[id(one.end)]) for one in phases]

    def _renew_reference(self, marks: Sequence[Mark], device_ns: dict[int, int]) -> None:
        # Elapsed times are floats of milliseconds, which are exact to a microsecond for some
        # seconds only.
        former = self._reference
        for mark in marks:
            if id(mark) not in device_ns or mark.event is None:
                continue
            self._reference = mark.event, device_ns[id(mark)]
        kept = None if self._reference is None else self._reference[0]
        events = [mark.event for mark in marks if id(mark) in device_ns]
        if former is not None:
            events.append(former[0])
        unique = {id(event): event for event in events if event is not None and event is not kept}
        self._free.extend(unique.values())
