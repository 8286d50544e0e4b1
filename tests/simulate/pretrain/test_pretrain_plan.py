"""Advice from the records of earlier runs, and the two commands."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner

from holdfast.cli.main import cli
from holdfast.cli.plan import _why
from holdfast.core.accounting import summarize
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import Attempt, Checkpoint, Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.telemetry import StepJournal, StepRecord
from holdfast.simulate.pretrain import Records, advise

DAY_S = 86400.0
REASONS = ["ECCError", "ECCError", "NVLinkError", "AttributeError"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with a run of 64 ranks that trained for five days and failed once a day."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    paths = RunPaths(tmp_path, "run-1")
    paths.root.mkdir(parents=True, exist_ok=True)
    with (
        Ledger.open(ledger_url(tmp_path)) as ledger,
        StepJournal(paths.steps) as journal,
    ):
        ledger.add_run(
            Run(
                run_id="run-1", state="completed", command=["python", "t.py"], options={"nproc": 64},
                cwd="/w", host="h", pid=1, started_at_s=0.0, ended_at_s=5 * DAY_S, exit_code=0,
            )
        )  # fmt: skip
        for number in range(1, 6):
            begun_s = (number - 1) * DAY_S
            ledger.add_attempt(
                Attempt(
                    run_id="run-1", number=number, started_at_s=begun_s, start_step=(number - 1) * 100,
                    first_step_at_s=begun_s + 300.0, last_step=number * 100, ended_at_s=begun_s + DAY_S,
                    outcome="failed" if number < 5 else "completed",
                )
            )  # fmt: skip
            ledger.add_checkpoint(
                Checkpoint(
                    run_id="run-1", attempt=number, step=number * 100, path=f"/c/{number}", size_bytes=1,
                    state="written", stall_s=4.0, committed_at_s=begun_s + DAY_S - 100.0,
                )
            )  # fmt: skip
            for step in (number * 100 - 1, number * 100):
                journal.append(
                    StepRecord(
                        attempt=number, rank=0, step=step, step_s=70.0,
                        at_s=begun_s + DAY_S - 200.0 + step % 100,
                    )
                )  # fmt: skip
        for number, reason in enumerate(REASONS, start=1):
            ledger.add_incident(
                Incident(
                    run_id="run-1", attempt=number, kind="exit", rank=1, step=number * 100,
                    fault_at_s=number * DAY_S - 1.0, detected_at_s=number * DAY_S,
                    diagnosis={"reason": reason}, action="restart", resumed_at_s=number * DAY_S + 300.0,
                )
            )  # fmt: skip
    return tmp_path


def records(home):
    with Ledger.open(ledger_url(home)) as ledger:
        return Records.of([summarize(ledger, home, "run-1")], longest_step_s=70.0)


def test_records_give_failures_exposure_and_times(home):
    found = records(home)
    assert found.reasons == tuple(REASONS)
    assert found.gpus == 64
    assert found.job_days == pytest.approx(5 - 5 * 300 / DAY_S)
    assert found.gpu_days == pytest.approx(64 * found.job_days)
    assert found.stall_s == 4.0
    assert found.longest_start_s == 300.0


def test_advice_follows_the_records(home):
    advice = advise(records(home), replications=6)
    band = advice.mean_time_to_failure_h
    assert band.low < 24.0 < band.high
    assert band.mean == pytest.approx(24.0, rel=0.3), (
        "five days, four failures, and a prior worth one"
    )
    assert (advice.hang_floor_s, advice.first_step_limit_s) == (140.0, 600.0)
    assert advice.scenario.saves.stall_s == 4.0
    assert advice.interval_ettrs[advice.interval_s] == max(advice.interval_ettrs.values())
    by_name = {swing.name: swing for swing in advice.swings}
    assert by_name["failure rate"].half > 0 > by_name["failure rate"].twice
    assert by_name["failure rate"].elasticity < 0
    assert by_name["failure rate"].width > by_name["failure rate"].noise
    assert [swing.width for swing in advice.swings] == sorted(
        (swing.width for swing in advice.swings), reverse=True
    )
    assert "teardown_s" not in advice.assumed or records(home).teardown_s is None


def test_more_records_make_the_advice_narrower():
    widths = []
    for failures in (2, 200):
        seen = Records(
            runs=1,
            reasons=("ECCError",) * failures,
            gpu_days=64.0 * failures,
            job_days=float(failures),
            gpus=64,
        )
        band = advise(seen, days=5.0, replications=4).mean_time_to_failure_h
        widths.append(band.high / band.low)
    assert widths[0] > 3 * widths[1]


def test_a_limit_of_short_steps_is_not_said_to_be_twice_the_longest():
    assert _why("step", 0.1, 60.0) == "the longest step took 100 ms; a shorter limit gains little"
    assert _why("step", 70.0, 140.0) == "twice the longest step"
    assert _why("step", None, 60.0) == "no step is recorded: the default"


def test_a_ledger_without_runs_needs_a_size():
    nothing = Records(runs=0, reasons=(), gpu_days=0.0, job_days=0.0, gpus=1)
    with pytest.raises(BadUse, match="--gpus N"):
        advise(nothing)
    assert advise(nothing, gpus=64, days=2.0, replications=4).mean_time_to_failure_h.mean > 1


def said(*arguments):
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout  # progress, which a slow machine prints, is on standard error


def test_plan_prints_a_page_and_json(home):
    text = said("plan", "--replications", "4", "--days", "5")
    assert "save every" in text
    assert "twice the longest step" in text
    # `holdfast run` refuses --spares on a node alone.
    assert "holdfast run --hang-floor-s 140 --first-step-limit-s 600 -- COMMAND" in text
    found = json.loads(said("plan", "run-1", "--replications", "4", "--days", "5", "--json"))
    assert (found["schema"], found["version"], found["failures"]) == ("holdfast.plan", 1, 4)
    assert {"interval_s", "spares", "elasticities", "mean_time_to_failure_h"} <= set(found)


def test_plan_writes_a_page_with_a_bar_on_each_side(home):
    file = home / "new" / "plan.html"
    text = said("plan", "--replications", "4", "--days", "5", "--page", str(file))
    assert f"Page: {file}" in text
    page = file.read_text()
    assert page.count('<i class="half"') == page.count('<i class="twice"') == 10
    assert "failure rate" in page
    assert "steps that survive" in page
    assert "holdfast run --hang-floor-s 140" in page


KALOS = (
    "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,"
    "end_time,fail_time,stop_time,duration,queue,gpu_time\n"
)


def test_records_of_a_trace_count_late_failures_of_large_pretraining_jobs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    file = tmp_path / "trace_kalos.csv"
    rows = [  # GPUs, type, state, hours
        (1024, "Pretrain", "FAILED", 30),
        (1024, "Pretrain", "NODE_FAIL", 12),
        (512, "Pretrain", "COMPLETED", 50),
        (512, "Pretrain", "FAILED", 0.1),
        (8, "Pretrain", "FAILED", 20),
        (1024, "Evaluation", "FAILED", 20),
    ]
    day = "2023-06-01 00:00:00+00:00"
    lines = []
    for number, (gpus, kind, state, hours) in enumerate(rows):
        end = datetime(2023, 6, 1, tzinfo=UTC) + timedelta(hours=hours)
        seconds = int(hours * 3600)
        lines.append(
            f"j{number},u,{max(gpus // 8, 1)},{gpus},96,100,10,{kind},{state},{day},{day},{end},,,{seconds},0,"
            f"{seconds * gpus}"
        )
    file.write_text(KALOS + "\n".join(lines) + "\n")
    options = ("--trace", str(file), "--days", "5", "--json")
    found = json.loads(said("plan", *options, "--replications", "4"))
    assert (found["runs"], found["failures"], found["gpus"]) == (4, 2, 1024)
    assert found["training_days"] == pytest.approx((30 + 12 + 50 + 0.1) / 24, rel=0.01)
    (answer,) = json.loads(
        said(
            "simulate",
            "pretrain",
            "--gpus",
            "64",
            "--rates",
            "own",
            *options,
            "--replications",
            "3",
        )
    )["answers"]
    assert answer["rates"] == "own"
    with pytest.raises(BadUse, match="Add --rates own"):
        said("simulate", "pretrain", "--gpus", "64", "--trace", str(file))
    with pytest.raises(BadUse, match="Leave one of them out"):
        said("plan", "run-1", "--trace", str(file))


def test_simulate_pretrain_compares_scenarios(home):
    options = ("--gpus", "2048", "--days", "5", "--replications", "3")
    text = said("simulate", "pretrain", *options, "--scenario", "manual", "--scenario", "holdfast")
    assert "manual: GPU-hours" in text
    assert "people needed" in text
    found = json.loads(
        said(
            "simulate", "pretrain", *options, "--json", "--search", "--set", "stall_s=5", "--spares", "2",
            "--interval-s", "900", "--seed", "3", "--rates", "rsc-1",
        )
    )  # fmt: skip
    (answer,) = found["answers"]
    assert found["schema"] == "holdfast.simulate.pretrain"
    assert (answer["spares"], answer["interval_s"]) == (2, 900.0)
    best = answer["best"]
    assert best["ettr"] == max(best["ettr_by_interval"].values())


def test_simulate_pretrain_takes_the_rates_of_the_ledger(home):
    options = ("--gpus", "64", "--days", "5", "--replications", "3", "--rates", "own", "--json")
    (answer,) = json.loads(said("simulate", "pretrain", *options))["answers"]
    assert answer["rates"] == "own"
    assert answer["mean_time_to_failure_s"] == pytest.approx(DAY_S, rel=0.3)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("--rates", "nope"), "Choose one of: table3"),
        (("--set", "nope=1"), "Choose one of again_s"),
        (("--set", "stall_s=x"), "Give a number"),
        (("--set", "verifies=1"), "yes nor no"),
    ],
)
def test_wrong_use_is_a_sentence_with_the_next_step(arguments, answer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    with pytest.raises(HoldfastError, match=answer):
        said("simulate", "pretrain", "--gpus", "8", *arguments)
    with pytest.raises(HoldfastError, match="has no run"):
        said("simulate", "pretrain", "--gpus", "8", "--rates", "own")
