"""Test hostile Flight Recorder dumps: no code runs, and diagnosis and memory stay bounded."""

import os
import pickle
import struct
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.files import Reading
from holdfast.diagnose.logs.flight_recorder import flight_lines, read_dump

KEY_ERROR = "Traceback (most recent call last):\n  File \"/job/t.py\", line 8, in f\n    g()\nKeyError: 'a'\n"
GOOD = {"entries": [], "pg_config": {}, "version": "2.10"}


class Runs:
    """Write a file when unpickled."""

    def __init__(self, mark, how):
        self.mark, self.how = mark, how

    def __reduce__(self):
        return self.how, (
            f"touch {self.mark}" if self.how is os.system else f"open({str(self.mark)!r}, 'w')",
        )


def reduce_with(mark):
    return pickle.dumps({**GOOD, "x": Runs(mark, os.system)}, protocol=2)


def evaluated(mark):
    return pickle.dumps({**GOOD, "x": Runs(mark, eval)}, protocol=4)


def by_hand(mark):
    """Return GLOBAL and REDUCE opcodes that `pickle.dumps` would not write."""
    return (
        b"\x80\x02cposix\nsystem\nX"
        + struct.pack("<I", len(f"touch {mark}"))
        + f"touch {mark}".encode()
        + b"\x85R."
    )


def by_instance(mark):
    return b"\x80\x02(S'touch " + str(mark).encode() + b"'\niposix\nsystem\n."


def by_object(mark):
    return b"\x80\x02(cposix\nsystem\nS'touch " + str(mark).encode() + b"'\no."


def by_stack_global(mark):
    return (
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c"
        + bytes([len(f"touch {mark}")])
        + f"touch {mark}".encode()
        + b"\x85R."
    )


def persistent(mark):
    return b"\x80\x02X" + struct.pack("<I", 3) + b"pidQ."


def persistent_text(mark):
    return b"\x80\x02Ppid\n."


def extension(mark):
    return b"\x80\x02\x82\x01."


def built(mark):
    return b"\x80\x02}}b."


def out_of_band(mark):
    return b"\x80\x05\x97."


