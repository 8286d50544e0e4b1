"""The sampler: silent drivers, full disks, and its end with its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.core.processes import module_command
from holdfast.profile import Recording, RecordingWriter
from holdfast.profile.recording import SeriesId
from holdfast.profile.sampler import GPU, LONGEST_WAIT_S, MAX_STUCK, SILENT_S, Gpus, Sampler
from holdfast.profile.sources.host import Host

READER = """
import sys
from holdfast.profile.sources.nvidia import Nvidia
from holdfast.profile.sources.reader import serve
from holdfast.testing.nvml import FakeGpu, FakeNvml

class Nvml(FakeNvml):
    def nvmlDeviceGetPowerUsage(self, gpu):
        self.hangs = {hangs}
        return super().nvmlDeviceGetPowerUsage(gpu)

serve({{"nvml": lambda: Nvidia(Nvml([FakeGpu(values={{"nvmlDeviceGetPowerUsage": 250000}})]), with_gpm=False)}})
"""
ENDS = """
from holdfast.profile.recording import SeriesId
from holdfast.profile.sources.reader import serve
from holdfast.profile.sources.source import SourceEnded

class Source:
    def __init__(self, name, values):
        self.name, self.values = name, values
    def read(self, now_ns):
        if not self.values:
            raise SourceEnded("the service is gone")
        return {SeriesId("gpu_power", self.name, device=0): self.values.pop()}
    def close(self):
        pass

opened = iter([Source("dcgm", [1.0]), Source("dcgm", [])])  # the second one never gives a value
serve({"dcgm": lambda: next(opened), "nvml": lambda: Source("nvml", [2.0] * 10_000)})
"""
NONE = """
from holdfast.profile.sources.reader import serve
from holdfast.profile.sources.source import CannotRead
def fails():
    raise CannotRead("no such device")
serve({"gpm": fails})
"""
BOUND_S = 120.0


def until(gpus: Gpus, is_done: Callable[[], bool], now_s: float = 0.0) -> None:
    """Poll at one moment of the sampler's time until the real process has come so far."""
    began_s = time.monotonic()
    while not is_done():
        assert time.monotonic() - began_s < BOUND_S, gpus.missing
        gpus.poll(now_s)
        time.sleep(0.005)


def first_answer(gpus: Gpus) -> tuple[int, dict[SeriesId, float]]:
    found: list[tuple[int, dict[SeriesId, float]]] = []

    def is_done() -> bool:
        answer = gpus.poll(0.0)
        if answer is not None:
            found.append(answer)
        return bool(found)

    until(gpus, is_done)
    return found[0]


def test_the_reader_gives_the_values_of_the_gpus() -> None:
    gpus = Gpus([sys.executable, "-c", READER.format(hangs=False)])
    try:
        _, values = first_answer(gpus)
    finally:
        gpus.close()

    assert values[SeriesId("gpu_power", "nvml", device=0)] == 250
    assert gpus.missing == {}


def test_a_driver_that_hangs_is_killed_and_tried_again_ever_more_rarely() -> None:
    gpus = Gpus([sys.executable, "-c", READER.format(hangs=True)])
    try:
        until(gpus, lambda: gpus._is_open and gpus._owes_since_s is not None)
        stuck = gpus._process
        assert stuck is not None

        gpus.poll(SILENT_S + 1)

        assert "has not answered for 11 s" in gpus.missing[GPU]
        assert stuck.wait(BOUND_S) == -signal.SIGKILL
        assert gpus._process is None
        until(gpus, lambda: gpus._process is not None, SILENT_S + 3)
        for _ in range(20):
            gpus._fail(0.0, "again")
        assert gpus._wait_s == LONGEST_WAIT_S
    finally:
        gpus.close()


def test_no_reader_is_started_beside_many_that_sigkill_did_not_end() -> None:
    gpus = Gpus([sys.executable, "-c", NONE])
    stuck = [subprocess.Popen(["sleep", "600"]) for _ in range(MAX_STUCK)]
    gpus._stuck = list(stuck)
    try:
        gpus.poll(1000.0)
        assert gpus._process is None
    finally:
        for process in stuck:
            process.kill()
            process.wait()
    gpus.poll(1000.0)
    assert gpus._process is not None
    gpus.close()


def test_a_probe_in_vain_says_why_and_ends_the_reader() -> None:
    gpus = Gpus([sys.executable, "-c", NONE])

    until(gpus, lambda: gpus._is_over)

    gpus.close()
    assert gpus.missing == {"gpm": "no such device"}
    assert gpus._process is None


def test_a_reader_that_ends_is_started_again() -> None:
    gpus = Gpus([sys.executable, "-c", "raise SystemExit(7)"])

    until(gpus, lambda: GPU in gpus.missing)

    assert gpus.missing[GPU] == "the reader ended with code 7"
    gpus.close()


def test_a_source_that_ends_makes_the_reader_probe_again() -> None:
    gpus = Gpus([sys.executable, "-c", ENDS])
    found: dict[SeriesId, float] = {}

    def is_done() -> bool:
        answer = gpus.poll(0.0)
        found.update(answer[1] if answer is not None else {})
        return any(key.source == "nvml" for key in found)

    try:
        until(gpus, is_done)
    finally:
        gpus.close()

    assert sorted(key.source for key in found) == ["dcgm", "nvml"]
    assert gpus.missing == {"dcgm": "the service is gone"}


def test_a_full_disk_costs_the_sample_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RecordingWriter(tmp_path, node="n") as writer:
        sampler = Sampler(writer, Host(), None)
        with monkeypatch.context() as broken:

            def full(*_: object) -> int:
                raise OSError(28, "No space left on device")

            broken.setattr("holdfast.profile.writing.os.write", full)
            sampler.sample(1)
        sampler.sample(2)

    assert sampler.skipped == 1
    recording = Recording.read(tmp_path)
    assert [len(one.values) for one in recording.of("host_memory_used")] == [1]
    assert list(recording.unavailable["n"]) == [GPU]


def samples(folder: Path) -> int:
    try:
        return len(Recording.read(folder).of("host_memory_used")[0].values)
    except (FileNotFoundError, IndexError, ValueError):
        return 0


def test_the_process_samples_its_ranks_and_ends_with_its_input(tmp_path: Path) -> None:
    command, environment = module_command("holdfast.profile.sampler")
    arguments = [*command, str(tmp_path), "n1", "0.05"]
    with subprocess.Popen(arguments, env=environment, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        os.write(process.stdin.fileno(), b'{"ranks": {"3": %d}}\n' % os.getpid())
        began_s = time.monotonic()
        while samples(tmp_path) < 5 and time.monotonic() - began_s < BOUND_S:
            time.sleep(0.02)
        process.stdin.close()
        assert process.wait(BOUND_S) == 0

    recording = Recording.read(tmp_path)
    (memory,) = recording.of("process_memory")
    assert (memory.rank, memory.node, memory.interval_s) == (3, "n1", 0.05)
    assert min(memory.values) > 1_000_000
