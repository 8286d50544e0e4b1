"""Test how jobs ended: runs that ended well need no action, and the others keep their answer."""

# ruff: noqa: E501  (lines of logs stand as they are printed)

import json
from pathlib import Path

import pytest
from ended_well import ENDED_WELL, STACK

from holdfast.diagnose import JobContext, RankExit, diagnose
from holdfast.diagnose.logs.job_context import Hang

PUBLIC = Path(__file__).parents[3] / "shared" / "cases" / "diagnosis"
STEPS = [f"[rank0]: step {n} loss 2.{n:02d}" for n in range(1, 6)]
DONE = "Training finished."
ABORTED = [
    "[rank4]:[F205 18:19:06.376 ProcessGroupNCCL.cpp:1554] [PG ID 12 PG GUID 99 Rank 4] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.",
    "E0205 18:19:10.118 140 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -6) local_rank: 4 (pid: 214) of binary: /usr/bin/python",
]
TIME_LIMIT = (
    "slurmstepd: error: *** JOB 12 ON n3 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"
)
PREEMPTED = (
    "slurmstepd: error: *** JOB 12 ON n3 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***"
)


@pytest.fixture
def ended(tmp_path):
    def answer(*lines, context=None, **logs):
        for name, text in {"job": lines, **logs}.items():
            if text:
                (tmp_path / f"{name.replace('_', '-')}.log").write_text("\n".join(text) + "\n")
        return diagnose(tmp_path, context)

    return answer


def nothing_to_do(found):
    return (found.action, found.restart_helps) == ("none", False)


@pytest.mark.parametrize("name", ENDED_WELL)
def test_a_run_that_ended_well_needs_nothing(ended, name):
    lines = ENDED_WELL[name]()
    found = ended(*lines)
    assert (found.outcome, found.reason, found.root_line) == ("completed", "Unknown", None)
    assert nothing_to_do(found)
    assert found.end_line.text == lines[found.end_line.line - 1].strip()
    assert "nothing to do" in found.summary


@pytest.mark.parametrize("name", ENDED_WELL)
def test_the_prefix_of_a_launcher_changes_nothing(ended, name):
    found = ended(*(f"2026-02-11T04:11:01.118Z {line}" for line in ENDED_WELL[name]()))
    assert (found.outcome, found.action) == ("completed", "none")


@pytest.mark.parametrize("name", ENDED_WELL)
def test_without_its_end_and_with_an_error_it_failed(ended, name):
    lines = [line for line in ENDED_WELL[name]() if "loss" in line][:6]
    found = ended(*lines, *STACK, "KeyError: 'tokens'")
    assert (found.outcome, found.reason) == ("failed", "KeyError")


def test_the_public_cases():
    if not PUBLIC.is_dir():
        pytest.skip("the public cases lie beside the repository of the project's makers")
    for label in map(json.loads, (PUBLIC / "labels.jsonl").read_text().splitlines()):
        found = diagnose(PUBLIC / f"{label['id']}.log")
        assert found.outcome == label["outcome"], label["id"]
        assert nothing_to_do(found) == label["outcome"].startswith("completed"), label["id"]


def test_only_the_teardown_failed(ended):
    found = ended(*STEPS, DONE, *ABORTED)
    assert found.outcome == "completed_teardown_failed"
    assert nothing_to_do(found)
    assert found.end_line.text == DONE
    assert found.root_line.line > len(STEPS) + 1, "the root is an error after the end of the work"


def test_an_error_before_the_work_was_done_is_no_cause_of_the_teardown(ended):
    found = ended(*STEPS, *STACK, "KeyError: 'a'", DONE, *ABORTED)
    assert (found.outcome, found.reason) != ("failed", "KeyError")
    assert found.reason != "KeyError"


@pytest.mark.parametrize(
    "error",
    ["OSError: [Errno 28] No space left on device: '/out/model.safetensors'", "KeyError: 'export'"],
)
def test_work_that_fails_after_the_training_is_a_failure(ended, error):
    found = ended(*STEPS, DONE, *STACK, error)
    assert found.outcome == "failed"
    assert found.root_line.text == error


def test_training_that_goes_on_after_a_stage_was_done_has_not_ended(ended):
    later = [f"[rank0]: step {n} loss 1.{n:02d}" for n in range(6, 12)]
    assert ended(*STEPS, DONE, *later).outcome == "running"
    assert ended(*STEPS, DONE, *later, *STACK, "KeyError: 'a'").outcome == "failed"


def test_one_process_that_ended_well_does_not_speak_for_the_others(ended):
    found = ended(
        *STEPS, "Process 901 exits successfully.", *STACK, "[rank1]: KeyError: 'a'",
        "container trainer-1 exited with code 1",
    )  # fmt: skip
    assert found.outcome == "failed"


def test_a_later_error_is_not_hidden_by_an_earlier_command_that_ended_well(ended):
    found = ended("prepare exit code: 0", *STEPS, *STACK, "KeyError: 'a'", "job exit code: 1")
    assert (found.outcome, found.reason) == ("failed", "KeyError")


