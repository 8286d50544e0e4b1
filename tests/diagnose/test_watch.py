"""Test that `LogWatcher`, fed with any pieces, agrees with `diagnose` and has bounded memory."""

import gc
import itertools
import json
import random
import tracemalloc
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose import Hang, JobContext, LogWatcher, RankExit, diagnose
from holdfast.diagnose.rules.rules import RuleSet

TRACEBACK = 'Traceback (most recent call last):\n  File "/job/t.py", line 8, in f\n    g()\n{}\n'
RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"


def ranked(text, rank):
    return "".join(f"[rank{rank}]: {line}" for line in text.splitlines(keepends=True))


def steps(*which):
    return "".join(f"step {step} loss {3 - step / 100:.2f}\n" for step in which)


BARS = "".join(f" 12%|#2        | {step}/9000 [00:03<00:20,  4.1it/s]\r" for step in range(2000))
LOGS = {
    "plain": steps(*range(9)) + TRACEBACK.format("KeyError: 'a'"),
    "two ranks": steps(1, 2) + ranked(TRACEBACK.format("RuntimeError: Connection closed by peer [10.0.0.1]:5"), 0)
    + ranked(TRACEBACK.format("KeyError: 'a'"), 1),
    "survived": steps(1, 2) + TRACEBACK.format(RESET) + steps(3, 4, 5, 6),
    "survived, then failed": steps(1, 2) + TRACEBACK.format(RESET) + steps(3, 4) + TRACEBACK.format("ValueError: b"),
    "bars": BARS + "\n" + TRACEBACK.format("KeyError: 'a'"),
    "an error after bars on one line": BARS + "\x1b[31mMemoryError\x1b[0m\n",
    "a long line": "x" * 200_000 + "\n" + TRACEBACK.format("KeyError: 'a'"),
    "an error before a long tail": TRACEBACK.format("KeyError: " + "x" * 200_000),
    "an error within a long line": "x" * 200_000 + "\rMemoryError\n",
    "no end of line": steps(1) + TRACEBACK.format("KeyError: 'a'")[:-1],
    "windows": (steps(1) + TRACEBACK.format("KeyError: 'a'")).replace("\n", "\r\n"),
    "a logger of json": '{"level": "info", "message": "step 1 loss 2.1"}\n' * 30
    + json.dumps({"level": "error", "message": "failed\n" + TRACEBACK.format("KeyError: 'a'")}) + "\n",
    "json among text": steps(1) + json.dumps({"message": TRACEBACK.format("KeyError: 'a'")}) + "\n" + steps(1),
    "chatter between steps": TRACEBACK.format(RESET) + steps(1, 2, 3) + "ordinary chatter\n" * 5000 + steps(4),
    "chatter between another rank's steps": steps(1) + ranked(TRACEBACK.format(RESET), 1) + steps(2, 3, 4)
    + "ordinary chatter\n" * 5000 + steps(5),
}  # fmt: skip


def said(found):
    answer = found.to_json()
    return {name: value for name, value in answer.items() if name != "notes"}


