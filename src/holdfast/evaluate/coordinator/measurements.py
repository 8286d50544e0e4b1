"""Compute metrics on harness hosts when the policy grants them, unless the journal has them."""

from dataclasses import dataclass

from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.delivery import Delivery
from holdfast.evaluate.coordinator.kept_metrics import KeptMetrics, Records
from holdfast.evaluate.coordinator.models import Models
from holdfast.evaluate.coordinator.open_requests import OpenRequests, OpenSample, measured_key
from holdfast.evaluate.coordinator.policy_queue import PolicyQueue
from holdfast.evaluate.coordinator.tasks import Tasks
from holdfast.evaluate.policy import events
from holdfast.evaluate.types.suite import Suite
from holdfast.evaluate.wire import messages

_MAX_LOSSES = 3  # lost processes of one sample's metric: the next one would die, too


@dataclass
class _Running:
    """A metric in progress on a host, and all samples with equal answers that wait for it."""

    host: str
    samples: list[OpenSample]


class Measurements:
    """Find each sample's metric in the journal, or let a harness host compute the metric.

    The policy decides when and on which node a metric is computed.

    Args:
        clock: the clock for events.
        policy: receives an event for each metric.
        open_requests: holds the samples that wait for a metric.
        models: the models, with the journals of metrics.
        tasks: the tasks, with their hosts.
        delivery: reads the answers of samples.
        suite: the suite that the metrics belong to.
    """

    def __init__(
        self,
        clock: Clock,
        policy: PolicyQueue,
        open_requests: OpenRequests,
        models: Models,
        tasks: Tasks,
        delivery: Delivery,
        suite: Suite,
    ) -> None:
        self._clock, self._policy, self._open_requests = clock, policy, open_requests
        self._models, self._tasks, self._delivery, self._suite = models, tasks, delivery, suite
        self._running: dict[bytes, _Running] = {}
        # Sample to node, while the sample waits for the commit of its answers or for a host.
        self._granted: dict[int, int] = {}
        self._losses: dict[bytes, int] = {}
        self._kept = KeptMetrics()

    def is_known(self, sample: OpenSample) -> bool:
        """Return True if the journal has the metric of a sample with all answers.

        Otherwise start the computation if the policy has already granted it.
        """
        model = self._models.get(sample.model)
        assert model is not None
        assert model.metrics is not None
        key = measured_key(sample.metric_key, self._delivery.bodies(sample))
        sample.measured = self._kept.find(model.metrics, key) or b""
        if not sample.measured:
            if (node := self._granted.pop(sample.number, None)) is not None:
                self._start(sample, node)
            return False
        sample.unmeasured = False
        return True

    def grant(self, number: int, node: int) -> None:
        """Compute a sample's metric on a node, as the policy decided.

        If answers of the sample are still missing, the computation starts once they are committed.
        """
        sample = self._open_requests.sample(number)
        if sample is None:
            self._policy.put(
                events.Measured(now_s=self._clock.monotonic_s(), sample=number, metric_s=0.0)
            )
        elif sample.missing:
            self._granted[number] = node
        else:
            self._start(sample, node)

    def start_waiting(self) -> None:
        """Start the granted metrics that waited for a host."""
        for number, node in list(self._granted.items()):
            sample = self._open_requests.sample(number)
            if sample is None:
                del self._granted[number]
            elif not sample.missing and self._tasks.host_on(node):
                del self._granted[number]
                self._start(sample, node)

    def _start(self, sample: OpenSample, node: int) -> None:
        model = self._models.get(sample.model)
        able = self._tasks.able_host(model, node) if model else None
        if able is None:
            self._granted[sample.number] = node
            return
        host, facts = able
        bodies = self._delivery.bodies(sample)
        key = measured_key(sample.metric_key, bodies)
        if running := self._running.get(key):
            if sample not in running.samples:
                running.samples.append(sample)
            return
        self._running[key] = _Running(host.peer.hello.name, [sample])
        host.peer.send(
            messages.MeasureSample(
                metric_key=key,
                task=sample.task,
                entry=self._suite.entries[sample.task],
                facts=facts,
                sample=sample.place,
                answers=bodies,
            )
        )

    def records(self, model: int, result: messages.SampleMeasured) -> Records:
        """Return the journal records of a metric, so that equal samples reuse its result."""
        of = self._models.get(model)
        if of is None or of.metrics is None:
            return []
        return self._kept.records(of.metrics, result.metric_key, result.measured, result.read)

    def host_left(self, name: str) -> None:
        """Return the metrics that ran on a lost host to the policy."""
        for key, running in list(self._running.items()):
            if running.host == name:
                del self._running[key]
                self._lost(running)

    def _lost(self, running: _Running) -> None:
        for sample in running.samples:
            self._policy.put(
                events.MetricLost(now_s=self._clock.monotonic_s(), sample=sample.number)
            )

    def ended(self, result: messages.SampleMeasured) -> tuple[list[OpenSample], int]:
        """Handle the end of a metric on a host.

        Returns:
            The samples that waited for this metric, and the number of times that the process of the
            metric died. The list is empty if no sample waits, or if the metric will be tried again.
        """
        running = self._running.pop(result.metric_key, None)
        if running is None:
            return [], 0
        losses = self._losses.pop(result.metric_key, 0) + result.lost
        if result.lost and losses < _MAX_LOSSES:
            self._losses[result.metric_key] = losses
            self._lost(running)
            return [], losses
        for sample in running.samples:
            self._policy.put(
                events.Measured(
                    now_s=self._clock.monotonic_s(), sample=sample.number, metric_s=result.seconds
                )
            )
        return [
            sample
            for sample in running.samples
            if self._open_requests.sample(sample.number) is sample
        ], losses
