"""Captures: on request, of the ranks that were named, within the limit that was given."""

import gzip
import json
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.profile import Recording, Span, captured, outlier_rank, request_capture
from holdfast.profile.captures import (
    OOM_BYTES,
    OOM_SNAPSHOTS,
    Captured,
    Captures,
    write_snapshot,
)
from holdfast.profile.phases import start_phases, stop_phases

MIB = 1 << 20


def step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def capture(
    folder: Path,
    *,
    kinds: Sequence[str] = ("trace",),
    ranks: Sequence[int] = (0,),
    max_bytes: int = 64 * MIB,
) -> list[Captured]:
    """Request captures of rank 0 and run ten steps."""
    captures, model = Captures(folder, 0), nn.Linear(8, 1)
    request = request_capture(folder, kinds=kinds, ranks=ranks, max_bytes=max_bytes)
    captures.look()
    for _ in range(10):
        step(model)
        captures.on_step()
    captures.finish()
    assert captures.is_idle
    return captured(folder, request)


def test_a_trace_of_three_steps_is_taken_and_its_size_was_predicted(tmp_path: Path) -> None:
    (found,) = capture(tmp_path)

    assert (found.rank, found.kind, found.state, found.steps) == (0, "trace", "done", 3)
    file = tmp_path / "captures" / found.file
    assert found.size_bytes == file.stat().st_size
    content = gzip.decompress(file.read_bytes())
    names = [one.get("name") for one in json.loads(content)["traceEvents"]]
    assert names.count("aten::linear") == 3
    assert len(content) / 2 < found.predicted_bytes < 10 * len(content)


def test_a_trace_beyond_the_limit_is_refused_with_its_predicted_size(tmp_path: Path) -> None:
    (found,) = capture(tmp_path, max_bytes=1000)

    assert found.state == "refused"
    assert found.predicted_bytes > 1000
    assert "limit is 0 MiB" in found.reason
    assert sorted(one.suffix for one in (tmp_path / "captures").iterdir()) == [".json", ".json"]


def test_only_ranks_that_are_named_capture(tmp_path: Path) -> None:
    assert capture(tmp_path, ranks=(1, 2)) == []


