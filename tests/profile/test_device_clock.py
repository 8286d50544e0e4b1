"""Device times on the host's clock: events are read later, and never waited for."""

import itertools

from holdfast.profile.device_clock import WAITING_STEPS, DeviceClock, DeviceTimes, Marked

MS = 1_000_000


class Device:
    """A device with its own clock that runs queued work in order."""

    def __init__(self, *, epoch_ns: int = 77 * MS) -> None:
        self.host_ns = 1_000 * MS
        self.free_ns = 0
        """The host's time at which the device is done with what is queued."""
        self.epoch_ns = epoch_ns
        self.events = 0

    def queue(self, busy_ns: int) -> None:
        self.free_ns = max(self.free_ns, self.host_ns) + busy_ns

    def event(self) -> "Event":
        self.events += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at_ns = 0

    def record(self) -> None:
        self.at_ns = max(self._device.free_ns, self._device.host_ns)

    def query(self) -> bool:
        return self.at_ns <= self._device.host_ns

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.query()
        assert end_event.query(), "an event is read before the device has reached it"
        return (end_event.at_ns - self.at_ns) / MS


def steps_of(
    device: Device, times: DeviceTimes, count: int
) -> list[tuple[int | None, list[tuple[str, int, int]]]]:
    """Run steps of 30 ms forward and 60 ms backward on the device, 1 ms each on the host."""
    found = []
    for step in range(1, count + 1):
        began = times.mark()
        device.queue(30 * MS)
        device.host_ns += MS
        middle = times.mark()
        device.queue(60 * MS)
        device.host_ns += MS
        ended = times.mark()
        times.end_step(step, [Marked("forward", began, middle), Marked("backward", middle, ended)])
        found += times.completed()
        # The host waits for the loss of the step before, as a loop that prints it does.
        device.host_ns = max(device.host_ns, device.free_ns - 90 * MS)
    return found


def test_phases_have_the_devices_durations_though_the_host_runs_ahead() -> None:
    device = Device()
    times = DeviceTimes(device.event, lambda: device.host_ns)

    found = steps_of(device, times, 50)

    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    assert len(found) >= 47
    for _, phases in found:
        durations = {phase: end_ns - start_ns for phase, start_ns, end_ns in phases}
        assert durations == {"forward": 30 * MS, "backward": 60 * MS}
    starts = [phases[0][1] for _, phases in found]
    assert {later - sooner for sooner, later in itertools.pairwise(starts)} == {90 * MS}
    assert starts[0] == 1_000 * MS


def test_events_are_used_again() -> None:
    device = Device()
    steps_of(device, DeviceTimes(device.event, lambda: device.host_ns), 500)

    assert device.events < 30


def test_a_device_that_never_gets_there_costs_no_more_than_its_times() -> None:
    device = Device()
    times = DeviceTimes(device.event, lambda: device.host_ns)
    device.queue(10**15)
    for step in range(20):
        mark = times.mark()
        device.host_ns += MS
        times.end_step(step, [Marked("forward", mark, times.mark())])

    found = times.completed()

    assert [step for step, _ in found] == list(range(20 - WAITING_STEPS))
    assert found[0][1] == [("forward", 1_000 * MS, 1_001 * MS)]


def test_the_offset_follows_a_device_clock_that_drifts_either_way() -> None:
    for rate in (0.9999, 1.0001):
        clock = DeviceClock()
        for second in range(1, 1000):
            true_ns = second * 1_000 * MS
            clock.reached(round(true_ns * rate), true_ns - MS, true_ns + MS)
            error_ns = clock.host_ns(round(true_ns * rate)) - true_ns
            assert abs(error_ns) <= MS
