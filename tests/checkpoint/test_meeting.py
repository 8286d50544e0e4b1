"""Test ranks that do not save together, and a group of ranks that does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from started_ranks import run

from holdfast.checkpoint.distributed import meeting
from holdfast.core.errors import BadUse, SaveFailed

TIMEOUT_S = 1800.0
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
        "a_rank_stands_in_a_collective_while_its_thread_comes",
        "a_slow_rank_is_waited_for",
        "rank_0_alone_saves_first",  # leaves ranks with unequal counts of Checkpointers
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
    run(
        SCRIPT,
        tmp_path,
        3,
        "a_group_of_the_ranks_saves",
        "a_group_is_destroyed_before_its_saves_have_ended",
    )


def test_a_rank_that_was_killed_is_named(tmp_path):
    run(SCRIPT, tmp_path, 2, "a_rank_was_killed", ends=[0, -signal.SIGKILL])
    assert (tmp_path / "a_rank_was_killed.passed").exists()


class Lobby(meeting._Lobby):
    """The objects of one of two ranks, with the store but without the answering thread."""

    store = None

    def __init__(self, rank, store):
        self.rank, self.world_size, self.timeout_s, self.store = rank, 2, TIMEOUT_S, store
        self.calls = {1: (0, -1)}


class Two:
    """Two ranks, on a clock that moves while rank 0 sleeps; rank 1 may come at `at_s`."""

    def __init__(self, monkeypatch):
        self.now_s, self.at_s = 0.0, float("inf")
        self.store = dist.HashStore()
        monkeypatch.setattr(meeting.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(meeting.time, "sleep", self._sleep)
        self._call = None

    def _sleep(self, seconds):
        self.now_s += seconds
        if self.now_s > self.at_s:
            self.at_s = float("inf")
            self._meeting(1).hold()

    def _meeting(self, rank):
        call, step, is_in_call = self._call
        limit_s = TIMEOUT_S * (meeting._SHARE if is_in_call else 1.0)
        return meeting._One(
            Lobby(rank, self.store), "1/x/1", call, step, limit_s, is_in_call=is_in_call
        )

    def hold(self, call, step=None, *, is_in_call=True):
        self._call = call, step, is_in_call
        self._meeting(0).hold()

    def says_where_it_is(self, pid):
        self.store.set("here/1", json.dumps([meeting._processes(), pid]))


@pytest.fixture
def two(monkeypatch):
    return Two(monkeypatch)


@pytest.mark.parametrize("is_in_call", [True, False])
def test_a_rank_that_lives_and_does_not_answer_is_waited_for(two, is_in_call, caplog):
    """The rank may load a pickle, during which no other thread of it runs."""
    two.says_where_it_is(os.getppid())
    two.at_s = 1000.0
    two.hold("save", 10, is_in_call=is_in_call)
    assert two.now_s > 1000.0
    [warned] = caplog.messages
    assert "rank 1 has not called save at step 10 within 5 s (rank 1 does not answer)" in warned


def test_a_rank_that_has_made_no_checkpointer_yet_is_waited_for(two, caplog):
    two.at_s = 1000.0
    two.hold("restore")
    assert two.now_s > 1000.0
    assert "rank 1 has made no Checkpointer yet" in caplog.text


def test_a_rank_of_another_node_that_does_not_answer_is_waited_for(two):
    two.store.set("here/1", json.dumps(["another node", 1 << 30]))
    two.at_s = 1000.0
    two.hold("restore")
    assert two.now_s > 1000.0


def test_no_call_waits_longer_than_its_limit(two):
    two.says_where_it_is(os.getppid())
    with pytest.raises(
        BadUse, match=r"rank 1 has not called restore within 10[89]\d s \(rank 1 does not answer\)"
    ):
        two.hold("restore")


def test_a_save_that_another_rank_s_thread_never_comes_to_fails_as_any_other(two):
    two.says_where_it_is(os.getppid())
    text = r"Step 10 was not saved: rank 1 has not begun to save it within 18\d\d s \(rank 1 does not answer\). Look at"
    with pytest.raises(SaveFailed, match=text):
        two.hold("save", 10, is_in_call=False)
    with pytest.raises(SaveFailed, match=text):  # the other rank, which comes later
        two._meeting(1).hold()


@pytest.mark.parametrize(("is_in_call", "kind"), [(True, BadUse), (False, SaveFailed)])
def test_a_rank_of_this_node_that_has_ended_is_found_at_once(two, is_in_call, kind):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    two.says_where_it_is(ended.pid)
    with pytest.raises(kind, match=r"rank 1 has ended"):
        two.hold("save", 10, is_in_call=is_in_call)
    assert two.now_s < 10.0


def test_another_step_is_a_contradiction_in_the_thread_too(two):
    two.store.set("1/x/1", json.dumps([1, "save at step 11"]))
    with pytest.raises(
        BadUse, match="rank 0 calls save at step 10 and rank 1 calls save at step 11"
    ):
        two.hold("save", 10, is_in_call=False)