@pytest.mark.parametrize(
    "make",
    [reduce_with, evaluated, by_hand, by_instance, by_object, by_stack_global, persistent, persistent_text, extension,
     built, out_of_band],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_nothing_in_a_dump_runs(tmp_path, make):
    mark = tmp_path / "ran"
    (tmp_path / "nccl_trace_rank_0").write_bytes(make(mark))
    (tmp_path / "rank-1.log").write_text(KEY_ERROR)
    with pytest.raises(ValueError):  # noqa: PT011  (the messages differ)
        read_dump(tmp_path / "nccl_trace_rank_0")
    found = diagnose(tmp_path)
    assert (found.reason, found.scope) == ("KeyError", {"rank": 1})
    assert len(found.notes) == 1
    assert "nccl_trace_rank_0" in found.notes[0]
    assert not mark.exists()


_LIMITED = """
import os, resource, signal, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from holdfast.diagnose import diagnose
plain, *folders = map(Path, sys.argv[1:])
diagnose(plain)  # whose rules all processes share
for folder in folders:
    child = os.fork()
    if child == 0:
        signal.alarm(90)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = diagnose(folder / "job")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        (folder / "said").write_text(f"{found.reason} {grown // 1024}")
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Diagnoses each job in a process of its own, whose memory and seconds have limits."""


def memo(index):
    """Return a memo index for which CPython allocates memory (gh-115952)."""
    return b"\x80\x02}r" + struct.pack("<I", index) + b"."


def twice_itself(depth, close):
    """Return nested pairs: 2**depth values in a few bytes per level."""
    data = b"\x80\x02" + (b")" if close == b"\x86" else b"]") + b"q\x00"
    for level in range(depth):
        get, put = b"h" + bytes([level]), b"q" + bytes([level + 1])
        data += (
            (b"0" + get + get + b"\x86" + put)
            if close == b"\x86"
            else (b"0](" + get + get + b"e" + put)
        )
    return data


def tuple_as_key():
    return twice_itself(100, b"\x86") + b"0}h\x64K\x01s."


def list_as_name():
    """Return a name whose text would exceed any memory."""
    text = lambda word: b"X" + struct.pack("<I", len(word)) + word  # noqa: E731
    deep = twice_itself(100, b"e") + b"0"
    one = (
        b"}"
        + text(b"profiling_name")
        + b"h\x64s"
        + text(b"state")
        + b"h\x64s"
        + text(b"process_group")
        + b"h\x64s"
    )
    return deep + b"}" + text(b"entries") + b"](" + one + b"es."


def number_of_digits():
    """Return a number for which int() takes quadratic time."""
    return b"\x80\x02L" + b"9" * 1_000_000 + b"L\n."


def members():
    """Return a group of 400 000 ranks, of which one has a dump."""
    entry = {"collective_seq_id": 3, "state": "started", "process_group": ("0", "default_pg")}
    ranks = str(list(range(400_000)))
    return pickle.dumps({"entries": [entry], "pg_config": {"0": {"ranks": ranks}}}, protocol=2)


BOMBS = {
    "memo": memo(60_000_000),
    "memo, larger": memo(0x7FFFFFFF),
    "tuple as key": tuple_as_key(),
    "list as name": list_as_name(),
    "digits": number_of_digits(),
    "many marks": b"\x80\x02" + b"N" * 300_000 + b"](Ne" * 300_000 + b".",
    "many members": members(),
    "long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 33) + b"x.",
    "long bytes": b"\x80\x05\x96" + struct.pack("<Q", 1 << 31) + b"x.",
    "long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"}.",
    "depth": b"\x80\x02" + b"(" * 500_000 + b".",
    "nested": b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    "nested tuples": b"\x80\x02" + b")" + b"\x85" * 300_000 + b".",
}


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory):
    """Diagnose a job for each bomb; return a folder for each, and the error messages of all."""
    folders = {name: tmp_path_factory.mktemp("bomb") for name in BOMBS}
    for name, folder in folders.items():
        (folder / "job").mkdir()
        (folder / "job" / "nccl_trace_rank_0").write_bytes(BOMBS[name])
        (folder / "job" / "rank-1.log").write_text(KEY_ERROR)
    plain = tmp_path_factory.mktemp("plain")
    (plain / "rank-1.log").write_text(KEY_ERROR)
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(plain), *map(str, folders.values())],
        capture_output=True,
        text=True,
        check=False,
    )
    return folders, done.stderr[-2000:]


@pytest.mark.parametrize("name", BOMBS)
def test_none_stops_the_diagnosis_or_fills_the_memory(diagnosed, name):
    folders, errors = diagnosed
    assert (folders[name] / "said").exists(), errors
    reason, grown_mib = (folders[name] / "said").read_text().split()
    assert reason == "KeyError"
    assert int(grown_mib) < 200


def test_a_dump_of_unlimited_size_is_not_read(tmp_path):
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(b"\x80\x02")
    os.truncate(path, 300 << 20)
    with pytest.raises(ValueError, match="larger than"):
        read_dump(path)


DAMAGED = [
    b"\x80",
    b"\x80\x02",
    b"\x80\xff.",
    b"\x80\x02}",
    b"\x80\x02.",
    b"\x80\x02K\x01.",
    b"\x80\x02].",
    b"\x80\x02}}s.",
    b"\x80\x02a.",
    b"\x80\x02h\x07.",
    b"\x80\x02}]K\x01s.",
    b"\x80\x020.",
    b"\x80\x02e.",
    b"\x80\x02X\x05\x00\x00\x00ab",
]


