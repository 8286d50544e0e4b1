import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.atomic import write_atomic


def test_it_replaces_the_whole_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"old, and longer")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_the_umask_says_who_may_read_it(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as error:
        write_atomic(path, b"new")
    assert error.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_an_error_names_the_file_and_not_the_temporary_one(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        write_atomic(tmp_path / "nowhere" / "file", b"new")
    assert error.value.filename == str(tmp_path / "nowhere" / "file")


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(FileExistsError, match="not a regular file"):
            write_atomic(path, b"new")
    assert pipe.is_fifo()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_relative_name_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_atomic(Path("file"), b"here")
    assert (tmp_path / "file").read_bytes() == b"here"


WRITER = """
import sys
from pathlib import Path
from holdfast.core.atomic import write_atomic
path = Path(sys.argv[1])
number = 0
while True:
    number += 1
    write_atomic(path, b"%d " % number * 50_000)
    print(number, flush=True)
"""


def test_kill_9_at_random_instants_leaves_the_old_file_or_the_new(tmp_path):
    path = tmp_path / "file"
    chosen = random.Random(3)
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            for _ in range(chosen.randrange(1, 12)):
                done = int(writer.stdout.readline())
            # A busy wait of random length puts the kill anywhere within the next write.
            for _ in range(chosen.randrange(200_000)):
                pass
            os.kill(writer.pid, signal.SIGKILL)
            done = int((writer.stdout.read().split("\n")[-2:-1] or [done])[0])
        words = path.read_bytes().split()
        assert len(words) == 50_000
        assert len(set(words)) == 1
        assert int(words[0]) in (done, done + 1)
        assert {entry.name for entry in tmp_path.iterdir() if entry.suffix != ".tmp"} == {"file"}
