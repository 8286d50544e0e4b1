"""Ranks that do not save together, and a group of ranks that does."""

import signal
from pathlib import Path

from started_ranks import run

SCRIPT = Path(__file__).parent / "meeting_ranks.py"


def test_ranks_that_do_not_come_are_named(tmp_path):
    run(
        SCRIPT,
        tmp_path,
        2,
        "rank_0_alone_saves",
        "rank_0_alone_has_a_later_save",
        "a_step_is_due_on_one_rank",
        "a_rank_is_a_step_ahead",
        "one_has_closed",
        "a_rank_does_not_answer",
        "a_slow_rank_is_waited_for",
        "rank_0_alone_saves_first",  # afterwards they have used another number of Checkpointers
    )


def test_ranks_that_do_not_do_the_same_are_refused(tmp_path):
    run(
        SCRIPT,
        tmp_path,
        2,
        "ranks_save_at_other_steps",
        "one_saves_and_one_restores",
        "ranks_have_other_folders",
        "entries_may_differ_but_not_in_kind",
    )


def test_a_group_of_the_ranks_saves_and_restores(tmp_path):
    run(SCRIPT, tmp_path, 3, "a_group_of_the_ranks_saves")


def test_a_rank_that_was_killed_is_named(tmp_path):
    run(SCRIPT, tmp_path, 2, "a_rank_was_killed", ends=[0, -signal.SIGKILL])
    assert (tmp_path / "a_rank_was_killed.passed").exists()