@pytest.mark.parametrize("data", DAMAGED, ids=repr)
def test_damaged_ones_are_passed_over(tmp_path, data):
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(data)
    with pytest.raises(ValueError):  # noqa: PT011  (the messages differ)
        read_dump(path)
    reading = Reading()
    assert flight_lines([path], reading) == {}
    assert len(reading.notes) == 1


WHOLE = pickle.dumps(
    {
        "entries": [
            {"collective_seq_id": 1, "state": "started", "process_group": ("0", "default_pg")}
        ]
        * 2,
        "pg_config": {"0": {"ranks": "[0, 1]"}},
    },
    protocol=2,
)


@settings(max_examples=300, deadline=None)
@given(
    at=st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4
    ),
    end=st.integers(2),
)
def test_damaged_anywhere(tmp_path_factory, at, end):
    data = bytearray(WHOLE)
    for place, byte in at:
        data[place] = byte
    path = tmp_path_factory.mktemp("dump") / "nccl_trace_rank_0"
    path.write_bytes(data[:end])
    flight_lines([path], Reading())
    diagnose(path)


ODD = [
    {"entries": None},
    {"entries": [None, 3, "x", []]},
    {"entries": [{}]},
    {"entries": [{"collective_seq_id": "x", "state": 3}]},
    {"entries": [{"collective_seq_id": [1], "state": None, "process_group": None}]},
    {"entries": [{"collective_seq_id": 1 << 80, "process_group": ()}]},
    {"entries": [{"collective_seq_id": 1 << 100_000, "process_group": 1 << 100_000}]},
    {"entries": [{"collective_seq_id": -1, "process_group": [[]]}]},
    {"entries": [{"collective_seq_id": float("nan")}]},
    {"entries": [{"collective_seq_id": float("inf")}]},
    {"entries": [{"collective_seq_id": 1}], "pg_config": []},
    {"entries": [{"collective_seq_id": 1}], "pg_config": {3: None}},
    {"entries": [{"collective_seq_id": 1}], "pg_config": {"0": {"ranks": [None, "x", 3.5]}}},
    {
        "entries": [{"collective_seq_id": 1}],
        "pg_config": {"0": {"ranks": "[99999999999999999999]"}},
    },
    {"entries": [{"collective_seq_id": 1}], "pg_config": {"0": {"ranks": list(range(200_000))}}},
    {"entries": [{"collective_seq_id": 1}], "rank": "x"},
    {"entries": [{"collective_seq_id": 1}], "rank": -4},
    {"entries": [{"collective_seq_id": 1}], "rank": 1 << 90},
    {"entries": [{"collective_seq_id": 1, "profiling_name": b"\xff"}]},
    {"entries": [{"collective_seq_id": 1, "profiling_name": "x\ud800"}]},
    {"entries": [{"collective_seq_id": 1, "profiling_name": "a\nKeyError: 'b'\n"}]},
]


@pytest.mark.parametrize("dump", ODD, ids=range(len(ODD)))
def test_odd_values_are_no_crash(tmp_path, dump):
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump))
    (tmp_path / "rank-1.log").write_text(KEY_ERROR)
    assert diagnose(tmp_path).reason == "KeyError"


def test_a_name_can_state_no_error_of_its_own(tmp_path):
    """Test that text in a dump is not read as a line of the log."""
    one = {
        "collective_seq_id": 1,
        "state": "started",
        "profiling_name": "x\n[rank9]: KeyError: 'b'\n",
    }
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [one]}))
    assert diagnose(tmp_path).reason in ("NCCLTimeoutError", "Unknown")


def test_a_pipe_with_a_dumps_name_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "nccl_trace_rank_0")
    (tmp_path / "rank-1.log").write_text(KEY_ERROR)
    answers = []
    reader = threading.Thread(target=lambda: answers.append(diagnose(tmp_path).reason), daemon=True)
    reader.start()
    reader.join(timeout=90)
    assert answers == ["KeyError"]
