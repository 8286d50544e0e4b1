"""Tables that crop no id at any width, paths near the reader, and outputs checked before the work."""

import io
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.cli import demo, output
from holdfast.cli.main import cli
from holdfast.cli.output import error_object, near, print_table
from holdfast.cli.output_paths import OUTPUT_FILE, OUTPUT_FOLDER, check_output
from holdfast.core.errors import BadUse

RUN = "gpt-small-20261128-180303-ab12"
COLUMNS = ["run", "state", "started", "attempts", "step", "incidents", "command"]
ROW = (RUN, "completed", "2026-11-28 18:03:03", 12, 1_234_567, 3, "python train.py --data /a/b/c")


class Terminal(io.StringIO):
    """A terminal of a width."""

    def isatty(self):
        return True


def printed(monkeypatch, width, columns, *rows):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    print_table(columns, rows)
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())


@pytest.mark.parametrize("width", [20, 60, 80, 100, 132, 300])
def test_no_id_step_or_state_is_cropped_and_no_line_is_too_long(monkeypatch, width):
    text = printed(monkeypatch, width, COLUMNS, ROW)
    for whole in (RUN, "completed", "1234567", "2026-11-28", "18:03:03", "train.py"):
        assert whole in text
    assert "…" not in text
    if width >= 60:
        assert max(map(len, text.splitlines())) <= width
    assert ("─" in text) is (width > 100), "a table where there is room for one"


def test_a_table_that_cannot_fit_is_a_block_for_each_row(monkeypatch):
    text = printed(monkeypatch, 40, COLUMNS, ROW, (RUN[:-1], *ROW[1:4], None, *ROW[5:]))
    first, second = text.strip().split("\n\n")
    assert first.splitlines()[0].split() == ["run", RUN]
    assert [line.split()[0] for line in first.splitlines()] == COLUMNS
    assert [line.split()[0] for line in second.splitlines()] == [*COLUMNS[:4], *COLUMNS[5:]]


def test_a_path_folds_after_a_slash_and_the_last_column_within_words(monkeypatch):
    path = "/checkpoints/of/the/long/experiment/step-0000001200"
    text = printed(monkeypatch, 60, ["step", "path", "why"], (1200, path, "x" * 70))
    assert "step-0000001200" in text
    folded = [line[7:].split("  ")[0].strip() for line in text.splitlines()[3:]]
    assert "".join(folded).startswith(path)
    assert text.count("x") == 70 + path.count("x")


def test_brackets_of_a_log_line_are_printed_as_they_are(monkeypatch):
    assert "[bold] x" in printed(monkeypatch, 80, ["line"], ("[bold] x",))


def test_a_pipe_gets_each_row_in_one_line(capsys):
    print_table(COLUMNS, [ROW])
    line = next(line for line in capsys.readouterr().out.splitlines() if RUN in line)
    assert "python train.py --data /a/b/c" in line
    assert len(line) <= output.PIPE_WIDTH


def test_a_path_below_the_current_folder_is_relative(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert near(tmp_path / "a" / "b") == os.path.join("a", "b")  # noqa: PTH118
    assert near("/elsewhere/x") == "/elsewhere/x"


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("It failed. Mend it.", ("It failed.", "Mend it.")),
        ("No run 'a'. `holdfast runs ls` lists all.", ("No run 'a'.", "`holdfast runs ls` lists all.")),
        ("No log. --launcher shows more.", ("No log.", "--launcher shows more.")),
        ("It failed", ("It failed", "")),
    ],
)  # fmt: skip
def test_the_next_step_is_the_last_sentence(message, parts):
    assert tuple(error_object(message)["error"].values()) == parts


def test_an_output_that_cannot_be_written_is_refused_by_its_own_name():
    for path in ("/proc/x", "/proc/x/y.html"):
        with pytest.raises(BadUse, match=f"^Nothing can be written at {path}: .*Name another"):
            check_output(Path(path))


def test_an_output_that_can_be_written_is_left_as_it_is(tmp_path):
    (tmp_path / "old").write_text("old")
    for name in ("old", "new", "deep/er/new", "."):
        check_output(tmp_path / name)
    check_output(Path("/dev/null"))
    assert [one.name for one in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "old"


def test_every_option_for_an_output_is_checked_before_the_work():
    """Walk over all commands: an option that names an output has the type that checks it."""
    unchecked = set()

    def walk(group, *names):
        for name in group.list_commands(None):
            command = group.get_command(None, name)
            if hasattr(command, "list_commands"):
                walk(command, *names, name)
                continue
            for parameter in command.params:
                outputs = {"--output", "--page", "--perfetto", "--out", "--safetensors", "--to"}
                is_output = outputs & set(parameter.opts) and parameter.type.name != "choice"
                checks = type(parameter.type).__mro__
                if is_output and not any("Output" in one.__name__ for one in checks):
                    unchecked.add((*names, name, *parameter.opts))

    walk(cli)
    assert unchecked == set()
    assert OUTPUT_FILE.convert("/dev/null", None, None) == Path("/dev/null")
    with pytest.raises(BadUse):
        OUTPUT_FOLDER.convert("/proc/x", None, None)


def test_the_table_of_the_demonstration_keeps_each_fault_and_time(capsys, tmp_path):
    row = {"fault": "Rank killed", "seen_as": "rank 3 failed", "node": "node2", "action": "restart",
           "seconds_to_detect": 0.4, "seconds_to_restart": 12.5, "rank_seconds_lost": 51.0}  # fmt: skip
    faulty = SimpleNamespace(
        interventions=0, ettr=0.5, wall_s=90.0, run=SimpleNamespace(outcome="done"), proof=None,
        checkpoints=SimpleNamespace(total_stall_s=0.2, count=4),
    )  # fmt: skip
    stopped = SimpleNamespace(run=SimpleNamespace(outcome="An own error. Mend it."))
    demo._print_verdict(
        SimpleNamespace(
            faulty=faulty,
            stopped=stopped,
            rows=[SimpleNamespace(**row), SimpleNamespace(**{**row, "seconds_to_restart": None})],
            report=tmp_path / "page.html",
        )
    )
    lines = [line.split("   ") for line in capsys.readouterr().out.splitlines() if "Rank" in line]
    first, second = ([cell.strip() for cell in line if cell.strip()] for line in lines)
    assert first == ["Rank killed", "rank 3 failed, on node2", "0.4 s", "12.5 s", "51.0", "restart"]
    assert second[3] == "never"
