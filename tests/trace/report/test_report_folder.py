"""Check the report's folder: written whole or not at all, and never over foreign files."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sample_report

from holdfast.core.errors import BadUse
from holdfast.trace.report import write_report
from holdfast.trace.report.folder import replaced

SMALL = replace(sample_report.report(), entries=sample_report.entries(2)[:3])
SMALLEST = replace(SMALL, entries=SMALL.entries[:1])
KILLED_WRITE = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import sample_report
from dataclasses import replace
from holdfast.trace.report import folder, write_report

steps, at = 0, int(sys.argv[3])
def counted(real):
    def call(*arguments, **named):
        global steps
        steps += 1
        if steps == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    return call

Path.write_text = counted(Path.write_text)
Path.rename = counted(Path.rename)
os.fsync = counted(os.fsync)
folder._exchange = counted(folder._exchange)
folder.shutil.rmtree = counted(folder.shutil.rmtree)
report = replace(sample_report.report(), title="the new one", entries=sample_report.entries(0)[:1])
write_report(Path(sys.argv[2]), report)
print(steps)
"""


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def write_in_child(folder, kill_at):
    command = [
        sys.executable,
        "-c",
        KILLED_WRITE,
        str(Path(__file__).parent),
        str(folder),
        str(kill_at),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports") / "made" / "report"
    assert write_report(folder, SMALL) == folder / "index.html"
    return folder


def test_it_holds_the_page_the_findings_and_each_figures_drawing_and_numbers(written):
    names = {str(path) for path in contents(written)}
    assert names == {
        "index.html", "findings.json", "data/comparison.csv", "data/durations_0.csv", "data/by_type_1.csv",
        "figures/durations_0.svg", "figures/by_type_1.svg",
    }  # fmt: skip
    assert [path.name for path in written.parent.iterdir()] == ["report"]
    table = SMALL.entries[1].result.table
    assert (written / "data/durations_0.csv").read_text() == table.csv()


def test_equal_reports_give_equal_bytes(written, tmp_path):
    write_report(tmp_path / "again", SMALL)
    assert contents(tmp_path / "again") == contents(written)


def test_it_is_readable_by_whom_the_umask_says(written):
    umask = os.umask(0)
    os.umask(umask)
    assert written.stat().st_mode & 0o777 == 0o777 & ~umask
    assert (written / "index.html").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_full_disk_is_told_with_the_folder(tmp_path):
    with pytest.raises(OSError, match="No space left") as error, replaced(tmp_path / "report"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert error.value.filename == str(tmp_path / "report")


def test_paper_adds_pdf_and_png(tmp_path):
    write_report(tmp_path / "report", SMALL, paper=True)
    assert {path.suffix for path in (tmp_path / "report/figures").iterdir()} == {
        ".svg",
        ".pdf",
        ".png",
    }
    write_report(tmp_path / "report", SMALL)  # replaced by a report without it
    assert {path.suffix for path in (tmp_path / "report/figures").iterdir()} == {".svg"}


def test_a_kill_at_any_instant_leaves_the_old_report_or_the_new_one(tmp_path):
    folder = tmp_path / "report"
    write_report(folder, SMALLEST)
    old = contents(folder)
    whole = write_in_child(tmp_path / "other", 0)
    steps, new = int(whole.stdout), contents(tmp_path / "other")
    assert old != new
    seen = set()
    for at in range(1, steps + 1):
        assert write_in_child(folder, at).returncode == -signal.SIGKILL
        now = contents(folder)
        assert now in (old, new), at
        seen.add(now == new)
        if now == new:
            write_report(folder, SMALLEST)  # The remains beside the folder do no harm.
    assert seen == {True, False}
    assert contents(folder) == old


def test_a_failure_leaves_everything_as_it_was(tmp_path, monkeypatch):
    folder = tmp_path / "report"
    write_report(folder, SMALL)
    old = contents(folder)
    monkeypatch.setattr("holdfast.trace.report.write.render", lambda view: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(folder, SMALL)
    assert contents(folder) == old
    with pytest.raises(ZeroDivisionError):
        write_report(tmp_path / "new", SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_where_folders_cannot_be_exchanged_they_are_renamed(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.trace.report.folder.ctypes.CDLL", lambda *_, **__: object())
    write_report(tmp_path / "report", SMALL)
    write_report(tmp_path / "report", replace(SMALL, title="the new one"))
    assert "the new one" in (tmp_path / "report/index.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "index.html").write_text("mine")
    with pytest.raises(BadUse, match="is not a report of holdfast"):
        write_report(tmp_path / "thesis", SMALL)
    assert contents(tmp_path / "thesis") == {Path("index.html"): b"mine"}
    (tmp_path / "thesis" / "findings.json").write_text('{"schema": "another"}')
    with pytest.raises(BadUse, match="is not a report of holdfast"):
        write_report(tmp_path / "thesis", SMALL)


@pytest.mark.parametrize("name", ["notes.md", "figures/mine.ai", "data/raw/all.csv"])
def test_a_file_laid_into_a_report_is_not_lost(tmp_path, name):
    write_report(tmp_path / "report", SMALL)
    (tmp_path / "report" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "report" / name).write_text("mine")
    with pytest.raises(BadUse, match="not part of a report"):
        write_report(tmp_path / "report", SMALL)
    assert (tmp_path / "report" / name).read_text() == "mine"


def test_a_file_in_the_way_is_refused_and_an_empty_folder_is_not(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadUse, match="is a file"):
        write_report(tmp_path / "file", SMALL)
    (tmp_path / "empty").mkdir()
    write_report(tmp_path / "empty", SMALL)
    assert (tmp_path / "empty/index.html").exists()


def test_through_a_link_the_folder_is_replaced_and_not_the_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with replaced(tmp_path / "link") as new:
        (new / "file").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real/file").read_text() == "new"


def test_the_findings_are_json_without_nan(written):
    found = json.loads((written / "findings.json").read_text(), parse_constant=pytest.fail)
    assert (found["schema"], found["version"]) == ("holdfast.trace.findings", 1)
    assert [finding["id"] for finding in found["findings"]] == ["short-jobs", "single-gpu", "idle"]
    assert found["findings"][0] == {
        "id": "short-jobs", "sentence": "Half of the GPU jobs of Seren end within 2 min 02 s.", "value": 122.0,
        "unit": "s", "study": 120.0, "holds": True, "why": "", "cluster": "Seren", "source": "section 3.1",
    }  # fmt: skip
    assert found["findings"][2]["study"] is None
    assert found["numbers"]["seren.avg_gpu_num"] == 5.68
    assert [note["rows"] for note in found["notes"]] == [12, 3141, 7]
    assert [one["cluster"] for one in found["overviews"]] == ["Seren"]
    assert found["overviews"][0]["key_figures"][0]["name"] == "GPUs in use"
    assert found["answer"].startswith("Seren gave ")
    shown = [one for one in found["analyses"] if one["left_out"] is None]
    assert all(one["caption"] and one["section"] for one in shown)
