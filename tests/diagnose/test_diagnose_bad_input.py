"""Test that logs of any content give an answer in bounded memory."""

import os
import subprocess
import sys
import unicodedata

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.files import LINE_LIMIT_BYTES, read_blocks

ERROR = b"Traceback (most recent call last):\n  File \"/job/t.py\", line 8, in f\n    g()\nKeyError: 'a'\n"


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\n\n\n",
        bytes(range(256)) * 64 + b"\n",
        b"\xff\xfe\x80 t\xe9 error \xc3\x28\n",
        b"\x00" * 100_000 + b"\n",
        b"\r".join(b" 1%%| | %d/900 [00:01<00:02]" % step for step in range(900)) + b"\r\n",
        b"x" * 3_000_000 + b"\n",
        b"error " * 500_000 + b"\n",
        b"\x1b[31mWARNING\x1b[0m fine\n",
        b"Traceback (most recent call last):\n" * 50,
        b'Traceback (most recent call last):\n  File "x\n' + b"  a\n" * 5000,
    ],
)
def test_noise_before_an_error(tmp_path, noise):
    log = tmp_path / "rank-0.log"
    log.write_bytes(noise + ERROR)
    found = diagnose(log)
    assert found.reason == "KeyError"
    assert found.root_line.line == noise.count(b"\n") + 4
    log.write_bytes(noise)
    assert diagnose(log).reason == "Unknown"


def test_coloured_and_redrawn_lines(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b" 5%| | 5/100 [00:01]\r 6%| | 6/100 [00:01]\r\x1b[31mMemoryError\x1b[0m\n")
    found = diagnose(log)
    assert (found.reason, found.root_line.line, found.root_line.text) == (
        "OutOfMemoryError",
        1,
        "MemoryError",
    )


@pytest.mark.parametrize(
    "evil",
    [
        "\x1b]0;title\x07",
        "\x1b[2J\x1b[H",
        "\x9b31m",
        "\x00\x08\x7f",
        "\u202e\u2066",
        "\x1bP0;1|x\x1b\\\\",
        "\x85\u2028",
    ],
)
def test_what_is_cited_can_do_nothing_to_a_terminal(tmp_path, evil):
    log = tmp_path / "x.log"
    log.write_bytes(b"ordinary\n" * 99 + f"KeyError: '{evil}a'{evil}\n".encode())
    found = diagnose(log)
    assert found.reason == "KeyError"
    shown = (
        found.root_line.text
        + found.root_text
        + found.summary
        + "".join(one.text for one in found.evidence)
    )
    assert [
        one for one in shown if unicodedata.category(one) == "Cc" or one in "\u202e\u2066\u2028"
    ] == []


def test_windows_line_ends(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(ERROR.replace(b"\n", b"\r\n"))
    assert (diagnose(log).reason, diagnose(log).root_line.line) == ("KeyError", 4)


def test_no_newline_at_the_end_and_long_texts_are_shortened(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(ERROR[:-1] + b"b" * 100_000)
    assert len(diagnose(log).root_line.text) <= 400


def test_what_cannot_be_read_is_passed_over(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_bytes(ERROR)
    (tmp_path / "rank-1.log").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "folder.log").mkdir()
    assert diagnose([tmp_path, tmp_path / "missing.log", log]).reason == "KeyError"


def test_blocks_hold_whole_lines_of_bounded_length(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(
        b"a" * 5_000_000 + b"\nb\n" + b"c" * 2_500_000 + b"\r" + b"d\n" + b"e" * 3_000_000
    )
    blocks = list(read_blocks(log))
    lines = b"".join(block for block, _ in blocks).split(b"\n")
    assert [line[:1] for line in lines] == [b"a", b"b", b"c", b"e"]
    assert lines[2].endswith(b"\rd")
    assert all(len(line) <= LINE_LIMIT_BYTES + 2 for line in lines)
    assert blocks[0][1] == 1


_MEASURE = """
import resource, sys
from holdfast.diagnose import diagnose
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = diagnose(sys.argv[1])
print(found.reason, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_large_log_of_errors_takes_little_memory(tmp_path):
    log = tmp_path / "rank-0.log"
    with log.open("wb") as file:
        file.write(ERROR)
        for number in range(20_000):
            file.write(
                b"[rank%d]: RuntimeError: odd thing %d, error %s\n"
                % (number % 5000, number, b"z" * 700)
            )
        for _ in range(5):
            file.write(b"step 1 something ordinary happened\n" * 30_000)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(log)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    reason, grown_mib = done.stdout.split()
    assert reason == "KeyError"
    assert int(grown_mib) < 40
