"""Test SIGTERM on real processes: the last save is durable at the end, or the grace time is over."""

import logging
import signal
import threading
from pathlib import Path

from started_ranks import RANK, run_program, run_ranks

from holdfast.checkpoint import Checkpointer, checkpointer, scan, verify

SCRIPT = Path(__file__).with_name("sigterm_scenarios.py")

SCENARIOS = [
    "it_saves_at_the_next_call_and_leaves",
    "a_second_one_changes_nothing",
    "during_a_save",
    "during_a_restore",
    "the_handler_that_was_there_comes_last",
    "storage_that_stalls_is_waited_for_no_longer_than_the_grace_time",
    "a_main_thread_that_is_stuck_ends_all_the_same",
    "a_forked_worker_is_ended_by_it_and_its_parent_is_not",
    "it_is_given_back_when_the_checkpointer_is_closed",
    "nothing_is_written_into_the_wrong_file_once_it_is_closed",
    "once_it_is_closed_the_handler_before_it_is_called",
    "once_it_is_closed_by_another_thread_it_does_what_was_done_before",
    "data_workers_outlive_it",
    "a_data_worker_is_ended_by_its_trainer_at_once_and_by_others_after_the_grace_time",
    "two_ranks_agree_on_the_step",
    "two_ranks_told_at_different_steps",
    "a_rank_that_stands_still_does_not_keep_the_other",
]


def test_scenarios(tmp_path):
    done = run_program(SCRIPT, tmp_path, *SCENARIOS)
    assert done.returncode == 0, done.stderr


def test_two_programs_that_are_both_told_end_with_143(tmp_path):
    run_ranks(2, SCRIPT, tmp_path, "train", RANK, ends=[143, 143])
    (info,) = scan(tmp_path / "ckpt")
    assert verify(info).state == "verified"


def test_outside_of_the_main_thread_it_says_that_it_cannot_listen(tmp_path, caplog):
    before = signal.getsignal(signal.SIGTERM)
    made = []
    with caplog.at_level(logging.WARNING, "holdfast"):
        thread = threading.Thread(
            target=lambda: made.append(Checkpointer(tmp_path, sigterm_grace_s=5.0))
        )
        thread.start()
        thread.join()
    assert (
        "SIGTERM ends this process without a save: the Checkpointer was not made in the main thread."
        in caplog.text
    )
    assert signal.getsignal(signal.SIGTERM) is before
    made[0].close()


def test_under_a_supervisor_it_is_left_to_that(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "job_link", object)
    before = signal.getsignal(signal.SIGTERM)
    Checkpointer(tmp_path, sigterm_grace_s=5.0)
    assert signal.getsignal(signal.SIGTERM) is before
