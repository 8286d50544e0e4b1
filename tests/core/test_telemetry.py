import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.errors import HoldfastError
from holdfast.core.telemetry import READ_BACK_BYTES, StepJournal, StepRecord, read_steps


def record(step=1, **more):
    return StepRecord(
        **(
            {"attempt": 1, "rank": 0, "step": step, "at_s": 10.5, "step_s": 0.25, "loss": 2.5}
            | more
        )
    )


def write(path, *records):
    with StepJournal(path) as journal:
        for one in records:
            journal.append(one)


def test_records_come_back_in_order(tmp_path):
    path = tmp_path / "telemetry" / "steps.jsonl"
    first, second = record(metrics={"val_loss": 2.75}), record(2, loss=None)
    write(path, first)
    write(path, second)  # a second supervisor goes on in the same file
    assert list(read_steps(path)) == [first, second]


def test_the_format_is_the_documented_one(tmp_path):
    path = tmp_path / "steps.jsonl"
    write(path, record(12, loss=math.nan, metrics={"grad": math.inf, "low": -math.inf}))
    assert json.loads(path.read_text()) == {
        "attempt": 1,
        "rank": 0,
        "step": 12,
        "at_s": 10.5,
        "step_s": 0.25,
        "loss": "nan",
        "metrics": {"grad": "inf", "low": "-inf"},
    }
    (read,) = read_steps(path)
    assert math.isnan(read.loss)
    assert read.metrics == {"grad": math.inf, "low": -math.inf}


def test_a_journal_that_is_not_there_is_empty(tmp_path):
    assert list(read_steps(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize("tail", ["{", '{"attempt": 1, "ra', "x" * (READ_BACK_BYTES + 7), "{}"])
def test_a_torn_tail_is_left_out_and_cut_off(tmp_path, tail):
    path = tmp_path / "steps.jsonl"
    write(path, record())
    with path.open("a") as torn:
        torn.write(tail)
    assert list(read_steps(path)) == [record()]
    write(path, record(2))
    assert list(read_steps(path)) == [record(), record(2)]


def test_a_journal_of_nothing_but_a_torn_line_starts_anew(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"attempt"')
    write(path, record())
    assert list(read_steps(path)) == [record()]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        "{}",
        '{"attempt": 1, "rank": 0, "step": 1, "at_s": "x", "step_s": 1, "loss": 1, "metrics": {}}',
        '{"attempt": 1, "rank": 0, "step": 1, "at_s": 1, "step_s": 1, "loss": true, "metrics": {}}',
        '{"attempt": 1, "rank": 0, "step": 1, "at_s": 1, "step_s": 1, "loss": 1, "metrics": []}',
    ],
)
def test_a_broken_whole_line_is_named(tmp_path, line):
    path = tmp_path / "steps.jsonl"
    write(path, record())
    with path.open("a") as broken:
        broken.write(line + "\n")
    write(path, record(3))
    with pytest.raises(
        HoldfastError, match=r"steps\.jsonl:2 is not a step record.*delete that line"
    ):
        list(read_steps(path))


def test_a_full_disk_leaves_whole_lines(tmp_path):
    path = tmp_path / "steps.jsonl"
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with StepJournal(path) as journal:
            journal.append(record())
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
            with pytest.raises(OSError, match="File too large"):
                journal.append(record(2))
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            journal.append(record(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert [one.step for one in read_steps(path)] == [1, 3]


WRITER = """
import sys
from pathlib import Path
from holdfast.core.telemetry import StepJournal, StepRecord
journal = StepJournal(Path(sys.argv[1]))
step = int(sys.argv[2])
while True:
    step += 1
    journal.append(StepRecord(attempt=1, rank=0, step=step, at_s=1.0, step_s=0.1, loss=1.0))
    print(step, flush=True)
"""


def test_kill_9_of_the_writer_loses_no_line_it_returned_for(tmp_path):
    path = tmp_path / "steps.jsonl"
    chosen = random.Random(7)
    said = 0
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(path), str(said)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            for _ in range(chosen.randrange(1, 400)):
                said = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
            rest = writer.stdout.read().split("\n")[:-1]
            said = int(rest[-1]) if rest else said
        steps = [one.step for one in read_steps(path)]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) in (said, said + 1)
        said = len(steps)
    assert Path(path).stat().st_size > 0


def test_the_last_part_of_a_journal_has_whole_lines_alone(tmp_path):
    path = tmp_path / "steps.jsonl"
    with StepJournal(path) as journal:
        for step in range(1, 21):
            journal.append(
                StepRecord(attempt=1, rank=0, step=step, at_s=1.0, step_s=0.5, metrics={})
            )
    everything = list(read_steps(path))
    lines = path.read_bytes().splitlines(keepends=True)
    for count in (0, 1, 3):
        size_bytes = sum(map(len, lines[20 - count :]))
        last = everything[20 - count :]
        assert list(read_steps(path, last_bytes=size_bytes)) == last
        assert list(read_steps(path, last_bytes=size_bytes + 1)) == last  # of the line before
    assert list(read_steps(path, last_bytes=1 << 30)) == everything