@pytest.mark.parametrize("line", [TIME_LIMIT, PREEMPTED])
def test_stopped_by_somebody(ended, line):
    found = ended(*STEPS, line)
    assert (found.outcome, found.action, found.restart_helps) == ("stopped", "restart", True)
    assert found.root_line.text == line


def test_a_time_limit_that_ends_a_finished_job_leaves_the_work_done(ended):
    assert ended(*STEPS, DONE, TIME_LIMIT).outcome == "completed_teardown_failed"


def test_running_and_unknown_never_restart(ended):
    found = ended(*STEPS)
    assert found.outcome == "running"
    assert nothing_to_do(found)
    assert found.end_line.text == STEPS[-1]


def test_nothing_is_known_of_a_log_without_steps(ended):
    found = ended("hello", "world")
    assert (found.outcome, found.end_line) == ("unknown", None)
    assert nothing_to_do(found)


def exits(*codes):
    return JobContext(
        exits=tuple(
            RankExit(rank=rank, pid=900 + rank, at_monotonic_s=float(rank), exit_code=code)
            for rank, code in enumerate(codes)
        )
    )


def test_exit_codes_decide_over_the_log(ended):
    alarming = [*STEPS, *STACK, "KeyError: 'a'"]
    assert ended(*alarming, context=exits(0, 0)).outcome == "completed"
    found = ended(*STEPS, "torchrun exit code: 0", context=exits(0, 3))
    assert (found.outcome, found.reason) != ("completed", "Unknown")
    assert found.outcome == "failed"
    assert found.restart_helps


def test_a_teardown_that_the_supervisor_saw_fail(ended):
    found = ended(*STEPS, DONE, *ABORTED, context=exits(0, 134))
    assert (found.outcome, found.action) == ("completed_teardown_failed", "none")


def test_a_hang_without_words_is_a_failure(ended):
    hang = Hang(ranks=(1,), pids=(901,), process_state="T", last_step=5, waited_s=9.0)
    assert ended(*STEPS, context=JobContext(hang=hang)).outcome == "failed"


def test_the_ends_of_ranks_in_files_of_their_own(ended):
    found = ended(
        rank_0=[*STEPS, DONE], rank_1=["warming up", *STACK, "RuntimeError: CUDA error: device-side assert triggered"]
    )  # fmt: skip
    assert found.outcome == "failed", "nobody says that rank 1 survived it"
    found = ended(rank_0=[*STEPS, DONE], rank_1=["warming up"], job=["torchrun exit code: 0"])
    assert found.outcome == "completed"


def test_array_tasks_are_jobs_of_their_own(ended):
    rows = [
        "8812_1  pretrain  gpu  llm  512  COMPLETED  0:0",
        "8812_2  pretrain  gpu  llm  512  FAILED  1:0",
    ]
    assert ended(*rows).outcome == "failed"
    assert ended(*rows[::-1]).outcome == "failed"
    assert ended(*rows[:1]).outcome == "completed"


@pytest.mark.parametrize("ranks", [2, 64, 512])
def test_the_number_of_ranks_that_complain_on_ending_changes_nothing(ended, ranks):
    lost = "[W211 04:10:33.118 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=3): failed to recv, got 0 bytes"
    noise = [f"[rank{rank}]:{lost}" for rank in range(ranks)]
    found = ended(*STEPS, DONE, *noise)
    assert (found.outcome, found.end_line.text) == ("completed", DONE)
    found = ended(*STEPS, DONE, *noise, *ABORTED)
    assert (found.outcome, found.end_line.text) == ("completed_teardown_failed", DONE)


@pytest.mark.parametrize("names", [("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a")])
def test_the_order_of_files_changes_nothing(ended, names):
    texts = ([*STEPS, DONE], ["warming up", *ABORTED], ["torch version 2.9"])
    found = ended(**dict(zip(names, texts, strict=True)))
    assert (found.outcome, found.end_line.text) == ("completed_teardown_failed", DONE)


def test_the_last_step_alone_is_no_end_where_an_error_follows(ended):
    last = "step 40/40 | loss 2.01 | lr 1e-4"
    assert ended(last).outcome == "completed"
    assert ended(last, *ABORTED).outcome == "failed", "saving may have failed"
    assert ended("Epoch 1: 100%|##| 40/40 [00:40<00:00,  1.0it/s, loss=2.0]").outcome == "running"


def test_an_end_far_above_what_others_print_is_found(ended):
    chatter = [f"[rank{n % 8}]: Warning: thing {n} was not closed" for n in range(3000)]
    found = ended(*STEPS, DONE, *chatter)
    assert (found.outcome, found.end_line.line) == ("completed", len(STEPS) + 1)


@pytest.mark.parametrize(
    "by",
    ["Error in atexit._run_exitfuncs:", "Exception ignored in: <function Pool.__del__ at 0x7f>"],
)
def test_what_python_itself_catches_on_ending_is_a_remark(ended, by):
    found = ended(*STEPS, DONE, by, *STACK, "RuntimeError: CUDA error: driver shutting down")
    assert (found.outcome, found.action) == ("completed", "none")
