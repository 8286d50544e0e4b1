"""Deep captures of a rank on a GPU, by a profiler that needs none."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.profile import captured, request_capture
from holdfast.profile.captures import EVENT_BYTES, STEPS, Captured, Captures
from holdfast.testing.kineto import KERNELS, FakeProfiler, kineto_trace

RANK = 3


@pytest.fixture
def profilers(monkeypatch: pytest.MonkeyPatch) -> list[FakeProfiler]:
    """The profilers that captures start: one for the warm step, then one for the captured steps."""
    made: list[FakeProfiler] = []

    def make() -> FakeProfiler:
        made.append(FakeProfiler(steps=STEPS if made else 1, kernels_a_step=600, rank=RANK))
        return made[-1]

    monkeypatch.setattr("holdfast.profile.captures._profiler", make)
    return made


def capture(folder: Path, *, max_bytes: int) -> Captured:
    captures = Captures(folder, RANK)
    request = request_capture(folder, kinds=("trace",), ranks=(RANK,), max_bytes=max_bytes)
    captures.look()
    for _ in range(STEPS + 3):
        captures.on_step()
    captures.finish()
    (found,) = captured(folder, request)
    return found


def test_the_kernels_of_the_captured_steps_are_read_from_the_file(
    tmp_path: Path, profilers: list[FakeProfiler]
) -> None:
    found = capture(tmp_path, max_bytes=1 << 30)

    assert (found.state, found.rank, found.steps) == ("done", RANK, STEPS)
    assert len(profilers) == 2
    assert not any(one.is_running for one in profilers)
    content = gzip.decompress((tmp_path / "captures" / found.file).read_bytes())
    trace = json.loads(content)
    assert trace["distributedInfo"]["rank"] == RANK
    kernels = [one for one in trace["traceEvents"] if one.get("cat") == "kernel"]
    assert len(kernels) == 600 * STEPS
    assert {one["name"] for one in kernels} == set(KERNELS)
    assert found.events == 3 * 600 * STEPS, "operators and launches are events, too"
    assert found.predicted_bytes == found.events * EVENT_BYTES
    assert len(content) < found.predicted_bytes < 4 * len(content)


def test_a_trace_of_a_gpu_that_would_be_too_large_is_never_taken(
    tmp_path: Path, profilers: list[FakeProfiler]
) -> None:
    found = capture(tmp_path, max_bytes=1 << 20)

    assert found.state == "refused"
    assert "1800 events a step" in found.reason
    assert len(profilers) == 1, "the warm step alone"


def test_the_fake_has_the_form_of_a_real_trace(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as real:
        torch.ones(4, 4) @ torch.ones(4, 4)
    real.export_chrome_trace(str(tmp_path / "real.json"))
    written: dict[str, Any] = json.loads((tmp_path / "real.json").read_text())
    fake = kineto_trace()

    for one in (written, fake):
        assert {"schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", "traceEvents"} <= set(
            one
        )
    (operator, *_) = [one for one in written["traceEvents"] if one.get("cat") == "cpu_op"]
    (made, *_) = [one for one in fake["traceEvents"] if one.get("cat") == "cpu_op"]
    assert set(made) <= set(operator)
    assert [type(made[key]) for key in ("ph", "name", "ts", "dur")] == [
        type(operator[key]) for key in ("ph", "name", "ts", "dur")
    ]
    for missing in ("profiler", "start", "stop", "export_chrome_trace"):
        assert hasattr(FakeProfiler(steps=1), missing) == hasattr(real, missing)
