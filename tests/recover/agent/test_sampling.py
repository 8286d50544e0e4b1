"""The agent keeps the sampler running after every kind of end."""

import asyncio
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.core.errors import NotFound
from holdfast.profile import Recording, sampler_command, sampler_limit
from holdfast.recover.agent import sampling
from holdfast.recover.agent.sampling import Sampling

BOUND_S = 120.0


async def until(is_done: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not is_done():
            await asyncio.sleep(0.01)


def recorded(folder: Path) -> int:
    try:
        return sum(len(one.values) for one in Recording.read(folder).of("process_memory"))
    except NotFound:
        return 0


def test_a_killed_sampler_is_started_again_and_goes_on_in_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sampling, "sampler_command", functools.partial(sampler_command, interval_s=0.02)
    )
    monkeypatch.setattr(sampling, "FEED_EVERY_S", 0.02)
    monkeypatch.setattr(sampling, "RESTART_WAIT_S", 0.0)

    async def scenario() -> None:
        one = Sampling("n1", lambda: {4: os.getpid()})
        keeping = asyncio.create_task(one.keep())
        await asyncio.sleep(0)
        assert one.pid is None  # nothing is started before the run is known
        one.begin(tmp_path)
        await until(lambda: recorded(tmp_path) > 2)
        first = one.pid
        assert first is not None

        os.kill(first, signal.SIGKILL)

        await until(lambda: one.pid not in (None, first))
        before = recorded(tmp_path)
        await until(lambda: recorded(tmp_path) > before + 2)
        second = one.pid
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        with pytest.raises(ProcessLookupError):
            os.kill(second or 0, 0)

    asyncio.run(scenario())
    assert [path.name for path in tmp_path.iterdir()] == ["samples-n1.jsonl"]


@pytest.mark.parametrize("error", [None, OSError("no process"), RuntimeError("no thread")])
def test_a_sampler_that_fails_at_once_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    starts = []
    most = sampler_limit().quick_ends  # the same limit as of a sampler beside a script

    async def fails(_: Path) -> int:
        starts.append(1)
        if error is not None:
            raise error
        return 1

    monkeypatch.setattr(sampling, "RESTART_WAIT_S", 0.0)

    async def scenario() -> None:
        one = Sampling("n1", dict)
        monkeypatch.setattr(one, "_run", fails)
        one.begin(tmp_path)
        keeping = asyncio.create_task(one.keep())
        await until(lambda: len(starts) == most)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(starts) == most
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(scenario())
