"""A rank's reader of PyTorch's flight recorder, with valid and arbitrary content."""

import json
import sys
from types import SimpleNamespace

import pytest

from holdfast.recover.detectors.collectives import (
    REPORTED,
    STEPS,
    collectives_of,
    read_collectives,
)


@pytest.fixture
def recorder(monkeypatch):
    """A recorder that returns the entries put into it."""
    entries, cuda = [], SimpleNamespace(is_initialized=lambda: False)
    module = SimpleNamespace(_dump_fr_trace_json=lambda *_: json.dumps({"entries": entries}))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return SimpleNamespace(entries=entries, cuda=cuda)


def entry(number, at_s, group="0", **other):
    return {
        "process_group": [group, "default_pg"],
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "time_created_ns": int(at_s * 1e9),
        "is_p2p": False,
        "retired": True,
        **other,
    }


def read(steps_s=()):
    """Return what the supervisor gets."""
    return collectives_of(json.loads(json.dumps(read_collectives(steps_s))))


def test_collectives_of_the_last_steps_are_reported(recorder):
    recorder.entries += [entry(number, number) for number in range(1, 101)]
    begun = read([float(step) for step in range(101)])
    assert len(begun.steps_s) == STEPS + 1
    assert set(begun.at_s) == {("0", number) for number in range(101 - STEPS, 101)}
    assert (begun.last, begun.waits) == ({"0": 100}, False)


def test_every_rank_thins_out_to_the_same_collectives(recorder):
    recorder.entries += [entry(number, number) for number in range(1, 1501)]
    first = set(read().at_s)
    recorder.entries += [entry(number, number) for number in range(1501, 1511)]
    second = set(read().at_s)
    assert REPORTED / 2 < len(first & second) <= len(first) <= REPORTED


def test_messages_between_ranks_are_left_out_and_what_is_not_complete_is_a_wait(recorder):
    recorder.entries += [
        entry(1, 1.0),
        entry(0, 2.0, is_p2p=True, retired=False),
        entry(0, 2.0, profiling_name="nccl:coalesced"),
    ]
    begun = read()
    assert (set(begun.at_s), begun.last, begun.waits) == ({("0", 1)}, {"0": 1}, True)


def test_a_group_that_was_made_again_counts_anew(recorder):
    recorder.entries += [entry(number, number) for number in range(1, 51)]
    recorder.entries += [entry(number, 50 + number) for number in range(1, 4)]
    begun = read()
    assert begun.last == {"0": 3}
    assert begun.at_s == {("0", number): 50.0 + number for number in (1, 2, 3)}


def test_numbers_that_mean_nothing_end_the_reading(recorder):
    recorder.entries += [entry(0, number) for number in range(1, 1000)]
    assert len(read().at_s) <= REPORTED


def test_nothing_is_read_where_a_gpu_is_in_use_and_where_nothing_is_recorded(recorder):
    assert read() is None
    recorder.entries.append(entry(1, 1.0))
    recorder.cuda.is_initialized = lambda: True
    assert read() is None
    del sys.modules["torch._C._distributed_c10d"]
    assert read() is None
