"""Track each sample from the client that submits it to the client that receives it.

Answers in the journals are used at once. Requests that engines hold from before a restart wait for
those engines. All other requests go to the policy. A complete sample is delivered.
"""

from collections.abc import Callable

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

NOT_WANTED = "Its scores are no longer needed."
_NOT_STORED = "its answer is not stored; `holdfast eval resume` requests it again"


class SampleQueue:
    """Keep samples until they are complete.

    Args:
        clock: the clock for events.
        policy: receives the samples that engines must answer.
        models: the models of the samples.
        open_requests: holds samples and requests without an answer.
        resumed: the requests that engines hold from before a restart.
        measurements: finds and computes metrics.
        delivery: sends samples to the clients.
        counts: counts samples and requests.
        rescore: True if there are no engines, and only answers in the journal are used.
        settled_s: the monotonic time until which engines may report the requests that they hold
            from before a restart.
        need_engines: called before requests without an answer go to the policy.
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
        need_engines: Callable[[], None],
    ) -> None:
        self._clock, self._policy, self._models = clock, policy, models
        self._open_requests, self._resumed = open_requests, resumed
        self._measurements, self._delivery, self._counts = measurements, delivery, counts
        self._rescore, self._settled_s = rescore, settled_s
        self._need_engines = need_engines
        # Submissions for models that have no journal yet.
        self._early: dict[tuple[int, int], list[messages.Submit]] = {}

    # Submissions

    def submit(self, peer: Connection, submit: messages.Submit) -> None:
        """Accept the samples that a client submits; keep them for later if they are early.

        A submission is early while the model has no journal, or peers may still report after a
        restart.
        """
        model, task = self._models.get(peer.hello.model), peer.hello.task
        if model is None or model.outcome is not None:
            peer.send(messages.Refused(why=NOT_WANTED))
        elif model.answers is None or not self.is_settled():
            self._early.setdefault((model.number, task), []).append(submit)
        else:
            self._take(model, task, submit)

    def forget_early(self, model: int, task: int) -> None:
        """Drop the early submissions of a client that reconnected, since it sends them again."""
        self._early.pop((model, task), None)

    def forget(self, model: int) -> None:
        """Drop the early submissions of an ended model."""
        for place in [place for place in self._early if place[0] == model]:
            del self._early[place]

    def is_settled(self) -> bool:
        """Return True if all peers have reported since the restart, or had their time to."""
        return self._clock.monotonic_s() >= self._settled_s

    def settle(self) -> None:
        """Stop waiting for reports after a restart, since all peers have reported."""
        if not self.is_settled():
            self._settled_s = self._clock.monotonic_s()
            self.take_early()

    def take_early(self) -> None:
        """Accept the early submissions whose model now has a journal."""
        if not self.is_settled():
            return
        for (number, task), submits in list(self._early.items()):
            model = self._models.get(number)
            if model is not None and model.answers is not None:
                del self._early[number, task]
                for submit in submits:
                    self._take(model, task, submit)

    def plan_settled(self) -> None:
        """Pass samples to the policy that waited for answers from before a restart.

        A sample is passed once each of its awaited answers has come or can no longer come.
        """
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
        """Pass samples to the policy, and start engines if the samples need any."""
        if any(sample.missing for sample in samples):
            self._need_engines()
        specs = tuple(map(_spec, samples))
        self._policy.put(events.SamplesAdded(now_s=self._clock.monotonic_s(), samples=specs))
        for sample in samples:
            sample.missing_requests = []

    # Answers and metrics

    def answered(self, model: int, key: bytes) -> None:
        """Record that the answer to a request is committed."""
        self._resumed.committed(model, key)
        if request := self._open_requests.request_of(model, key):
            self._counts.requests_done += 1
            self._close(request)

    def unanswerable(self, request: OpenRequest, why: str) -> None:
        """Fail all samples of a request that no engine can answer."""
        self._close(request, error=why)
        self._delivery.send()

    def measured(self, sample: OpenSample, measured: bytes) -> None:
        """Record that a sample's metric is committed, and deliver the sample."""
        if self._open_requests.sample(sample.number) is sample:
            sample.measured, sample.unmeasured = measured, False
            self._delivery.add(sample)

    def unmeasurable(self, sample: OpenSample, error: str = "") -> None:
        """Deliver a sample whose metric could not be computed.

        With `error`, the sample fails. Without an error, the client computes the metric itself, and
        fails as the harness would.
        """
        sample.unmeasured = False
        sample.error = sample.error or error
        self._delivery.add(sample)
        self._delivery.send()

    def _close(self, request: OpenRequest, error: str = "") -> None:
        for sample in self._open_requests.answered(request, error=error):
            self._complete(sample)

    def _complete(self, sample: OpenSample) -> bool:
        """Deliver a sample with all answers; return False if its metric must be computed first."""
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
