"""Test when a failed save is repeated, by agreement of ranks that are threads here."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from waiting import ENDS_S

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.retry import TRIES, Retry


class Job:
    """Two ranks that share a store; `failed` makes one rank notice a failure."""

    def __init__(self, patience_s):
        store = dist.HashStore()
        self.ranks = [Retry(patience_s=patience_s, default_store=lambda: store) for _ in range(2)]

    def failed(self, rank, save="a"):
        return self.ranks[rank].failed(save, SimpleNamespace(rank=rank, world_size=2))

    def close(self):
        for each in self.ranks:
            each.close()


@pytest.fixture
def job():
    made = []

    def make(patience_s=ENDS_S):
        made.append(Job(patience_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


def calls(retry, count):
    return [retry.begin_call() for _ in range(count)]


def test_without_a_failure_no_call_is_one(job):
    assert calls(job().ranks[0], 5) == [False] * 5


def test_one_rank_alone_makes_it_at_its_next_call_and_once():
    retry = Retry()
    retry.failed("a", Ranks())
    assert calls(retry, 3) == [True, False, False]


@pytest.mark.parametrize("ahead", [0, 1])
def test_all_ranks_make_it_at_the_call_after_the_last_that_any_has_begun(job, ahead):
    two = job()
    behind = 1 - ahead
    calls(two.ranks[ahead], 7)
    calls(two.ranks[behind], 3)
    two.failed(ahead)
    found = []
    waiting = threading.Thread(target=lambda: found.extend(calls(two.ranks[ahead], 2)))
    waiting.start()  # its next call waits for the other rank's answer
    two.failed(behind)
    assert calls(two.ranks[behind], 6) == [False] * 4 + [True, False]
    waiting.join(ENDS_S)
    assert found == [True, False]


@pytest.mark.parametrize("who", [0, 1])
def test_where_a_rank_never_finds_the_failure_the_others_go_on_without(job, who, caplog):
    two = job(patience_s=0.02)
    two.failed(who)
    assert calls(two.ranks[who], 2) == [False, False]
    assert "has not yet detected" in caplog.text
    two.failed(1 - who)  # too late
    assert calls(two.ranks[1 - who], 2) == [False, False]


def test_two_failures_are_two_agreements(job):
    two = job()
    for save in "ab":
        for rank in (0, 1):
            two.failed(rank, save)
        for rank in (0, 1):
            assert calls(two.ranks[rank], 2) == [True, False]


def test_after_a_few_in_a_row_there_is_no_further_try_before_one_has_succeeded(job):
    two = job()
    for number in range(TRIES + 2):
        assert [two.failed(rank, str(number)) for rank in (0, 1)] == [number + 1] * 2
        assert [two.ranks[rank].begin_call() for rank in (0, 1)] == [number < TRIES] * 2
    for each in two.ranks:
        each.succeeded()
    for rank in (0, 1):
        two.failed(rank, "later")
    assert [two.ranks[rank].begin_call() for rank in (0, 1)] == [True, True]


def test_what_all_ranks_find_in_one_call_needs_no_agreement(job):
    two = job()
    two.failed(0, "")
    assert calls(two.ranks[0], 2) == [True, False]


def test_a_store_that_is_gone_costs_the_try_alone():
    def gone():
        raise RuntimeError("Connection reset by peer")

    retry = Retry(default_store=gone)
    retry.failed("a", SimpleNamespace(rank=1, world_size=2))
    assert calls(retry, 2) == [False, False]


def test_closing_does_not_wait_for_a_rank_that_is_gone(job):
    two = job()
    two.failed(0)
    two.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-retry"]
