"""`holdfast simulate cluster` on small traces in the forms of two schedulers."""

import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from holdfast.cli.main import cli
from holdfast.core.errors import BadUse

HEADER = "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time"


def clock(at_s):
    return f"2023-03-02 {at_s // 3600:02d}:{at_s % 3600 // 60:02d}:{at_s % 60:02d}+08:00"


def row(number, kind, gpus, submit_s, queue_s, run_s, user="u1"):
    start_s = submit_s + queue_s
    return (
        f"{number},{user},1,{gpus},8,{kind},COMPLETED,{clock(submit_s)},{clock(start_s)},{clock(start_s + run_s)},"
        f"{run_s},{queue_s},{gpus * run_s}"
    )


@pytest.fixture
def trace(tmp_path):
    """A pretraining job, a batch of 20 trials, and a job that others wait for."""
    rows = [row(1, "Pretrain", 16, 0, 10, 3600, "u2"), row(2, "Other", 8, 60, 5, 600)]
    rows += [row(10 + n, "Eval", 1, 100 + n, 30 + n, 300 + 10 * n, "u3") for n in range(20)]
    file = tmp_path / "trace_seren.csv"
    file.write_text("\n".join([HEADER, *rows]) + "\n")
    return file


def run(*arguments):
    result = CliRunner().invoke(
        cli, ["simulate", "cluster", *map(str, arguments)], standalone_mode=False
    )
    if result.exception:
        raise result.exception
    return result.stdout


def answered(*arguments):
    return json.loads(run(*arguments, "--json"))


def test_waits_by_type_stand_beside_the_traces_own_with_their_distance(trace):
    found = answered(trace, "--capacity", "3x8", "--reserve", "Pretrain=2")
    assert (found["schema"], found["version"], found["nodes"]) == (
        "holdfast.simulate.cluster",
        1,
        3,
    )
    (variant,) = found["variants"]
    types = {one["type"]: one for one in variant["types"]}
    pretraining, other, evaluation = (types[name] for name in ("Pretrain", "Other", "Evaluation"))
    assert pretraining["simulated"]["mean_s"] == 0
    assert pretraining["trace"]["mean_s"] == 10
    assert pretraining["distance"] == {"jobs": 1, "ks": 1.0, "wasserstein_s": 10.0}
    assert other["simulated"]["mean_s"] == 0
    # Trials wait for the 8 GPUs of the other job: the first 8 from 100 s and later until 660 s.
    assert evaluation["simulated"]["median_s"] > 500
    assert variant["useful_gpu_hours"] == pytest.approx(
        (16 * 3600 + 8 * 600 + sum(300 + 10 * n for n in range(20))) / 3600
    )
    assert variant["evaluations"]["checkpoints"] == 1


def test_the_limit_makes_evaluation_wait(trace):
    waits = [
        answered(trace, "--capacity", "4x8", "--reserve", "Pretrain=2", *more)["variants"][0][
            "evaluations"
        ]["mean_s"]
        for more in ((), ("--limit", "Evaluation=2"))
    ]
    assert waits[1] > 2 * waits[0]


def test_decoupled_evaluation_holds_fewer_gpu_hours_and_leaves_the_others_alone(trace):
    found = answered(trace, "--capacity", "4x8", "--decoupled")
    before, after = found["variants"]
    assert (before["name"], after["name"]) == ("as submitted", "decoupled")
    assert after["jobs"] == before["jobs"] - 20 + 1
    assert found["coordinator"]["simulated_batches"] == 1
    ratio = after["evaluations"]["gpu_hours"] / before["evaluations"]["gpu_hours"]
    # Inference is 51.5 % of a trial; the node also loads once.
    assert 0.515 < ratio < 0.9
    assert found["coordinator"]["held_ratio"] == pytest.approx(1.0, abs=0.25)
    assert found["coordinator"]["scores_ratio"] > found["coordinator"]["held_ratio"]


def test_a_person_sees_the_policy_and_what_is_assumed(trace):
    text = run(trace, "--capacity", "4x8")
    assert "22 GPU jobs on 4 nodes of 8 GPUs" in text
    assert "reserved: Pretrain 2 nodes" in text
    assert "Assumed: Backfill predicts run times" in text


