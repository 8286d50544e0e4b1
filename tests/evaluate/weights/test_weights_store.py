"""Test a node's shared memory: budget, owner and release, also after a crash."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.weights import store
from holdfast.evaluate.weights.store import MemoryFull, SharedMemory

MIB = 1 << 20
OWNER = """
import sys
from pathlib import Path
from holdfast.evaluate.weights.store import SharedMemory
memory = SharedMemory(Path(sys.argv[1]), sys.argv[2], 1 << 20)
file, = memory.make("model-0", [("a", 1000)], 1000)
file.write(memoryview(b"x" * 1000), 0)
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(tmp_path):
    made = SharedMemory(tmp_path, "s", 10 * MIB)
    yield made
    made.close()


def owner_process(root, session):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root), session],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"made\n"
    return process


def end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_files_have_their_size_at_once_and_hold_only_what_is_written(memory):
    first, second = memory.make("model-0", [("a", 5 * MIB), ("sub/b", 10)], 1 * MIB)
    first.write(memoryview(b"xyz"), 3 * MIB)
    path = memory.path("model-0") / "a"
    assert path.stat().st_size == 5 * MIB
    assert path.stat().st_blocks * 512 < MIB
    assert path.read_bytes()[3 * MIB :][:4] == b"xyz\0"
    assert second.fileno() != first.fileno()
    assert memory.used_bytes == MIB
    memory.drop("model-0")
    assert memory.used_bytes == 0
    assert not path.exists()
    memory.drop("model-0")


def test_a_budget_is_kept_and_what_is_missing_is_said_with_figures(memory):
    memory.make("model-0", [("a", 6 * MIB)], 6 * MIB)
    with pytest.raises(MemoryFull) as error:
        memory.make("model-1", [("a", 5 * MIB)], 5 * MIB)
    said = str(error.value).replace("\N{NO-BREAK SPACE}", " ")
    assert "5.2 MB are needed" in said
    assert "6.3 MB of this session's 10.5 MB are in use" in said
    assert "Mount a larger" in said
    assert error.value.after_release
    assert not memory.path("model-1").exists()
    with pytest.raises(MemoryFull) as error:
        memory.make("model-1", [("a", 11 * MIB)], 11 * MIB)
    assert not error.value.after_release
    memory.drop("model-0")
    memory.make("model-1", [("a", 5 * MIB)], 5 * MIB)


def test_what_others_left_free_counts_and_what_is_promised_is_not_free(memory, monkeypatch):
    usage = type("Usage", (), {"free": 8 * MIB})
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage)
    memory.make("model-0", [("a", 6 * MIB)], 6 * MIB)
    with pytest.raises(MemoryFull, match="is full") as error:
        memory.set_aside("model-1", 3 * MIB)
    assert error.value.after_release
    memory.set_aside("model-1", 2 * MIB)


def test_a_model_cannot_write_outside_of_its_folder(memory, tmp_path):
    for path in ("../x", "/x", "a/../../x", ""):
        with pytest.raises(BadUse, match="outside of its folder"):
            memory.make("model-0", [(path, 1)], 1)
    assert memory.used_bytes == 0
    for session in ("a/b", "..", ".hidden", ""):
        with pytest.raises(BadUse, match="cannot name a session"):
            SharedMemory(tmp_path, session, 1)


def test_sessions_of_the_killed_are_cleared_and_those_of_the_living_never(tmp_path):
    killed, living = owner_process(tmp_path, "killed"), owner_process(tmp_path, "living")
    try:
        own = tmp_path / f"holdfast-{os.getuid()}"
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (own / "killed/model-0/a").exists(), "kill -9 clears nothing"
        (own / "half-cleared").mkdir()  # as left by a process that died while clearing
        memory = SharedMemory(tmp_path, "mine", MIB)
        assert memory.cleared == ["half-cleared", "killed"]
        assert (own / "living/model-0/a").read_bytes() == b"x" * 1000
        with pytest.raises(BadUse, match="in use by a living agent"):
            SharedMemory(tmp_path, "living", MIB)
        memory.close()
        memory.close()
        assert sorted(path.name for path in own.iterdir()) == [".lock", "living"]
        end(living)
        SharedMemory(tmp_path, "living", MIB).close()  # its name is free again
        assert list(tmp_path.iterdir()) == [], "the last one leaves nothing"
    finally:
        end(killed)
        if living.poll() is None:
            end(living)


def test_a_folder_that_belongs_to_somebody_else_is_not_used(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"holdfast-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadUse, match="belongs to another user"):
        SharedMemory(tmp_path, "s", 1)


def test_without_shared_memory_a_folder_on_disk_is_taken_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "DEFAULT_ROOT", Path("/nonexistent/shm"))
    monkeypatch.setattr(store.tempfile, "gettempdir", lambda: str(tmp_path))
    memory = SharedMemory(None, "s", MIB)
    assert "on a disk" in memory.note
    assert memory.folder.is_relative_to(tmp_path)
    memory.close()
