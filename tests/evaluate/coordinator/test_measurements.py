"""Check metrics in progress: all samples of an equal metric receive the result."""

from types import SimpleNamespace

import pytest

from holdfast.evaluate.coordinator.delivery import Delivery
from holdfast.evaluate.coordinator.measurements import Measurements
from holdfast.evaluate.coordinator.open_requests import OpenRequests
from holdfast.evaluate.policy import events
from holdfast.evaluate.types.requests import Answer, Request, encode_answer, keyed, pack_tokens
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.answer_journal import Journal
from holdfast.testing import FakeClock

ASKED = keyed(Request(kind="loglikelihood", prompt=pack_tokens([1]), continuation=pack_tokens([2])))


class World:
    """One model, one host, and two samples with the same request and metric."""

    def __init__(self, folder, text=""):
        self.sent, self.events, self.delivered = [], [], []
        self.answers, self.metrics = Journal(folder, "answers"), Journal(folder, "metrics")
        self.answers.commit([(ASKED.key, encode_answer(Answer(logprob=-1.0, text=text)))])
        self.book = OpenRequests(folder)
        host = SimpleNamespace(
            peer=SimpleNamespace(hello=SimpleNamespace(name="host-0"), send=self.sent.append)
        )
        model = SimpleNamespace(answers=self.answers, metrics=self.metrics)
        models = SimpleNamespace(get=lambda _number: model)
        tasks = SimpleNamespace(
            able_host=lambda _model, _node: (host, None), host_on=lambda _node: host
        )
        self.delivery = Delivery(self.book, models)
        self.delivery.client_joined(
            SimpleNamespace(hello=SimpleNamespace(model=0, task=0), send=self.delivered.append)
        )
        self.measurements = Measurements(
            FakeClock(),
            SimpleNamespace(put=self.events.append),
            self.book,
            models,
            tasks,
            self.delivery,
            SimpleNamespace(entries=[None]),
        )
        self.samples = [
            self.book.add(
                0,
                0,
                messages.KeyedSample(sample=place, requests=[ASKED], metric_key=b"m"),
                self.answers,
            )
            for place in (0, 1)
        ]

    def close(self):
        self.book.close()
        self.answers.close()
        self.metrics.close()


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "MeasureSample", SimpleNamespace)
    world = World(tmp_path)
    yield world
    world.close()


def test_two_samples_with_one_metric_both_hear_of_it(world):
    for sample in world.samples:
        world.measurements.grant(sample.number, 0)
    assert len(world.sent) == 1, "computed once"
    said = messages.SampleMeasured(metric_key=world.sent[0].metric_key, measured=b"1", seconds=0.1)
    assert world.measurements.ended(said) == (world.samples, 0)
    assert [one.sample for one in world.events if isinstance(one, events.Measured)] == [0, 1]


def test_what_a_host_took_along_is_measured_again_for_both(world):
    for sample in world.samples:
        world.measurements.grant(sample.number, 0)
    world.measurements.host_left("host-0")
    assert [one.sample for one in world.events if isinstance(one, events.MetricLost)] == [0, 1]


def test_one_that_is_not_wanted_any_more_is_not_told(world):
    for sample in world.samples:
        world.measurements.grant(sample.number, 0)
    world.book.drop(0)
    said = messages.SampleMeasured(metric_key=world.sent[0].metric_key, seconds=0.1)
    assert world.measurements.ended(said) == ([], 0)
    assert len(world.events) == 2, "but its slot is free"


def test_answers_are_cut_into_messages_that_a_frame_holds(tmp_path):
    world = World(tmp_path, text="x" * (5 * 1024 * 1024))
    for sample in world.samples:
        world.delivery.add(sample)
    world.delivery.send()
    assert [[one.sample for one in message.samples] for message in world.delivered] == [[0], [1]]
    world.close()


def test_a_stored_answer_that_cannot_be_read_fails_its_sample_alone(world):
    damaged = Journal(world.answers.folder.parent, "damaged")
    damaged.commit([(ASKED.key, b"\xff no answer")])
    world.delivery._models.get(0).answers = damaged
    world.delivery.add(world.samples[0])
    world.delivery.send()
    (sample,) = world.delivered[0].samples
    assert sample.answers == []
    assert "A stored answer cannot be read" in sample.error
    assert str(damaged.folder) in sample.error
    damaged.close()