def test_memory_without_a_device_is_refused_and_the_trace_is_taken(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a device")
    trace, memory = capture(tmp_path, kinds=("trace", "memory"))
    assert (trace.state, memory.state) == ("done", "refused")
    assert "no CUDA device" in memory.reason

    (alone,) = capture(tmp_path, kinds=("memory",))
    assert alone.state == "refused"


def test_a_request_from_before_the_process_is_not_carried_out(tmp_path: Path) -> None:
    request = request_capture(tmp_path, kinds=["trace"], ranks=[0], max_bytes=MIB)
    captures = Captures(tmp_path, 0)
    captures.look()
    assert captures.is_idle

    (tmp_path / "captures" / "request.json").write_text('{"id": 3}')  # another program's
    captures.look()

    assert captures.is_idle
    assert captured(tmp_path, request) == []


def test_another_profiler_at_work_refuses_the_capture_and_harms_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Any:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr("holdfast.profile.captures._profiler", fails)
    (found,) = capture(tmp_path)

    assert found.state == "refused"
    assert "already enabled" in found.reason


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The calls about memory that a process with CUDA makes."""
    blocks = [{"blocks": [{"size": 512, "state": "active_allocated"}]}]
    fake = SimpleNamespace(history=[], observers=[])
    memory = SimpleNamespace(
        _record_memory_history=lambda **options: fake.history.append(options),
        _snapshot=lambda: {"segments": blocks, "device_traces": [[]]},
    )
    monkeypatch.setattr("holdfast.profile.captures._uses_cuda", lambda: True)
    monkeypatch.setattr("holdfast.profile.captures._memory", lambda: memory)
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", fake.observers.append, raising=False
    )
    return fake


def test_a_memory_snapshot_has_a_bounded_history(tmp_path: Path, cuda: SimpleNamespace) -> None:
    (found,) = capture(tmp_path, kinds=("memory",), max_bytes=10 * MIB)

    assert found.state == "done"
    assert cuda.history == [{"stacks": "python", "max_entries": 10_485}, {"enabled": None}]
    content = (tmp_path / "captures" / found.file).read_bytes()
    assert content[:2] == b"\x80\x04", "memory_viz reads protocol 4"
    assert pickle.loads(content)["segments"][0]["blocks"][0]["size"] == 512


def test_the_first_lack_of_memory_leaves_a_snapshot(tmp_path: Path, cuda: SimpleNamespace) -> None:
    captures = Captures(tmp_path, 5)
    captures.on_step()
    captures.on_step()
    (observer,) = cuda.observers

    observer(0, 1024, 2048, 0)
    observer(0, 1024, 2048, 0)

    assert {file.name for file in (tmp_path / "captures").iterdir()} == {
        "oom-0",
        f"oom-0-rank5-{os.getpid()}.pickle",
    }


def lack_memory(folder: Path, rank: int, cuda: SimpleNamespace) -> None:
    captures = Captures(folder, rank)
    captures.on_step()
    cuda.observers.pop()(0, 1024, 2048, 0)


def test_the_snapshots_of_a_run_are_bounded_in_number_and_bytes(
    tmp_path: Path, cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(OOM_SNAPSHOTS + 3):
        lack_memory(tmp_path, rank, cuda)
    files = sorted((tmp_path / "captures").glob("*.pickle"))
    assert [file.name.split("-")[2] for file in files] == ["rank0", "rank1", "rank2", "rank3"]
    assert OOM_SNAPSHOTS * OOM_BYTES <= 1 << 30

    # A snapshot that is too large takes no other one's place.
    monkeypatch.setattr("holdfast.profile.captures.OOM_BYTES", 0)
    lack_memory(tmp_path / "other", 0, cuda)
    assert list((tmp_path / "other" / "captures").iterdir()) == []


def test_the_bytes_of_a_snapshot_count_and_not_their_prediction_alone(tmp_path: Path) -> None:
    snapshot = {"segments": [{"blocks": [{"name": "x" * 2 * MIB}]}], "device_traces": []}

    with pytest.raises(HoldfastError, match="the snapshot has 2 MiB, and the limit is 1 MiB"):
        write_snapshot(tmp_path / "file", snapshot, max_bytes=MIB)
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_beyond_the_limit_is_not_written(tmp_path: Path) -> None:
    snapshot = {"segments": [{"blocks": [{}] * 2000}], "device_traces": [[{}] * 3000]}

    with pytest.raises(HoldfastError, match=r"2000 blocks and 3000 allocations .* limit is 1 MiB"):
        write_snapshot(tmp_path / "file", snapshot, max_bytes=MIB)
    assert list(tmp_path.iterdir()) == []


def test_the_outlier_is_the_rank_whose_own_work_is_long() -> None:
    def spans(rank: int, forward: int, communication: int) -> list[Span]:
        return [
            Span(phase=phase, start_ns=at, end_ns=at + length, step=number, rank=rank, node="n")
            for number in range(1, 6)
            for phase, at, length in (
                ("forward", 1000 * number, forward),
                ("communication", 1000 * number + forward, communication),
            )
        ]

    # Rank 1 works for 90 and waits for nobody; the others wait for rank 1.
    recording = Recording(spans=(*spans(0, 50, 40), *spans(1, 90, 0), *spans(2, 55, 35)))

    assert outlier_rank(recording) == 1
    assert outlier_rank(Recording(spans=tuple(spans(0, 1, 1)))) is None


def test_a_recorded_rank_carries_out_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.profile.phases.WRITE_EVERY_S", 0.01)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start_phases(tmp_path, rank=0, node="n", attempt=0)
    try:
        request = request_capture(tmp_path, kinds=["trace"], ranks=[0], max_bytes=64 * MIB)
        due_s = time.monotonic() + 60
        while not captured(tmp_path, request):
            assert time.monotonic() < due_s
            step(model)
            optimizer.step()
    finally:
        stop_phases()

    assert captured(tmp_path, request)[0].state == "done"


def test_no_capture_begins_or_ends_within_a_region_that_pytorch_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of such a region writes to memory that a stopped profiler has freed."""
    depths, depth = [], 0

    class Region(torch.autograd.profiler.record_function):
        def __enter__(self) -> Any:
            nonlocal depth
            depth += 1
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            nonlocal depth
            depth -= 1
            super().__exit__(*error)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", Region)
    monkeypatch.setattr(Captures, "is_idle", False)
    monkeypatch.setattr(Captures, "on_step", lambda _self: depths.append(depth))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start_phases(tmp_path, rank=0, node="n", attempt=0)
    try:
        for _ in range(6):
            step(model)
            optimizer.step()
    finally:
        stop_phases()
    assert len(depths) >= 4
    assert set(depths) == {0}
