import re
import subprocess
import sys

import pytest
from sample_evaluations import made_lines

from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.timeline import (
    BUFFER_BYTES,
    Begin,
    End,
    EngineSpan,
    ModelSpan,
    RequestSpan,
    TimelineFile,
    TimelineReader,
    read_timeline,
    timeline_of,
)

BEGIN = Begin(started_at_s=5.0, suite="s", tasks=["a", "b"])


def request(number):
    return RequestSpan(engine=0, task=1, sample=number, t0=float(number), t1=number + 0.5)


def test_lines_come_back_sorted_by_kind_and_start(tmp_path):
    lines = made_lines()
    with TimelineFile(tmp_path / "made" / "timeline.jsonl") as writer:
        writer.append(*lines)
    found = read_timeline(tmp_path / "made" / "timeline.jsonl")
    assert found == timeline_of(lines)
    assert list(found.requests) == sorted(
        (one for one in lines if isinstance(one, RequestSpan)), key=lambda s: s.t0
    )
    assert len(found.engines) == sum(isinstance(one, EngineSpan) for one in lines)
    assert found.makespan_s == found.end.t1
    assert (found.task_name(1), found.task_name(99)) == ("task_1", "task 99")


def test_a_timeline_that_goes_on_has_no_end(tmp_path):
    path = tmp_path / "t"
    assert read_timeline(path).makespan_s == 0.0
    with TimelineFile(path) as writer:
        writer.append(BEGIN, request(1), End(state="stopped", t1=9.0))
    with TimelineFile(path) as writer:
        writer.append(Begin(started_at_s=5.0, suite="s", tasks=["a", "b"], restarts=1), request(20))
    found = read_timeline(path)
    assert (found.begin.restarts, found.end, found.makespan_s) == (1, None, 20.5)


def test_a_file_cut_anywhere_loses_its_torn_line_and_can_be_gone_on_with(tmp_path):
    path, lines = tmp_path / "t", [BEGIN, *(request(number) for number in range(4))]
    with TimelineFile(path) as writer:
        writer.append(*lines)
    whole = path.read_bytes()
    for size_bytes in range(len(whole) + 1):
        path.write_bytes(whole[:size_bytes])
        kept = whole[:size_bytes].count(b"\n")
        assert len(read_timeline(path).requests) == max(0, kept - 1)
        with TimelineFile(path) as writer:
            writer.append(request(9))
        assert path.read_bytes().count(b"\n") == kept + 1
        assert [one.sample for one in read_timeline(path).requests] == [*range(max(0, kept - 1)), 9]


def test_a_long_torn_line_is_cut_off_too(tmp_path):
    path = tmp_path / "t"
    with TimelineFile(path) as writer:
        writer.append(BEGIN)
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    TimelineFile(path).close()
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().endswith(b"}\n")


def test_a_line_that_is_none_is_named(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b'{"kind":"end","t1":3.0,"state":"done"}\n{"kind":"engine","t0":1}\n')
    with pytest.raises(EvaluationError, match=re.escape(f"{path}:2 is not a line of a timeline")):
        read_timeline(path)


def test_what_waits_is_written_when_there_is_enough_of_it(tmp_path):
    writer = TimelineFile(tmp_path / "t")
    writer.append(BEGIN)
    assert (tmp_path / "t").stat().st_size == 0
    while (tmp_path / "t").stat().st_size == 0:
        writer.append(request(1))
    assert BUFFER_BYTES <= (tmp_path / "t").stat().st_size < BUFFER_BYTES + 200
    writer.append(request(2))
    writer.close()
    writer.close()
    assert read_timeline(tmp_path / "t").requests[-1].sample == 2


def test_a_killed_writer_leaves_a_timeline_that_can_be_read(tmp_path):
    script = (
        "import sys; from holdfast.evaluate.types.timeline import *; from pathlib import Path\n"
        "writer = TimelineFile(Path(sys.argv[1])); number = 0\n"
        "while True:\n"
        "    writer.append(RequestSpan(engine=0, task=0, sample=number, t0=1.0, t1=2.0)); number "
        "+= 1\n"
        "    if number == 5000: print('on its way', flush=True)\n"
    )
    path = tmp_path / "t"
    with subprocess.Popen([sys.executable, "-c", script, path], stdout=subprocess.PIPE) as writing:
        writing.stdout.readline()
        writing.kill()
    samples = [one.sample for one in read_timeline(path).requests]
    assert len(samples) > 100
    assert samples == list(range(len(samples)))
    TimelineFile(path).close()
    assert path.read_bytes().endswith(b"}\n")


def of_model(model, number):
    return RequestSpan(
        engine=0, model=model, task=0, sample=number, t0=float(number), t1=number + 0.5
    )


def test_what_grows_is_read_once_and_what_is_forgotten_stays_so(tmp_path):
    """A stream of checkpoints has one timeline, which must not be read again for each."""
    path = tmp_path / "t"
    reader = TimelineReader(path)
    assert reader.read() == timeline_of([])
    ended = ModelSpan(model=0, name="a", t0=0.0, t1=3.0)
    with TimelineFile(path) as writer:
        writer.append(BEGIN, of_model(0, 1), of_model(1, 2), ended)
        writer.flush()
        assert reader.read() == read_timeline(path)
        reader.forget(0)
        read_bytes = path.stat().st_size
        writer.append(of_model(0, 4), of_model(1, 5))
    with path.open("r+b") as file:
        file.write(b"?" * read_bytes)  # it would raise if it read that again
        file.seek(0, 2)
        file.write(b'{"kind":"req')
    found = reader.read()
    assert found.begin == BEGIN
    assert [one for one in found.requests if one.model == 1] == [of_model(1, 2), of_model(1, 5)]
    reader.forget(0)
    assert reader.read() == timeline_of([BEGIN, of_model(1, 2), of_model(1, 5), ended])
    with TimelineFile(path) as writer:  # which cuts the torn line off
        writer.append(of_model(1, 6))
    assert reader.read().requests[-1] == of_model(1, 6)