def watched(path, data, cuts, ask_at=()):
    watcher = LogWatcher()
    edges = [0, *sorted(cuts), len(data)]
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        watcher.feed(data[start:end], log=str(path))
        if number in ask_at:
            watcher.diagnosis()
    return watcher.diagnosis(ended=True)


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("size", [1, 7, 4096, 65_536, 1 << 30])
def test_pieces_of_one_size(tmp_path, name, size):
    log = tmp_path / "job.log"
    data = LOGS[name].encode()[: 40_000 if size < 4096 else None]
    log.write_bytes(data)
    found = watched(log, data, range(size, len(data), size))
    assert said(found) == said(diagnose(log))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(LOGS)),
    cuts=st.lists(st.floats(0, 1), max_size=12),
    ask_at=st.sets(st.integers(0, 12), max_size=4),
)
def test_whatever_the_cuts_and_whenever_one_asks(tmp_path_factory, name, cuts, ask_at):
    data = LOGS[name].encode()
    log = tmp_path_factory.mktemp("log") / "job.log"
    log.write_bytes(data)
    found = watched(log, data, [int(cut * len(data)) for cut in cuts], ask_at)
    assert said(found) == said(diagnose(log))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_lines_in_any_pieces(tmp_path_factory, data):
    pool = [
        *(line + "\n" for one in LOGS.values() for line in one.splitlines() if len(line) < 200),
        "\r",
        "\n",
        "\x00\n",
    ]
    pool = sorted(set(pool))
    text = "".join(data.draw(st.lists(st.sampled_from(pool), max_size=60))).encode()
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    log = tmp_path_factory.mktemp("log") / "job.log"
    log.write_bytes(text)
    assert said(watched(log, text, cuts, ask_at={1, 3})) == said(diagnose(log))


def test_the_labelled_logs_in_pieces(dev_cases):
    draw = random.Random(5)
    for case in dev_cases[::4]:
        data = case["noisy"].read_bytes()
        cuts = [draw.randrange(len(data)) for _ in range(40)]
        assert said(watched(case["noisy"], data, cuts)) == said(diagnose(case["noisy"])), case["id"]


def test_asked_in_the_middle_of_a_line_it_still_knows_the_line_in_the_end():
    text = TRACEBACK.format("KeyError: 'a'")
    for cut in range(len(text)):
        watcher = LogWatcher()
        watcher.feed(text[:cut])
        watcher.diagnosis()
        watcher.feed(text[cut:])
        found = watcher.diagnosis()
        assert (found.reason, found.root_line.line) == ("KeyError", 4), text[:cut]


def test_a_line_without_its_end_counts_once_no_more_comes():
    watcher = LogWatcher()
    watcher.feed(TRACEBACK.format("KeyError: 'a'")[:-1])
    assert watcher.diagnosis().reason == "Unknown"
    assert watcher.diagnosis(ended=True).reason == "KeyError"
    assert watcher.diagnosis(ended=True) == watcher.diagnosis()


def test_several_logs_and_their_ranks():
    watcher = LogWatcher()
    for piece in range(0, 400, 40):
        watcher.feed(
            TRACEBACK.format("RuntimeError: Connection closed by peer")[piece : piece + 40],
            "rank-0.log",
            0,
        )
        watcher.feed(TRACEBACK.format("KeyError: 'a'")[piece : piece + 40], "rank-1.log", 1)
    found = watcher.diagnosis()
    assert (found.reason, found.scope, found.root_line.file) == (
        "KeyError",
        {"rank": 1},
        "rank-1.log",
    )


def test_bytes_and_text_are_the_same():
    text = "Verlust größer\n" + TRACEBACK.format("KeyError: 'ä'")
    of_text, of_bytes = LogWatcher(), LogWatcher()
    of_text.feed(text)
    for at in range(len(text.encode())):
        of_bytes.feed(text.encode()[at : at + 1])
    assert of_text.diagnosis().reason == "KeyError"
    assert said(of_text.diagnosis()) == said(of_bytes.diagnosis())
    of_text.feed("\ud800 lone surrogate\n")
    assert of_text.diagnosis().reason == "KeyError"


def test_nothing_seen():
    watcher = LogWatcher()
    assert watcher.diagnosis().reason == "Unknown"
    watcher.feed("")
    assert watcher.diagnosis().reason == "Unknown"


def test_what_the_supervisor_saw_counts():
    watcher = LogWatcher()
    watcher.feed(steps(1, 2, 3))
    exits = (RankExit(rank=1, pid=4242, at_monotonic_s=8.0, signal=9),)
    assert watcher.diagnosis(JobContext(exits=exits)).decided_by == ("observer-killed",)
    hang = Hang(ranks=(0,), pids=(4241,), process_state="T", last_step=3, waited_s=3.2, limit_s=3.0)
    assert watcher.diagnosis(JobContext(hang=hang)).scope == {"rank": 0}
    assert watcher.diagnosis().reason == "Unknown"


