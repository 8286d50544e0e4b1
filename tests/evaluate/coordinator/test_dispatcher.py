"""Check that an engine's answers count for its own requests only."""

from types import SimpleNamespace

import pytest

from holdfast.evaluate.coordinator.dispatcher import Dispatcher
from holdfast.evaluate.coordinator.engine_slots import EngineSlot
from holdfast.evaluate.coordinator.open_requests import ResumedRequests
from holdfast.evaluate.policy.events import Recalled
from holdfast.evaluate.wire.messages import Done, DoneRequest, Holding
from holdfast.testing import FakeClock

QUESTION, REQUEST = b"asked for two models", 7


@pytest.fixture
def world():
    """Make an engine that serves model 1 and holds a request for it."""
    slot = EngineSlot(
        name="engine",
        place=0,
        node=0,
        ordered_s=0.0,
        number=3,
        serving=1,
        sent={QUESTION: REQUEST},
    )
    book = SimpleNamespace(request_of=lambda _model, _key: None)
    emitted, committed = [], []
    asking = Dispatcher(
        FakeClock(),
        SimpleNamespace(put=emitted.append),
        book,
        SimpleNamespace(slots={"engine": slot}),
        ResumedRequests(book),
        samples=None,
        commits=SimpleNamespace(add=lambda _peer, message: committed.append(message)),
        timeline=None,
    )
    peer = SimpleNamespace(hello=SimpleNamespace(name="engine"))
    return SimpleNamespace(
        asking=asking, peer=peer, slot=slot, emitted=emitted, committed=committed
    )


def done(model):
    one = DoneRequest(key=QUESTION, body=b"", new_tokens=0, started_s=0.0, finished_s=0.0)
    return Done(number=1, model=model, done=[one], now_s=0.0)


def test_an_answer_that_is_said_again_for_the_model_before_leaves_the_question_for_this_one_open(
    world,
):
    world.asking.done(world.peer, done(model=0))
    assert world.slot.sent == {QUESTION: REQUEST}
    assert world.emitted == []
    assert len(world.committed) == 1, "it is kept nevertheless"


def test_an_answer_for_this_model_frees_the_engine_also_when_another_was_faster(world):
    world.asking.done(world.peer, done(model=1))
    assert world.slot.sent == {}
    assert [event.request for event in world.emitted] == [REQUEST]


@pytest.mark.parametrize(("model", "comes_back"), [(0, True), (1, False)])
def test_what_is_held_for_the_model_before_is_not_what_was_asked_for_this_one(
    world, model, comes_back
):
    world.asking.holding(world.peer, Holding(model=model, keys=[QUESTION]))
    expected = [Recalled(now_s=0.0, engine=3, requests=(REQUEST,))] if comes_back else []
    assert world.emitted == expected
