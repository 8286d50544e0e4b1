"""`make docs-test`: what is executed, what is only checked, and what fails."""

import importlib.util
from pathlib import Path

import psutil
import pytest

from holdfast.core.processes import process_state

FILE = Path(__file__).parents[2] / ".ci/docs_blocks.py"
SPEC = importlib.util.spec_from_file_location("docs_blocks", FILE)
docs_blocks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(docs_blocks)


def results(text, folder):
    (folder / "given.py").write_text("steps = 3\n")
    return docs_blocks.run_page("page.md", text, folder)


def block(language, *lines):
    return "\n".join([f"```{language}", *lines, "```", ""])


def test_lines_of_a_shell_share_one_shell_and_leave_their_files(tmp_path):
    page = block("sh", "name=made", 'echo "$name" > made.txt')
    assert [one.error for one in results(page, tmp_path)] == ["", ""]
    assert (tmp_path / "made.txt").read_text() == "made\n"


@pytest.mark.parametrize(
    "failing",
    [
        block("sh", "false", "true"),
        block("sh", "srun holdfast runs ls --no-such-option"),
        block("python", "assert steps == 4"),
        block("python", "while"),
        "<!-- needs: a cluster -->\n" + block("python", "while"),
        block("toml", "a = "),
        block("yaml", "a: [1"),
        block("json", "{"),
    ],
)
def test_a_block_that_does_not_run_as_printed_fails(failing, tmp_path, capsys):
    found = results(failing, tmp_path)
    assert any(one.error for one in found)
    assert docs_blocks.report(found) == 1
    assert "FAILED page.md:1" in capsys.readouterr().out.replace("page.md:2", "page.md:1")


def test_what_a_line_needs_is_listed_and_counted(tmp_path, capsys):
    page = block("sh", "srun touch never", "touch ran") + "\n<!-- needs: a moon -->\n"
    found = results(page + block("python", "raise SystemExit(1)"), tmp_path)
    assert [one.need for one in found] == ["Slurm", "", "a moon"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given.py", "ran"]
    assert docs_blocks.report(found) == 0
    said = capsys.readouterr().out
    assert "1 checked only, needs a moon:\n  page.md:7  raise SystemExit(1)" in said
    assert "CPU s  page.md:1\n" in said
    assert "CPU s  page.md:7\n" not in said
    assert said.endswith("1 executed, 2 checked only, 0 failed\n")


def test_no_line_of_a_failed_block_counts_as_executed(tmp_path, capsys):
    found = results(block("sh", "true", "false", "true"), tmp_path)
    assert docs_blocks.report(found) == 1
    assert capsys.readouterr().out.endswith("0 executed, 0 checked only, 1 failed\n")


LEAVES_A_SESSION = "setsid bash -c 'echo $$ > pid; exec sleep 3600' &"


def started_process_is_gone(folder):
    return process_state(int((folder / "pid").read_text())) in (None, psutil.STATUS_ZOMBIE)


def test_a_block_beyond_its_limit_fails_and_ends_with_all_its_processes(tmp_path, monkeypatch):
    # On a machine that stands still, a short limit ends the block before the process starts.
    for limit_s in (0.5, 4.0, 32.0):
        monkeypatch.setattr(docs_blocks, "LIMIT_S", limit_s)
        found = results(block("sh", LEAVES_A_SESSION, "wait"), tmp_path)
        assert f"killed after {limit_s:g} s" in found[0].error
        if (tmp_path / "pid").exists():
            break
    assert started_process_is_gone(tmp_path)


def test_what_a_block_leaves_in_the_background_ends_with_the_block(tmp_path):
    waits = "until [ -s pid ]; do sleep 0.02; done"
    found = results(block("sh", LEAVES_A_SESSION, waits), tmp_path)
    assert not any(one.error for one in found)
    assert started_process_is_gone(tmp_path)


def test_a_python_block_that_uses_no_given_name_does_not_import_them(tmp_path):
    is_given = "import sys; assert ('given' in sys.modules) is "
    page = block("python", f"{is_given}False") + block("python", f"print(steps); {is_given}True")
    assert [one.error for one in results(page, tmp_path)] == ["", ""]


def test_the_first_block_of_the_starting_page_is_executed_once_for_all_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(docs_blocks, "ROOT", tmp_path)
    monkeypatch.setattr(docs_blocks, "WORKSPACE", tmp_path / "workspace")
    starting = tmp_path / docs_blocks.STARTING_PAGE
    page = block("sh", "echo run >> runs", "echo changed > train.py") + block("sh", "cat runs")
    for path, text in ((starting, page), (tmp_path / "workspace/train.py", "as it was")):
        path.parent.mkdir()
        path.write_text(text)
    folder = tmp_path / "prepared"
    first = docs_blocks.prepare(folder)
    rest = docs_blocks.run_page(docs_blocks.STARTING_PAGE, page, folder)
    assert [one.text for one in first + rest] == [
        "echo run >> runs",
        "echo changed > train.py",
        "cat runs",
    ]
    assert not any(one.error for one in first + rest)
    assert (folder / "runs").read_text() == "run\n"
    assert (folder / "train.py").read_text() == "as it was"


def test_a_comment_marks_the_next_block_alone(tmp_path):
    page = "<!-- needs: a moon -->\n" + block("json", "{}") + "\nText.\n\n" + block("json", "{}")
    needs = [one.need for one in docs_blocks.blocks_of("page.md", page)]
    assert needs == ["a moon", ""]


def test_a_page_beside_the_newcomers_path_is_checked_and_not_executed(tmp_path):
    made = tmp_path / "made"
    page = block("sh", f"touch {made}", "holdfast runs ls --no-such-option") + block("toml", "a = ")
    touched, refused, broken = docs_blocks.check_page("other.md", page)
    assert not made.exists()
    assert (touched.need, touched.error) == (docs_blocks.OTHER_PAGE, "")
    assert "--no-such-option" in refused.error
    assert broken.error
