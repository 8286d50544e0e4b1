"""Metrics in progress: granted by the policy, computed by hosts, looked for in the journal first."""

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

_MOST_LOSSES = 3  # of one sample's metric: what kills its process so often would kill it again


@dataclass
class _Running:
    """A metric that a host computes, and the samples that wait for it: equal ones, of equal answers, share it."""

    host: str
    samples: list[OpenSample]


class Measurements:
    """Has hosts compute metrics as the policy grants them.

    Args:
        clock: for the times of events.
        policy: gets an event for each metric.
        open_requests: has the samples that wait.
        models: with the journals of their metrics.
        tasks: with the hosts.
        delivery: reads the answers of samples.
        suite: whose metrics they are.
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
        self._granted: dict[
            int, int
        ] = {}  # sample to node, which waits for its answers' commit or for a host
        self._losses: dict[bytes, int] = {}
        self._kept = KeptMetrics()

    def is_known(self, sample: OpenSample) -> bool:
        """Whether the metric of a sample with all its answers stands in the journal; else it runs if it may."""
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
        """The policy says that a sample's metric is to be computed on a node now."""
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
        """Start what waited for a host that is there by now."""
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

    def records(self, model: int, said: messages.SampleMeasured) -> Records:
        """Return what to journal of a metric, so that whoever needs the same finds it."""
        of = self._models.get(model)
        if of is None or of.metrics is None:
            return []
        return self._kept.records(of.metrics, said.metric_key, said.measured, said.read)

    def host_gone(self, name: str) -> None:
        """What a host computed is to be computed again."""
        for key, running in list(self._running.items()):
            if running.host == name:
                del self._running[key]
                self._lost(running)

    def _lost(self, running: _Running) -> None:
        for sample in running.samples:
            self._policy.put(
                events.MetricLost(now_s=self._clock.monotonic_s(), sample=sample.number)
            )

    def ended(self, said: messages.SampleMeasured) -> tuple[list[OpenSample], int]:
        """A host said what became of a metric; the samples that it is of, and how often its process died.

        No samples where nobody waits for it, or where it is to be tried again.
        """
        running = self._running.pop(said.metric_key, None)
        if running is None:
            return [], 0
        losses = self._losses.pop(said.metric_key, 0) + said.lost
        if said.lost and losses < _MOST_LOSSES:
            self._losses[said.metric_key] = losses
            self._lost(running)
            return [], losses
        for sample in running.samples:
            self._policy.put(
                events.Measured(
                    now_s=self._clock.monotonic_s(), sample=sample.number, metric_s=said.seconds
                )
            )
        return [
            sample
            for sample in running.samples
            if self._open_requests.sample(sample.number) is sample
        ], losses
