"""Test that the rate holds, on a clock that moves only while a caller waits."""

import asyncio
import threading

import pytest

from holdfast.core.rate_limit import AsyncRateLimit, RateLimit
from holdfast.testing import FakeClock


class Clock:
    def __init__(self):
        self.at_s = 100.0

    def now_s(self):
        return self.at_s

    def sleep(self, seconds):
        assert seconds > 0
        self.at_s += seconds


@pytest.fixture
def clock():
    return Clock()


def test_the_rate_is_kept_to(clock):
    pace = RateLimit(1000.0, clock.now_s, clock.sleep)
    for _ in range(50):
        pace.wait(100)
    assert clock.at_s == pytest.approx(104.9)  # the last bytes are sent as their wait ends


def test_threads_keep_to_it_together():
    waited_s = []
    pace = RateLimit(1000.0, lambda: 0.0, waited_s.append)  # all at once
    threads = [threading.Thread(target=pace.wait, args=(100,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waited_s) == pytest.approx([0.1 * number for number in range(1, 20)])


def test_time_that_was_not_used_is_not_made_up_for(clock):
    pace = RateLimit(1000.0, clock.now_s, clock.sleep)
    pace.wait(1000)
    clock.at_s += 60
    before_s = clock.at_s
    pace.wait(1000)
    assert clock.at_s == before_s
    pace.wait(1000)
    assert clock.at_s == pytest.approx(before_s + 1)


def test_without_a_limit_nobody_waits(clock):
    pace = RateLimit(None, clock.now_s, clock.sleep)
    for _ in range(3):
        pace.wait(1 << 40)
    assert clock.at_s == 100.0


def test_a_limit_makes_up_for_a_late_waking_and_not_for_idle_time():
    clock = FakeClock()
    waits = []

    async def sleep(seconds):
        waits.append(seconds)
        clock.advance(seconds + 0.01)

    async def run():
        limit = AsyncRateLimit(1 << 20, clock.monotonic_s, sleep)
        for _ in range(100):
            await limit.wait(1 << 18)
        assert clock.monotonic_s() == pytest.approx(25.0, abs=0.1)
        clock.advance(1000)
        began_s = clock.monotonic_s()
        for _ in range(4):
            await limit.wait(1 << 18)
        assert clock.monotonic_s() - began_s == pytest.approx(1.0, abs=0.1)
        limit.max_bytes_s = None
        waits.clear()
        await limit.wait(1 << 40)
        assert not waits

    asyncio.run(run())
