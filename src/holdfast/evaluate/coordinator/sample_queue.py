"""Samples, from the client that asks for them to the client that gets them: what is missing of each, and who is told.

What the journals have is answered from there; what engines are about to answer is waited for; the rest is the policy's.
A sample that misses nothing any more is delivered.
"""

from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.counts import Counts
from holdfast.evaluate.coordinator.delivery import Delivery
from holdfast.evaluate.coordinator.measurements import Measurements
from holdfast.evaluate.coordinator.models import Model, Models
from holdfast.evaluate.coordinator.open_requests import (
    OpenRequest,
    OpenRequests,
    OpenSample,
    ResumedRequests,
)
from holdfast.evaluate.coordinator.policy_queue import PolicyQueue
from holdfast.evaluate.policy import events
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.server import Connection

NOT_WANTED = "Its scores are not wanted any more."
_NOT_STORED = "its answer is not stored; `holdfast eval resume` asks for it"


class SampleQueue:
    """Keeps samples until they miss nothing.

    Args:
        clock: for the times of events.
        policy: gets the samples that engines are to answer.
        models: whose samples they are.
        open_requests: has the samples and requests without an answer.
        resumed: what engines hold from before a restart.
        measurements: the metrics in progress.
        delivery: the way to the clients.
        counts: how many there are.
        rescore: whether nothing is asked of engines.
        settled_s: until when, after a restart, engines may still say what they have.
    """

    def __init__(
        self,
        clock: Clock,
        policy: PolicyQueue,
        models: Models,
        open_requests: OpenRequests,
        resumed: ResumedRequests,
        measurements: Measurements,
        delivery: Delivery,
        counts: Counts,
        *,
        rescore: bool,
        settled_s: float,
    ) -> None:
        self._clock, self._policy, self._models = clock, policy, models
        self._open_requests, self._resumed = open_requests, resumed
        self._measurements, self._delivery, self._counts = measurements, delivery, counts
        self._rescore, self._settled_s = rescore, settled_s
        self._early: dict[
            tuple[int, int], list[messages.Submit]
        ] = {}  # of models whose answers have no journal yet

    # What comes in

    def submit(self, peer: Connection, submit: messages.Submit) -> None:
        """A client wants samples of its task for its model."""
        model, task = self._models.get(peer.hello.model), peer.hello.task
        if model is None or model.outcome is not None:
            peer.send(messages.Refused(why=NOT_WANTED))
        elif model.answers is None or not self.is_settled():
            self._early.setdefault((model.number, task), []).append(submit)
        else:
            self._take(model, task, submit)

    def forget_early(self, model: int, task: int) -> None:
        """A client connected anew: it submits everything again."""
        self._early.pop((model, task), None)

    def forget(self, model: int) -> None:
        """A model ended: what came before it could be looked up is not wanted."""
        for place in [place for place in self._early if place[0] == model]:
            del self._early[place]

    def is_settled(self) -> bool:
        """Whether all that live have dialled again since the restart, and said what they have."""
        return self._clock.monotonic_s() >= self._settled_s

    def settle(self) -> None:
        """They have, before the time was over."""
        if not self.is_settled():
            self._settled_s = self._clock.monotonic_s()
            self.take_early()

    def take_early(self) -> None:
        """Take what came before it could be looked up."""
        if not self.is_settled():
            return
        for (number, task), submits in list(self._early.items()):
            model = self._models.get(number)
            if model is not None and model.answers is not None:
                del self._early[number, task]
                for submit in submits:
                    self._take(model, task, submit)

    def plan_settled(self) -> None:
        """Leave to the policy what no engine is about to answer any more."""
        if settled := self._resumed.settled():
            self._plan(settled)

    def _take(self, model: Model, task: int, submit: messages.Submit) -> None:
        assert model.answers is not None
        wanted = []
        for given in submit.samples:
            sample = self._open_requests.add(model.number, task, given, model.answers)
            if sample is None:
                continue
            requests = len(given.requests)
            self._counts.add(
                model.number,
                task,
                requests=requests,
                reused=requests - sample.missing,
                now_s=self._clock.monotonic_s(),
            )
            if sample.missing == 0 and self._complete(sample):
                continue
            if sample.missing and self._rescore:
                for request in list(sample.missing_requests):
                    self._close(request, error=_NOT_STORED)
                continue
            if not self._resumed.keep(sample):
                wanted.append(sample)
        if wanted:
            self._plan(wanted)
        self._delivery.send()

    def _plan(self, samples: list[OpenSample]) -> None:
        """From now on they are the policy's."""
        specs = tuple(map(_spec, samples))
        self._policy.put(events.SamplesAdded(now_s=self._clock.monotonic_s(), samples=specs))
        for sample in samples:
            sample.missing_requests = []

    # What was missing

    def answered(self, model: int, key: bytes) -> None:
        """An answer was committed."""
        self._resumed.committed(model, key)
        if request := self._open_requests.request_of(model, key):
            self._counts.requests_done += 1
            self._close(request)

    def unanswerable(self, request: OpenRequest, why: str) -> None:
        """No engine answers a request."""
        self._close(request, error=why)
        self._delivery.send()

    def measured(self, sample: OpenSample, measured: bytes) -> None:
        """A sample's metric was committed."""
        if self._open_requests.sample(sample.number) is sample:
            sample.measured, sample.unmeasured = measured, False
            self._delivery.add(sample)

    def unmeasurable(self, sample: OpenSample, error: str = "") -> None:
        """No host computes a sample's metric: its client does, and fails as the harness would, unless by `error`."""
        sample.unmeasured = False
        sample.error = sample.error or error
        self._delivery.add(sample)
        self._delivery.send()

    def _close(self, request: OpenRequest, error: str = "") -> None:
        for sample in self._open_requests.answered(request, error=error):
            self._complete(sample)

    def _complete(self, sample: OpenSample) -> bool:
        """A sample misses no answer any more: deliver it, unless its metric is to be computed first."""
        if sample.unmeasured and not sample.error and not self._measurements.is_known(sample):
            return False
        self._delivery.add(sample)
        return True


def _spec(sample: OpenSample) -> events.SampleSpec:
    for request in sample.missing_requests:
        request.is_planned = True
    return events.SampleSpec(
        sample=sample.number,
        model=sample.model,
        task=sample.task,
        number=sample.place,
        requests=tuple(
            events.RequestSpec(
                request=request.number,
                prompt_tokens=request.prompt_tokens,
                max_new_tokens=request.max_new_tokens,
                affinity=request.affinity,
            )
            for request in sample.missing_requests
        ),
        has_metric=sample.unmeasured,
    )
