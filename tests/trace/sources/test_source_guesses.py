import gzip
import json
import os
import subprocess

import pytest

from holdfast.trace import load
from holdfast.trace.errors import BadTrace
from holdfast.trace.sources.guesses import guess_of
from holdfast.trace.sources.recognition import Input, recognised

SACCT = "sacct --allusers"
ACCOUNTING = "server_priv/accounting"
FOREIGN = {
    "sacct's default table": (
        "       JobID    JobName  Partition\n------------ ---------- ----------\n101 train gpu\n",
        SACCT,
    ),
    "without its header": ("101    train   gpu   lab   8  COMPLETED   0:0 \n", SACCT),
    "--noheader": ("101|101|ann|lab|gpu|COMPLETED|2024-03-01T10:00:00|cpu=8|n1\n", SACCT),
    "scontrol show job": ("JobId=101 JobName=x\n   UserId=ann(1)\n", SACCT),
    "`squeue`": ("             JOBID PARTITION     NAME     USER ST\n 101 gpu x ann R\n", SACCT),
    "squeue --json": (json.dumps({"jobs": [{"job_id": 1, "job_state": ["RUNNING"]}], "slurm": 1}), SACCT),
    "kubectl get pods": ("NAME   READY   STATUS    RESTARTS   AGE\nx 1/1 Running 0 5m\n", "kubectl get pods,jobs"),
    "neither pods nor Jobs": ("apiVersion: v1\nkind: Node\nmetadata:\n  name: n\n", "kubectl get pods,jobs"),
    "bjobs": ("JOBID   USER    STAT  QUEUE      FROM_HOST\n901 ann RUN gpu h1\n", "lsb.acct"),
    "bacct": ("Job <901>, User <ann>, Project <p>\n", "lsb.acct"),
    "qstat": ("Job id            Name             User\n901.srv x ann\n", ACCOUNTING),
    "qacct": ("=====================\nqname        gpu.q\nhostname     n1\n", "awk -F:"),
    "accounting file of Grid Engine": ("gpu:n1:lab:ann:x:901:sge:0:1709287200:1709287260:1709290860:0:0\n", "awk -F:"),
    "condor_history": (" ID     OWNER          SUBMITTED   RUN_TIME     ST\n 1.0 ann 3/1\n", "condor_history -format"),
    "ClassAds": ('ClusterId = 12\nOwner = "ann"\nRequestGPUs = 4\n', "condor_history -format"),
    "JSON lines": ('{"id": 1, "gpus": 4}\n{"id": 2, "gpus": 4}\n', '(["id", "gpus"], (inputs'),
    "other names": ("job_id,gpus,submit\n1,8,2025-03-01T10:00:00Z\n", "job_id, gpus, submit"),
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_an_unknown_file_is_answered_by_a_guess_and_the_command(tmp_path, what):
    text, command = FOREIGN[what]
    path = tmp_path / "jobs.txt"
    path.write_text(text)
    with pytest.raises(BadTrace) as error:
        list(recognised(Input.of(path), None, []))
    told = str(error.value)
    assert "Not recognised; it looks like " in told
    assert what in told
    assert command in told


def test_a_pipe_is_to_be_written_to_a_file_first(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadTrace, match=r"pipe or device .*Write the records to a file first"):
        list(recognised(Input.of(pipe), None, []))


def test_a_text_in_utf_16_is_converted_first(tmp_path):
    path = tmp_path / "jobs.txt"
    path.write_text("JobID|State\n1|COMPLETED\n", encoding="utf-16")
    with pytest.raises(BadTrace, match=r"UTF-16.*iconv -f UTF-16 -t UTF-8 "):
        list(recognised(Input.of(path), None, []))


@pytest.mark.parametrize(
    ("text", "encoding", "written"),
    [
        ("id;gpus;submit\n1;8;a,b\n", "utf-8", "my jobs-commas.csv"),
        ("id\tgpus\tsubmit\n1\t8\ta,b\n", "utf-8", "my jobs-commas.csv"),
        ("id,gpus,submit\n1,8,2\n", "utf-16", "my jobs-utf8.txt"),
    ],
)
def test_the_command_that_converts_a_file_runs_as_printed(tmp_path, text, encoding, written):
    path = tmp_path / "my jobs.txt"
    path.write_text(text, encoding=encoding)
    subprocess.run(guess_of(path).command, shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / written).read_text().splitlines()[0] == "id,gpus,submit"


@pytest.mark.parametrize(
    "content", [b"Dear diary\n", b"\x89PNG\r1\n\x1a\n\xff\r,\n", b"a,b,c\r1,2,3\r\n4\r5\n"]
)
def test_what_nothing_tells_is_not_guessed(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    assert guess_of(path) is None
    with pytest.raises(BadTrace, match="holdfast trace formats"):
        list(recognised(Input.of(path), None, []))


def test_files_of_a_folder_that_are_passed_over_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("JobID|State|AllocTRES\n1|COMPLETED|gres/gpu=1\n")
    (tmp_path / "b.txt").write_text(FOREIGN["`squeue`"][0])
    (tmp_path / "readme").write_text("Dear diary\n")
    (tmp_path / ".hidden").write_text("Dear diary\n")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"Dear diary\n")[:20])
    with load(tmp_path) as trace:
        (note,) = [note for note in trace.notes if note.check == "files-passed-over"]
    assert (note.rows, note.examples) == (3, ("b.txt: what `squeue` prints", "cut.gz", "readme"))


@pytest.mark.parametrize(
    ("gpus", "told"), [("gres/gpu=0", True), ("cpu=1", True), ("gres/gpu=1", False)]
)
def test_that_no_job_has_a_gpu_is_told_first(tmp_path, gpus, told):
    path = tmp_path / "a.txt"
    path.write_text(f"JobID|State|Submit|AllocTRES\n1|COMPLETED|2024-03-01T10:00:00|{gpus}\n")
    with load(path) as trace:
        assert (trace.notes[0].check == "no-gpus") == told
        assert trace.notes[-1].check == "slurm-no-zone"


def test_a_cluster_that_is_only_compared_with_may_have_no_gpus(tmp_path):
    for name, gpus in (("own", 1), ("other", 0)):
        text = f"JobID|State|AllocTRES\n1|COMPLETED|cpu=1,gres/gpu={gpus}\n"
        (tmp_path / f"{name}.txt").write_text(text)
    with load(tmp_path / "own.txt", compare=[tmp_path / "other.txt"]) as trace:
        assert not trace.notes
