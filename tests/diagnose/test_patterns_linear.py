"""Test that no line stalls the diagnosis: all patterns are RE2, hostile lines are read soon."""

import ast
import time
from importlib import resources
from pathlib import Path

import pytest
import re2
import yaml

import holdfast.diagnose
from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.files import LINE_LIMIT_BYTES
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.logs.progress import PROGRESS, reported_step
from holdfast.diagnose.rules.packaged import packaged_rules

FOLDER = resources.files("holdfast.diagnose.logs")
MEGABYTE = 1 << 20


def patterns():
    """Yield each pattern that is matched with log text: of rules, tables and YAML files."""
    yield from (rule.pattern for rule in packaged_rules().rules)
    for name in ("dialects.yaml", "filters.yaml", "progress.yaml"):
        yield from (one["pattern"] for one in yaml.safe_load((FOLDER / name).read_text("utf-8")))


def test_every_pattern_compiles_with_re2_and_is_small():
    options = re2.Options()
    options.log_errors = False
    for pattern in patterns():
        compiled = re2.compile(pattern, options)
        assert compiled.programsize < 20_000, pattern


def test_no_pattern_matches_the_empty_line():
    """Test for the empty line; a pattern that matches it matches all lines."""
    assert [rule.id for rule in packaged_rules().rules if re2.search(rule.pattern, "")] == []


ALLOWED_RE = {
    "shapes.py": "the text of patterns, which it generalises",
    "rules/code_tables.py": "it writes patterns and slugs from packaged tables",
    "logs/flight_recorder.py": "names of files, and lists of digits",
    "logs/files.py": "names of files, which may be no text",
}


def test_log_text_meets_no_backtracking_pattern():
    """Test that only modules without log text import `re`, which may take exponential time."""
    room, users = Path(holdfast.diagnose.__file__).parent, []
    for file in room.rglob("*.py"):
        name = file.relative_to(room).as_posix()
        imported = {
            name.name
            for node in ast.walk(ast.parse(file.read_text("utf-8")))
            if isinstance(node, ast.Import)
            for name in node.names
        }
        users += [name] if "re" in imported and not name.startswith("lab/") else []
    assert set(users) == set(ALLOWED_RE)


WORDS = {
    "letters": b"x" * MEGABYTE,
    "blanks": b" " * MEGABYTE,
    "error words": b"error " * (MEGABYTE // 6),
    "brackets": b"[" * MEGABYTE,
    "ranks": b"[rank1]: " * (MEGABYTE // 9),
    "numbers and colons": b"1:" * (MEGABYTE // 2),
    "quotes": b"'\"" * (MEGABYTE // 2),
    "frames": b'  File "' * (MEGABYTE // 8),
    "classes": b"a." * (MEGABYTE // 2) + b"Error",
    "bars": b"1%|" * (MEGABYTE // 3),
    "steps": b"step 1 step 2 " * (MEGABYTE // 14) + b"loss",
    "backtracking": b"a" * (MEGABYTE - 1) + b"!",
    "escapes": b"\x1b[" * (MEGABYTE // 2),
    "operating system commands": b"\x1b]0;" * (MEGABYTE // 4),
    "invalid utf-8": b"\xff" * MEGABYTE,
    "wide": "界".encode() * (MEGABYTE // 3),
    "xid": b"NVRM: Xid (PCI:" * (MEGABYTE // 15),
    "nccl": b"NCCL WARN " * (MEGABYTE // 10),
    "traceback": b"Traceback (most recent call last): " * (MEGABYTE // 35),
    "zeros": b"x\x00" * (MEGABYTE // 2),
    "boxes": "│ ".encode() * (MEGABYTE // 4),
}


@pytest.mark.parametrize("line", WORDS.values(), ids=WORDS)
def test_a_hostile_line_ends_soon(line):
    start = time.process_time()
    text = clean_line(line[:LINE_LIMIT_BYTES], 1).text
    packaged_rules().hot.search(line)
    for where in ("line", "user_exception", "library_exception"):
        packaged_rules().find(text, where)
    reported_step(text)
    PROGRESS.search(line)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("line", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("end", [b"\n", b"\r"], ids=["lines", "redrawn"])
def test_a_megabyte_of_hostile_text_is_read_soon(tmp_path, line, end):
    """Test the text as one line, and cut into lines of usual length."""
    pieces = [line[at : at + 200] for at in range(0, len(line), 200)]
    (tmp_path / "a.log").write_bytes(line + b"\n")
    (tmp_path / "b.log").write_bytes(end.join(pieces) + b"\n")
    start = time.process_time()
    diagnose(tmp_path)
    assert time.process_time() - start < 12


@pytest.mark.parametrize("rule", [rule.id for rule in packaged_rules().rules])
def test_long_lines_of_a_rules_own_words_end_soon(rule):
    """Test the text that a pattern matches, repeated, with and without its end."""
    (one,) = [one for one in packaged_rules().rules if one.id == rule]
    pattern = re2.compile(one.pattern)
    start = time.process_time()
    for example in one.match:
        pattern.search(example * (60_000 // len(example) + 1))
        pattern.search(example[:-3] * (60_000 // max(len(example) - 3, 1) + 1))
    assert time.process_time() - start < 1
