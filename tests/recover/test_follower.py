"""`LogFollower`: its diagnosis of growing logs equals that of `diagnose` at the end."""

import random
from contextlib import ExitStack, closing

import pytest

from holdfast.core.errors import BadUse
from holdfast.core.rotating_log import RotatingLog
from holdfast.diagnose import JobContext, RankExit, diagnose
from holdfast.diagnose.memory import Known
from holdfast.diagnose.memory.recall import Past, Recall
from holdfast.recover import follower as following
from holdfast.recover.follower import LogFollower

WATCHDOG = (
    "[E ProcessGroupNCCL.cpp:475] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600410 milliseconds before timing out.\n"
)
NOTHING = JobContext()
FAILED = JobContext(
    exits=(RankExit(rank=1, pid=7, at_monotonic_s=1.0, exit_code=1, last_step=400),), last_step=400
)
TRACEBACK = b"Traceback (most recent call last):\n  File \"/job/t.py\", line 8, in f\n    g()\nKeyError: 'shape'\n"
GLOO = b"RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:9"


@pytest.fixture
def opened():
    with ExitStack() as stack:
        yield lambda one: stack.enter_context(closing(one))


@pytest.fixture
def follow(opened):
    return lambda *args: opened(LogFollower(*args))


def answer(diagnosis):
    found = diagnosis.to_json()
    return {name: value for name, value in found.items() if name != "notes"}


@pytest.mark.parametrize("seed", range(4))
def test_says_what_reading_the_logs_afterwards_says(tmp_path, follow, opened, seed):
    source = random.Random(seed)
    logs = [opened(RotatingLog(tmp_path / f"rank-{rank}.log", max_bytes=4000)) for rank in range(3)]
    follower = follow(tmp_path)
    for step in range(1, 401):
        for log in logs:
            log.write(b"step %d loss 2.5\n" % step)
        if source.random() < 0.2:
            follower.read()
    logs[1].write(TRACEBACK)
    for log in (logs[0], logs[2]):
        log.write(TRACEBACK.replace(b"KeyError: 'shape'", GLOO))
    (tmp_path / "observer.log").write_text(
        "holdfast: rank 1 (pid 7) exited with code 1 after step 400; it ended first\n"
    )
    found = follower.diagnosis(FAILED)
    assert (found.reason, found.root_line.file) == ("KeyError", str(tmp_path / "rank-1.log"))
    assert logs[0].dropped_bytes > 0
    assert answer(found) == answer(diagnose([tmp_path], FAILED))


def test_cites_the_part_that_holds_the_line_when_it_is_asked(tmp_path, follow, opened):
    log = opened(RotatingLog(tmp_path / "rank-0.log", max_bytes=8000))
    log.write(TRACEBACK)
    follower = follow(tmp_path)
    follower.read()
    for _ in range(150):
        log.write(b"waiting for the others to end\n")
    found = follower.diagnosis(NOTHING)
    assert (found.root_line.file, found.root_line.line) == (str(tmp_path / "rank-0.log.2"), 4)


def test_a_rank_that_printed_nothing_is_missed(tmp_path, follow):
    for rank in (0, 1, 3):
        (tmp_path / f"rank-{rank}.log").write_text(WATCHDOG.format(rank=rank))
    (tmp_path / "rank-2.log").touch()
    found = follow(tmp_path).diagnosis(NOTHING)
    assert (found.reason, found.scope) == ("NCCLTimeoutError", {"rank": 2})
    assert answer(found) == answer(diagnose([tmp_path], NOTHING))


def test_no_logs_are_no_reason(tmp_path, follow):
    assert follow(tmp_path / "none").diagnosis(NOTHING).reason == "Unknown"


def test_what_was_confirmed_decides_what_no_rule_knows(tmp_path, follow):
    line = "frobnicator 7: the quux manifold lost its coherence and gave up"
    past = Past(
        key="4", reason="NodeFailure", roots=(line,), confirmed=True, done="the blade was replaced"
    )
    asked = []

    def known():
        asked.append(1)
        return Known(memory=Recall(past=(past,)))

    (tmp_path / "rank-0.log").write_text(f"step 1 loss 2\n{line}\n")
    follower = follow(tmp_path, known)
    follower.read()
    found = follower.diagnosis(NOTHING)
    assert (found.reason, found.decided_by[0], found.root_line.line) == (
        "NodeFailure",
        "memory:4",
        2,
    )
    assert asked == [1]


def test_a_memory_that_cannot_be_had_is_told_and_left_out(tmp_path, follow):
    def known():
        raise BadUse("rules/mine.yaml: no pattern in rule 3.")

    (tmp_path / "rank-0.log").write_bytes(TRACEBACK)
    found = follow(tmp_path, known).diagnosis(NOTHING)
    assert found.reason == "KeyError"
    assert found.notes == (
        "Rules learned from past incidents are not used: rules/mine.yaml: no pattern in rule 3.",
    )


def test_a_reading_that_is_under_way_ends_when_the_follower_is_closed(
    tmp_path, follow, monkeypatch
):
    (tmp_path / "rank-0.log").write_bytes(b"chatter\n" * (3 << 18))
    follower = follow(tmp_path)
    pieces = []
    feed = following.LogWatcher.feed

    def feed_and_close(self, data, **where):
        if data:
            pieces.append(len(data))
            follower._closed.set()
        feed(self, data, **where)

    monkeypatch.setattr(following.LogWatcher, "feed", feed_and_close)
    follower.read()
    assert len(pieces) == 1
