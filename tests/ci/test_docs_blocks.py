"""`make docs-test`: what is executed, what is only checked, and what fails."""

import importlib.util
from pathlib import Path

import pytest

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
    assert "needs a moon:\n  page.md:7  raise SystemExit(1)" in said
    assert said.endswith("1 passed, 0 failed, 2 skipped\n")


def test_a_comment_marks_the_next_block_alone(tmp_path):
    page = "<!-- needs: a moon -->\n" + block("json", "{}") + "\nText.\n\n" + block("json", "{}")
    needs = [one.need for one in docs_blocks.blocks_of("page.md", page)]
    assert needs == ["a moon", ""]
