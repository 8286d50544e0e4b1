"""Stopping at one step for all ranks: the supervisor's half and the ranks' half against each other."""

import random
import threading

import pytest

from holdfast.recover.attach import _StopAgreement
from holdfast.recover.stopping import StopVote


def test_all_yes_commits():
    vote = StopVote(frozenset({0, 1}), 0.1)
    proposal = vote.propose(last_step=10)
    assert proposal["step"] == 15, "half a second ahead"
    assert vote.voted(0, {"proposal": 1, "yes": True, "saves": True}) is None
    assert vote.voted(1, {"proposal": 1, "yes": True, "saves": True}) == {
        "kind": "decide",
        "proposal": 1,
        "commit": True,
    }


def test_one_no_calls_it_off_and_the_next_proposal_looks_further_ahead():
    vote = StopVote(frozenset({0, 1}), None)
    assert vote.propose(10)["step"] == 11
    vote.voted(0, {"proposal": 1, "yes": True, "saves": True})
    assert vote.voted(1, {"proposal": 1, "yes": False, "saves": True})["commit"] is False
    assert vote.propose(12)["step"] == 14
    assert vote.voted(0, {"proposal": 1, "yes": True, "saves": True}) is None, (
        "a vote on an old proposal"
    )


def test_knows_when_no_rank_saves():
    vote = StopVote(frozenset({0}), None)
    vote.propose(None)
    vote.voted(0, {"proposal": 1, "yes": True, "saves": False})
    assert not vote.can_save


def test_leaving_is_complete_when_every_rank_left():
    vote = StopVote(frozenset({0, 1}), None)
    assert not vote.left(1)
    assert vote.left(0)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_run_freely_all_stop_at_the_same_step(seed):
    """With real threads, each rank saves at every step and a stop is requested at random."""
    source = random.Random(seed)
    world = 3
    agreements = [_StopAgreement() for _ in range(world)]
    reached = [0] * world
    stopped_at = [None] * world
    lock_step = threading.Barrier(world)

    def train(rank):
        for step in range(1, 5000):
            lock_step.wait(30)
            reached[rank] = step
            if agreements[rank].reached(step):
                stopped_at[rank] = step
                return

    ranks = [threading.Thread(target=train, args=(rank,)) for rank in range(world)]
    for thread in ranks:
        thread.start()
    threshold = source.randrange(1, 400)
    while max(reached) < threshold:
        pass
    vote = StopVote(frozenset(range(world)), 0.01)
    decision = {"commit": False}
    while not decision["commit"]:
        proposal = vote.propose(max(reached))
        decision = None
        for rank in source.sample(range(world), world):
            answer = agreements[rank].vote(proposal["proposal"], proposal["step"])
            decision = vote.voted(rank, {"proposal": proposal["proposal"], **answer})
        for rank in source.sample(range(world), world):
            agreements[rank].decide(decision["proposal"], commit=decision["commit"])
    for thread in ranks:
        thread.join(30)
    assert len(set(stopped_at)) == 1
    assert stopped_at[0] is not None


def test_ranks_that_report_no_steps_are_found_by_their_votes():
    """Otherwise proposals would double from 0, far beyond the step of a long training."""
    vote = StopVote(frozenset({0, 1}), None)
    agreements = [_StopAgreement(), _StopAgreement()]
    for agreement, step in zip(agreements, (1030, 1029), strict=True):
        assert not agreement.reached(step)
    proposal = vote.propose(None)
    for rank, agreement in enumerate(agreements):
        decision = vote.voted(
            rank, {**proposal, **agreement.vote(proposal["proposal"], proposal["step"])}
        )
    assert decision["commit"] is False
    assert 1030 < vote.propose(None)["step"] <= 1032
