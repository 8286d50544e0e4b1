"""Show which logs `holdfast diagnose` reads, and how it refuses what is no log."""

import gzip
import json
import os
import subprocess
import sys
import threading

import jsonschema
import pytest
import zstandard
from click.testing import CliRunner
from diagnose_calls import FAILED, answer, holdfast

from holdfast.cli.main import cli
from holdfast.core.errors import BadUse, NotFound

# Where logs come from


def test_standard_input_is_shown_in_its_surroundings(log):
    said = holdfast("-", given=log.read_text())
    assert "The root: -, line 45" in said
    assert "step 39 loss 2.110" in said
    assert answer("-", given=log.read_text())["root_line"]["file"] == "-"


def test_a_pipe_is_read_once_and_shown_whole(log):
    command = [sys.executable, "-m", "holdfast.cli.main", "diagnose", "-"]
    for options, wanted in ([], "step 39 loss 2.110"), (["--compressed"], "KeyError: 'warmup'"):
        with subprocess.Popen(["cat", log], stdout=subprocess.PIPE) as source:
            done = subprocess.run(
                [*command, *options],
                stdin=source.stdout,
                capture_output=True,
                text=True,
                check=True,
            )
        assert wanted in done.stdout
        assert done.stderr == ""


def test_a_named_pipe_is_not_opened_twice(log, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(log.read_bytes()), daemon=True)
    writer.start()
    said = holdfast(path)
    writer.join(5)
    assert "KeyError: 'warmup'" in said
    assert "step 39" not in said


@pytest.mark.parametrize("packed", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
def test_compressed_logs_show_the_root_in_its_surroundings(log, tmp_path, packed):
    path = tmp_path / "rank-1.log.packed"
    path.write_bytes(packed(b"an early line\n" * 300_000 + log.read_bytes()))
    said = holdfast(path)
    assert "> 300045 KeyError: 'warmup'" in said
    assert "300040 step 39 loss 2.110" in said


def test_a_record_is_shown_in_its_own_words(tmp_path):
    path = tmp_path / "sacct.json"
    path.write_text(
        '{"jobs": [\n{"job_id": 7, "state": {"current": ["NODE_FAIL"]}, "nodes": "gn[01-02]"}\n]}\n'
    )
    said = holdfast(path)
    assert "NodeFailure" in said
    assert "> 2 slurm: job 7 state=NODE_FAIL" in said
    assert "]}" not in said


def test_a_compressed_log_that_is_cut_short_is_used_and_noted(log, tmp_path):
    path = tmp_path / "rank-1.log.gz"
    path.write_bytes(
        gzip.compress(b"".join(b"step %d loss 1\n" % step for step in range(20_000)))[:-40]
    )
    found = answer(path)
    assert found["reason"] == "Unknown"
    assert "cut short" in found["notes"][0]
    assert "Notes" in holdfast(path)


def test_what_is_missing_beside_the_log_is_noted(log, tmp_path):
    found = answer(log, tmp_path / "dmesg.log")
    assert found["reason"] == "KeyError"
    assert any("dmesg.log" in note for note in found["notes"])


def test_carriage_returns_show_what_was_left_standing(tmp_path):
    path = tmp_path / "job.log"
    path.write_bytes(
        b"\n".join([b"  0%|    |\r 50%|##  |\r100%|####|", *(line.encode() for line in FAILED)])
    )
    said = holdfast(path)
    assert "100%|####|" in said
    assert "50%|##" not in said


def test_control_characters_and_brackets_are_shown_as_text(tmp_path):
    path = tmp_path / "job.log"
    lines = [
        "\x1b[31mstep 1 [bold]not markup[/bold] \u202egnol\u202c",
        *FAILED[:-1],
        "KeyError: '[red]\x07x'",
    ]
    path.write_text("\n".join(lines))
    said = holdfast(path)
    assert "[bold]not markup[/bold]" in said
    assert "[red]" in said
    assert not {"\x1b", "\x07", "\u202e"} & set(said)


def test_a_line_without_end_is_shown_short(tmp_path):
    path = tmp_path / "job.log"
    path.write_bytes(
        b"x" * 3_000_000 + b"\n" + "\n".join(FAILED).encode() + b"\n" + b"y" * 3_000_000
    )
    said = holdfast(path)
    assert "> 6 KeyError" in said
    assert len(said) < 10_000


# Bad input


def test_nothing_there_is_bad_use(tmp_path):
    said = holdfast(tmp_path / "missing.log", fails=NotFound)
    assert str(tmp_path / "missing.log") in said
    assert said.endswith(".")


def test_no_path_is_bad_use():
    found = CliRunner().invoke(cli, ["diagnose"])
    assert found.exit_code == 2
    assert "PATH" in found.output


def test_an_empty_path_is_not_the_current_folder():
    assert "PATH is empty" in holdfast("", fails=BadUse)


def test_a_folder_without_logs_is_bad_use(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    assert "There is no log in" in holdfast(tmp_path, fails=BadUse)


def test_binary_only_is_bad_use_that_says_so(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(8)) * 4000)
    assert "binary" in holdfast(path, fails=BadUse)


def test_a_file_that_may_not_be_read_is_told():
    assert "/proc/self/mem: not readable" in holdfast("/proc/self/mem", fails=BadUse)


def test_an_empty_file_is_bad_use_that_says_so(tmp_path, schema):
    path = tmp_path / "rank-0.log"
    path.write_text("")
    assert holdfast(path, fails=BadUse) == (
        f"{path} is empty. Give the log that the job's own output went to."
    )
    assert holdfast("-", given="", fails=BadUse).startswith("Standard input is empty.")
    said = json.loads(holdfast(path, "--json", code=2))
    jsonschema.validate(said, schema, cls=jsonschema.Draft202012Validator)
    assert said["error"] == {
        "message": f"{path} is empty.",
        "next_step": "Give the log that the job's own output went to.",
    }


def test_an_error_is_an_object_for_programs(tmp_path):
    said = json.loads(holdfast(tmp_path / "missing.log", "--json", code=2))
    assert set(said) == {"schema", "version", "error"}
    assert "missing.log" in said["error"]["message"]
