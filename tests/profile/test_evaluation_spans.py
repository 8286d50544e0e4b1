"""The phases of an evaluation's processes, which have no steps."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.phases import note_phase, phase
from holdfast.profile import Recording, start_evaluation, stop_phases
from holdfast.profile.phases import LONGEST_JOINED_NS, recorder

MS = 1_000_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOLDFAST_PROFILE", str(tmp_path))
    start_evaluation(2)
    yield tmp_path
    stop_phases()


def spans(folder: Path) -> list[tuple[str, int]]:
    stop_phases()
    recording = Recording.read(folder)
    assert recording.ranks in ([], [2])
    return [(one.phase, (one.end_ns - one.start_ns) // MS) for one in recording.spans]


def test_spans_that_follow_each_other_closely_become_one(folder: Path) -> None:
    one = recorder()
    assert one is not None
    for number in range(10):  # the tokens of a generation
        one.span("decode", 100 * MS + 20 * MS * number, 120 * MS + 20 * MS * number)
    one.span("decode", 305 * MS, 310 * MS)
    one.span("prefill", 310 * MS, 320 * MS)

    assert spans(folder) == [("decode", 200), ("decode", 5), ("prefill", 10)]


def test_a_joined_span_is_written_before_long(folder: Path) -> None:
    one = recorder()
    assert one is not None
    for number in range(30):
        one.span("decode", 100 * MS * number, 100 * MS * (number + 1))

    lengths = [length for _, length in spans(folder)]

    assert sum(lengths) == 3000
    assert max(lengths) <= LONGEST_JOINED_NS // MS


def test_threads_of_a_process_share_the_recorder(folder: Path) -> None:
    def work() -> None:
        for _ in range(50):
            with phase("metric"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {name for name, _ in spans(folder)} == {"metric"}


def test_without_a_request_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_PROFILE", raising=False)
    start_evaluation(0)

    assert recorder() is None
    note_phase("load", 0)