def test_it_survives_what_follows():
    watcher = LogWatcher()
    watcher.feed(steps(1, 2) + TRACEBACK.format(RESET))
    assert watcher.diagnosis().reason == "ConnectionError"
    watcher.feed(steps(3, 4, 5, 6))
    assert watcher.diagnosis().reason == "Unknown"
    watcher.feed(TRACEBACK.format("KeyError: 'a'"))
    assert watcher.diagnosis().reason == "KeyError"


def _errors(number):
    draw = random.Random(number)
    return "".join(
        f"[rank{draw.randrange(99)}]: {draw.choice(['KeyError', 'ValueError', 'OSError'])}: no {draw.random()}\n"
        f"[rank{draw.randrange(99)}]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4{number})\n"
        f"a line like no other {draw.getrandbits(256):x}\n"
        for _ in range(200)
    )


def test_it_does_not_grow_with_the_output():
    watcher = LogWatcher()
    sizes = []
    for number in range(16):
        watcher.feed(_errors(number))
        watcher.diagnosis()
        if number in (7, 15):
            sizes.append(_objects(watcher))
    assert sizes[1] < 1.3 * sizes[0]


def _objects(root):
    """Count the objects that `root` refers to, without types, modules and line hashes."""
    seen, found = {id(root)}, [root]
    for one in found:
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(
                other, int | type | types.ModuleType | types.FunctionType | RuleSet
            ):
                seen.add(id(other))
                found.append(other)
    return len(found)


def test_many_logs_do_not_keep_a_piece_each(monkeypatch):
    """Test 40 ranks with 60 kB each, which would take 2.4 megabytes, with a limit of one."""
    monkeypatch.setattr("holdfast.diagnose.watch._ALL_BYTES", 1 << 20)
    watcher = LogWatcher()
    tracemalloc.start()
    try:
        for rank in range(40):
            watcher.feed(b"an ordinary line of a rank\n" * 2200, f"rank-{rank}.log", rank)
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes < 2 << 20


def test_a_line_without_end_does_not_grow():
    watcher = LogWatcher()
    tracemalloc.start()
    try:
        for _ in range(500):
            watcher.feed(b"error " * 2000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 << 20
    watcher.feed("\n" + TRACEBACK.format("KeyError: 'a'"))
    assert (watcher.diagnosis().reason, watcher.diagnosis().root_line.line) == ("KeyError", 5)


def test_lines_of_a_rotated_log_are_cited_by_the_part_that_holds_them_now(tmp_path):
    log = tmp_path / "rank-3.log"
    oldest = "\n".join(["chatter"] * 4) + "\n" + TRACEBACK.format("KeyError: 'a'")
    watcher = LogWatcher()
    for part, text in enumerate((oldest, "Signal 15 received\n", "the end\n")):
        watcher.feed(text[:5], log=str(log), rank=3, part=part)
        watcher.feed(text[5:], log=str(log), rank=3, part=part)
    log.write_text("the end\n")
    (tmp_path / "rank-3.log.1").write_text("Signal 15 received\n")
    (tmp_path / "rank-3.log.2").write_text(oldest)
    found = watcher.diagnosis(ended=True)
    assert (found.root_line.file, found.root_line.line) == (f"{log}.2", 8)
    assert said(found) == said(diagnose(tmp_path))


def test_a_line_split_between_two_parts_is_read_whole(tmp_path):
    watcher = LogWatcher()
    watcher.feed(TRACEBACK.format("KeyError: 'a'")[:-4], part=0)
    watcher.feed("a'\nstep 1 loss 2\n", part=1)
    found = watcher.diagnosis(ended=True)
    assert found.reason == "KeyError"
    assert (found.root_line.file, found.root_line.line) == ("job.log", 1), "where it ends"
