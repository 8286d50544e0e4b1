"""The messages that an agent keeps for the supervisor, and the time at which it sends them."""

import pytest

from holdfast.recover.agent.outbox import MAX_REPORTS, Outbox
from holdfast.recover.channel import Peer


def peer(rank=0):
    return Peer(role="rank", attempt=1, rank=rank, local_rank=rank, world_size=2, pid=10 + rank)


def step(number, loss=1.0):
    return {"kind": "step", "step": number, "step_s": 1.0, "loss": loss, "metrics": {}}


@pytest.fixture
def sent():
    return []


@pytest.fixture
def outbox(sent):
    return Outbox(sent.append)


def put(outbox, message, rank=0):
    outbox.put(peer(rank), message, 0.0, 100)


def reports(message):
    assert message["kind"] == "steps"
    return [
        (seq, message["peers"][place]["rank"], told["step"])
        for seq, place, _, told in message["reports"]
    ]


def test_ordinary_steps_of_all_ranks_go_in_one_message(outbox, sent):
    for rank in (0, 1):
        put(outbox, step(1), rank)
    assert [reports(one) for one in sent] == [[(1, 0, 1)], [(2, 1, 1)]], "first steps at once"
    sent.clear()
    for number in (2, 3):
        for rank in (0, 1):
            put(outbox, step(number), rank)
    assert sent == []
    outbox.flush()
    (message,) = sent
    assert reports(message) == [(3, 0, 2), (4, 1, 2), (5, 0, 3), (6, 1, 3)]
    outbox.flush()
    assert len(sent) == 1


@pytest.mark.parametrize("loss", ["nan", "inf", float("nan")])
def test_a_loss_that_is_not_finite_is_sent_at_once_with_what_waits(outbox, sent, loss):
    put(outbox, step(1))
    put(outbox, step(2))
    put(outbox, step(3, loss))
    assert [reports(one) for one in sent] == [[(1, 0, 1)], [(2, 0, 2), (3, 0, 3)]]


def test_any_other_message_follows_the_steps_before_it(outbox, sent):
    put(outbox, step(1))
    put(outbox, step(2))
    put(outbox, {"kind": "section", "open": True})
    assert [one["kind"] for one in sent] == ["steps", "steps", "peer"]
    assert sent[-1]["seq"] == 3


def test_what_is_not_acknowledged_is_sent_again_in_order_and_nothing_twice(outbox, sent):
    put(outbox, step(1))
    put(outbox, {"kind": "section", "open": True})
    put(outbox, step(2))
    put(outbox, step(3), rank=1)
    sent.clear()
    first, section, last = outbox.unseen(0)
    assert (reports(first), section["seq"]) == ([(1, 0, 1)], 2)
    assert reports(last) == [(3, 0, 2), (4, 1, 3)]
    outbox.flush()
    assert sent == [], "it was sent with the rest"
    assert [reports(one) for one in outbox.unseen(3)] == [[(4, 1, 3)]]
    outbox.acknowledged(4)
    assert list(outbox.unseen(0)) == []


def test_a_message_is_bounded(outbox, sent):
    put(outbox, step(0))
    for number in range(1, 2 * MAX_REPORTS):
        put(outbox, step(number))
    assert max(len(one["reports"]) for one in sent) == MAX_REPORTS
    again = list(outbox.unseen(0))
    assert max(len(one["reports"]) for one in again) == MAX_REPORTS
    assert sum(len(one["reports"]) for one in again) == 2 * MAX_REPORTS
