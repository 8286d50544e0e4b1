"""Check the files that a metric read, and the reuse of its result."""

import json
import subprocess
import sys

import pytest

from holdfast.evaluate.coordinator.kept_metrics import KeptMetrics
from holdfast.evaluate.types.reads import ABSENT, CHANGED, content_digest
from holdfast.evaluate.wire.answer_journal import Journal

# A process of its own: an audit hook stays for the life of the process.
READER = """
import json, os, sys
from pathlib import Path
from holdfast.evaluate.types.reads import ReadRecorder

recorder = ReadRecorder()
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
{body}
print(json.dumps(recorder.files(apart_from=[str(folder / "apart")])))
"""


def read_by(folder, body):
    done = subprocess.run(
        [sys.executable, "-c", READER.format(body=body), str(folder)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    return {path: digest for path, digest in found.items() if path.startswith(str(folder))}


def test_files_and_modules_that_were_read_are_recorded_and_nothing_else(tmp_path):
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "tokenizer.json").write_text("{}")
    (tmp_path / "a_helper.py").write_text(
        "TABLE = open(__file__.replace('a_helper.py', 't')).read()"
    )
    (tmp_path / "t").write_text("1")
    (tmp_path / "unread").write_text("2")
    read_by(tmp_path, "import a_helper")  # the next process reads the compiled file
    body = "import a_helper, colorsys; (folder / 'apart' / 'tokenizer.json').read_text()\n"
    body += "(folder / 'w').write_text('3'); (folder / 'w').read_text(); os.open(folder / 't', 0)"
    assert read_by(tmp_path, body) == {
        str(tmp_path / name): content_digest(str(tmp_path / name)) for name in ("a_helper.py", "t")
    }


def test_a_file_that_changed_between_two_reads_equals_no_content(tmp_path):
    (tmp_path / "t").write_text("1")
    body = "p = folder / 't'; p.read_text(); os.replace(folder / 'u', p); p.read_text()"
    (tmp_path / "u").write_text("22")
    assert read_by(tmp_path, body)[str(tmp_path / "t")] == CHANGED


def test_a_file_that_was_looked_for_and_not_there_is_recorded_as_absent(tmp_path):
    body = "try: open(folder / 'overrides')\nexcept FileNotFoundError: pass"
    assert read_by(tmp_path, body) == {str(tmp_path / "overrides"): ABSENT}


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "journals", "metrics")
    yield journal
    journal.close()


def keep(journal, measured, *paths):
    read = {str(path): content_digest(str(path)) for path in paths}
    journal.commit(KeptMetrics().records(journal, b"k" * 16, measured, read))


def found(journal):
    return KeptMetrics().find(journal, b"k" * 16)


def test_a_metric_is_found_while_the_files_are_what_they_were(journal, tmp_path):
    helper, table = tmp_path / "helper.py", tmp_path / "table"
    helper.write_text("old")
    keep(journal, b"of the old", helper)
    assert found(journal) == b"of the old"
    helper.write_text("newer")
    assert found(journal) is None
    table.write_text("1")
    keep(journal, b"of the newer", helper, table)  # it reads one file more
    assert found(journal) == b"of the newer"
    table.write_text("22")
    assert found(journal) is None
    helper.write_text("old")
    assert found(journal) == b"of the old"


def test_a_metric_is_computed_again_once_a_file_is_there_that_was_not(journal, tmp_path):
    overrides = tmp_path / "overrides"
    keep(journal, b"without", overrides)
    keep(journal, b"again", overrides)
    assert found(journal) == b"without"
    overrides.write_text("1")
    assert found(journal) is None


def test_a_metric_whose_files_are_not_known_is_not_kept(journal):
    assert KeptMetrics().records(journal, b"k" * 16, b"1", None) == []


def test_one_that_reads_nothing_is_kept_as_it_is(journal):
    keep(journal, b"1")
    assert found(journal) == b"1"
    assert KeptMetrics().records(journal, b"k" * 16, b"2", {}) == [], "the first stays"
