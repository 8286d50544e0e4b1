"""Test that unusable files get a note, and all usable files are used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.files import Reading, read_blocks

KEY_ERROR = b"Traceback (most recent call last):\n  File \"/job/t.py\", line 8, in f\n    g()\nKeyError: 'a'\n"


def notes_about(found, name):
    return [note for note in found.notes if name in note]


def test_a_file_that_one_may_not_read(public_folder, as_plain_user):
    for name in ("rank-0.log", "rank-1.log"):
        (public_folder / name).write_bytes(KEY_ERROR)
    (public_folder / "rank-1.log").chmod(0)
    with as_plain_user():
        found = diagnose(public_folder)
    assert (found.reason, found.scope) == ("KeyError", {"rank": 0})
    (note,) = notes_about(found, "rank-1.log")
    assert "not readable (Permission denied)" in note


def test_a_file_that_one_may_no_longer_read(public_folder, as_plain_user):
    """Test a file that loses its read permission after the search."""
    log = public_folder / "rank-0.log"
    log.write_bytes(KEY_ERROR)
    log.chmod(0)
    reading = Reading()
    with as_plain_user():
        assert list(read_blocks(log, reading)) == []
    assert "Permission denied" in reading.notes[0]


@pytest.mark.parametrize("mode", [0o000, 0o400, 0o100])
def test_a_folder_that_one_may_not_enter_or_list(public_folder, as_plain_user, mode):
    (public_folder / "rank-0.log").write_bytes(KEY_ERROR)
    secret = public_folder / "node-7"
    secret.mkdir()
    (secret / "rank-1.log").write_bytes(KEY_ERROR)
    secret.chmod(mode)
    try:
        with as_plain_user():
            found = diagnose(public_folder)
            alone = diagnose(secret)
    finally:
        secret.chmod(0o755)
    assert (found.reason, found.scope) == ("KeyError", {"rank": 0})
    assert notes_about(found, "node-7"), "what it could not look into is not said"
    assert alone.reason == "Unknown"
    assert notes_about(alone, "node-7")


def test_links_to_nothing_pipes_and_folders_with_a_logs_name(tmp_path):
    (tmp_path / "rank-0.log").write_bytes(KEY_ERROR)
    (tmp_path / "rank-1.log").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "folder.log").mkdir()
    found = diagnose(tmp_path)
    assert found.reason == "KeyError"
    assert len(found.notes) == 1
    assert notes_about(found, "rank-1.log")


def test_a_pattern_that_meets_a_pipe_does_not_wait_for_it(tmp_path):
    """Test a pipe without a writer, which would block on opening."""
    (tmp_path / "rank-0.log").write_bytes(KEY_ERROR)
    os.mkfifo(tmp_path / "rank-1.log")
    program = (
        "import sys; from holdfast.diagnose import diagnose; print(diagnose(sys.argv[1]).reason)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, f"{tmp_path}/*.log"],
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
    )
    assert done.stdout == "KeyError\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\x7fELF" + b"\x00" * 5000,
        b"\xfd7zXZ\x00" + bytes(os.urandom(6000)),
        b"\x89HDF\r\n\x1a\n" + b"\x00\x01" * 4000,
        os.urandom(100_000),
    ],
    ids=["zeros", "xz", "pairs", "random"],
)
def test_a_binary_file_is_named(tmp_path, data):
    (tmp_path / "rank-0.log").write_bytes(KEY_ERROR)
    (tmp_path / "rank-1.log").write_bytes(data)
    found = diagnose(tmp_path)
    assert (found.reason, found.scope) == ("KeyError", {"rank": 0})
    (note,) = notes_about(found, "rank-1.log")
    assert "binary" in note or "compressed with" in note


@pytest.mark.parametrize(
    "data",
    [
        # a log whose head `copytruncate` cut off, or of a host that lost power
        b"\x00" * 100_000,
        bytes(range(256)) * 64,
        "Löss: \u2588\u2588 \u4e2d\u6587 ⏳\n".encode() * 500,
        "Verlust groß\n".encode("latin-1") * 500,
        b"\x1b[2K\x1b[1A" * 2000,
    ],
    ids=["zeros", "all bytes", "utf-8", "latin-1", "escapes"],
)
def test_what_looks_odd_and_holds_text_is_read(tmp_path, data):
    log = tmp_path / "rank-0.log"
    log.write_bytes(data + b"\n" + KEY_ERROR)
    assert diagnose(log).reason == "KeyError"


def test_nothing_but_unusable_files_is_unknown_and_says_why(tmp_path):
    (tmp_path / "x.log").write_bytes(b"\x00\x01" * 4000)
    found = diagnose(tmp_path)
    assert (found.reason, found.root_line) == ("Unknown", None)
    assert len(found.notes) == 1
    assert found.to_json()["notes"] == list(found.notes)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_a_file_that_fails_while_it_is_read(tmp_path):
    (tmp_path / "rank-0.log").write_bytes(KEY_ERROR)
    found = diagnose([tmp_path, "/proc/self/mem"])
    assert found.reason == "KeyError"
    assert notes_about(found, "/proc/self/mem")
