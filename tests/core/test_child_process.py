"""Test children that end, hang or are restarted too often, and cancelled parents."""

import asyncio
import signal
import subprocess
import sys

import pytest

from holdfast.core.child_process import (
    RestartLimit,
    answer_of,
    end_soon,
    end_within,
    first_line,
    release,
)

WAITS = (
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); "
)


def start(program):
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


@pytest.mark.parametrize(("end", "code"), [(release, 5), (lambda child: child.stdin.close(), 4)])
def test_a_child_ends_by_itself_when_it_is_released_or_its_parent_dies(end, code):
    child_side = "from holdfast.core.child_process import await_release; "
    with start(child_side + WAITS + "raise SystemExit(await_release() + 4)") as child:
        assert first_line(child, 30) == b"ready\n"
        end(child)
        release(child)
        assert end_within(child, 30) == code


def test_a_child_that_does_not_end_is_killed():
    with start(WAITS + "signal.pause()") as child:
        assert first_line(child, 30) == b"ready\n"
        assert end_within(child, 0.01) == -signal.SIGKILL
        release(child)


def test_a_child_that_ends_or_is_silent_has_no_first_line():
    with start("") as child:
        assert first_line(child, 30) == b""
    with start("import signal; signal.pause()") as child:
        assert first_line(child, 0.01) == b""
        child.kill()


def asked(program, talk):
    async def run():
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return await talk(child), child.returncode

    return asyncio.run(run())


def test_the_answer_of_a_child():
    echo = "import sys; sys.stdout.write(sys.stdin.read().upper()); sys.exit(3)"
    assert asked(echo, lambda child: answer_of(child, b"question")) == ((b"QUESTION", b""), 3)


@pytest.mark.parametrize(
    "wait", [lambda child: answer_of(child, b""), lambda child: end_soon(child, 100)]
)
def test_the_child_of_a_cancelled_caller_is_killed(wait):
    async def talk(child):
        assert await child.stdout.readline() == b"ready\n"
        waiting = asyncio.ensure_future(wait(child))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    assert asked(WAITS + "signal.pause()", talk) == (None, -signal.SIGKILL)


def test_a_child_that_outlives_its_time_is_killed():
    async def talk(child):
        assert await child.stdout.readline() == b"ready\n"
        child.terminate()
        await end_soon(child, 0.01)

    assert asked(WAITS + "signal.pause()", talk) == (None, -signal.SIGKILL)


def test_restarts_are_limited():
    limit = RestartLimit(restarts=2)
    assert [limit.allows_restart(0.0) for _ in range(4)] == [True, True, False, False]
    assert limit.is_exceeded


def test_a_child_that_ends_quickly_each_time_is_given_up():
    limit = RestartLimit(restarts=50, quick_end_s=5.0, quick_ends=3)
    assert [limit.allows_restart(ran_s) for ran_s in (1, 1, 9, 1, 1)] == [True] * 5
    assert not limit.allows_restart(1)