def test_the_same_seed_gives_the_same_bytes_whatever_the_hashes(trace, tmp_path):
    outputs = []
    arguments = ["simulate", "cluster", str(trace), "--capacity", "4x8", "--decoupled", "--json"]
    for salt in ("1", "2"):
        page = tmp_path / f"{salt}.html"
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.cli.main", *arguments, "--page", str(page)],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            check=True,
        )
        outputs.append((done.stdout.replace(str(page).encode(), b""), page.read_bytes()))
    assert outputs[0] == outputs[1]
    assert b"How long jobs wait, decoupled" in outputs[0][1]


def test_a_process_killed_before_the_page_is_whole_leaves_the_earlier_one(trace, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("earlier")
    killed = (
        "import os, pathlib, signal, sys\n"
        "pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from holdfast.cli.main import cli\n"
        "cli(sys.argv[1:])\n"
    )
    arguments = ["simulate", "cluster", str(trace), "--capacity", "4x8", "--page", str(page)]
    done = subprocess.run(
        [sys.executable, "-c", killed, *arguments], check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL
    assert page.read_text() == "earlier"
    run(*arguments[2:])
    again = page.read_bytes()
    run(*arguments[2:])
    assert page.read_bytes() == again != b"earlier"


def test_records_of_slurm_need_no_other_loader(tmp_path):
    file = tmp_path / "sacct.txt"
    file.write_text(
        "JobID|User|Partition|JobName|State|Submit|Start|End|AllocTRES|NNodes|ExitCode\n"
        "1|a|train|pretrain|COMPLETED|2026-03-01T00:00:00|2026-03-01T00:01:00|2026-03-01T01:01:00|gres/gpu=8|1|0:0\n"
        "2|b|dev|debug|COMPLETED|2026-03-01T00:02:00|2026-03-01T01:01:00|2026-03-01T01:11:00|gres/gpu=4|1|0:0\n"
    )
    found = answered(file, "--capacity", "1x8", "--reserve", "train=0", "--zone", "UTC")
    waits = {one["type"]: one["simulated"]["mean_s"] for one in found["variants"][0]["types"]}
    assert sorted(waits.values()) == [0.0, 3480.0]
    with pytest.raises(BadUse, match="may use 0"):
        run(file, "--capacity", "1x8", "--reserve", "train=1", "--zone", "UTC")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--reserve", "Pretrain"], "Give NAME=NUMBER"),
        (["--limit", "Nobody=3"], "no type or pool"),
        (["--decoupled", "--limit", "Evaluation=4"], "whole node .* 8 GPUs, but may use 4"),
        (
            ["--decoupled", "--until", "2023-03-01T16:01:45"],
            "no evaluation to decouple: no 10 jobs",
        ),
    ],
)
def test_errors_say_what_to_do(trace, more, says):
    with pytest.raises(BadUse, match=says):
        run(trace, *more, "--capacity", "4x8")


def test_a_job_larger_than_the_cluster_is_left_out_and_counted(trace):
    assert answered(trace, "--capacity", "1x8")["left_out"] == {"larger than the cluster": 1}


def test_jobs_on_parts_of_a_gpu_are_counted_among_what_is_assumed(trace, tmp_path):
    file = tmp_path / "parts.csv"
    rows = "a,2026-03-01T00:00:00,2026-03-01T00:01:00,2026-03-01T01:01:00,0.5\n" * 2
    file.write_text("job_id,submit,start,end,gpus\n" + rows.replace("a", "b", 1))
    columns = tmp_path / "map.toml"
    columns.write_text(
        '[columns]\njob_id = "job_id"\nsubmit_at = "submit"\nstart_at = "start"\nend_at = "end"\ngpu_num = "gpus"\n'
    )
    parts = run(file, "--map", columns, "--capacity", "1x8", "--zone", "UTC")
    assert "Assumed: 2 jobs on a part of a GPU: each holds whole GPUs" in parts
    assert "part of a GPU" not in run(trace, "--capacity", "4x8")


def test_a_cluster_of_unknown_size_is_asked_for(tmp_path):
    file = tmp_path / "sacct.txt"
    file.write_text(
        "JobID|User|Partition|JobName|State|Submit|Start|End|AllocTRES|NNodes|ExitCode\n"
        "1|a|train|x|COMPLETED|2026-03-01T00:00:00|2026-03-01T00:01:00|2026-03-01T01:01:00|gres/gpu=8|1|0:0\n"
    )
    with pytest.raises(BadUse, match="--capacity NODESxGPUS"):
        run(file, "--zone", "UTC")
