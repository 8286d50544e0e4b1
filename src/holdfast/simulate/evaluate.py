"""Simulate an evaluation under the live policy; engines and networks are computed, not run.

The simulation includes:

- loading the weights: read once per cluster over shared storage, and exchanged among the nodes,
- engine starts, swaps of the weights, and continuous batching (`engine_model`),
- sending the answers in batches, and the latency of every message,
- the limited number of CPU slots for metrics, and the quota of a judge model.

The simulation leaves out failures and overflows of the KV cache. The time of the harness itself is
a constant.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from holdfast.evaluate.policy import (
    Action,
    Answered,
    Begin,
    Bound,
    End,
    EngineReady,
    EngineSpan,
    Event,
    Line,
    Measure,
    Measured,
    MetricSpan,
    ModelReady,
    NodeJoined,
    PolicyConfig,
    Priors,
    Recall,
    Recalled,
    RequestSpan,
    RequestSpec,
    SamplesAdded,
    SampleSpec,
    SendRequests,
    State,
    Swap,
    TaskHistory,
    Tick,
    Timeline,
    decide,
    timeline_of,
)
from holdfast.simulate.engine_model import VirtualEngine
from holdfast.simulate.ideal import bound_of
from holdfast.simulate.workload import SimCluster, Workload

FLUSH_AT = 64
TICK_S = 0.5
CHUNK = 4096
"""The number of samples in one `SamplesAdded` event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOutcome:
    """The result of a simulated evaluation.

    Attributes:
        makespan_s: seconds until the last score.
        bound: a lower bound for the time of any schedule, computed from the true costs.
        timeline: the spans for a Gantt chart and for the account of the time; empty unless
            `simulate` was called with `record`.
        requests, samples: the numbers of finished requests and samples.
        decisions, decide_s: the number of events that the policy decided on, and the CPU seconds
            that the policy took.
    """

    makespan_s: float
    bound: Bound
    timeline: Timeline
    requests: int
    samples: int
    decisions: int = 0
    decide_s: float = 0.0

    @property
    def ratio(self) -> float:
        """The makespan divided by the lower bound."""
        return self.bound.ratio(self.makespan_s)


def simulate(
    workload: Workload,
    cluster: SimCluster,
    *,
    history: Sequence[TaskHistory] = (),
    config: PolicyConfig | None = None,
    seed: int = 0,
    record: bool = False,
    timed: bool = False,
) -> EvaluationOutcome:
    """Simulate a workload on a cluster under Holdfast's own policy.

    Args:
        workload: the tasks and models, with their true costs.
        cluster: the simulated cluster.
        history: the measurements of earlier evaluations, from which the policy predicts the
            samples.
        config: the configuration of the policy; by default with the round-trip time of `cluster`.
        seed: the random seed for the order in which tasks submit their samples.
        record: True to keep every span in `EvaluationOutcome.timeline`.
        timed: True to measure the CPU time of the policy.

    Raises:
        RuntimeError: the policy stopped although samples are unfinished.
    """
    run = _Run(workload, cluster, history, config, seed, record=record, timed=timed)
    return run.outcome()


class _Run:
    """See `simulate`."""

    def __init__(
        self,
        workload: Workload,
        cluster: SimCluster,
        history: Sequence[TaskHistory],
        config: PolicyConfig | None,
        seed: int,
        *,
        record: bool,
        timed: bool,
    ) -> None:
        self._workload = workload
        self._cluster = cluster
        round_trip_s = cluster.flush_s + 2 * cluster.latency_s + cluster.coordinator_s
        self.state = State(
            Priors.from_history(history, [task.name for task in workload.tasks]),
            config or PolicyConfig(round_trip_s=round_trip_s, engines=cluster.engines),
        )
        self._rng = random.Random(seed)
        self._record = record
        self._timed = timed
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._engines: dict[int, VirtualEngine] = {}
        self._serving: dict[int, tuple[int, float]] = {}
        self._unsent: dict[int, list[tuple[int, int, float]]] = {}
        self._flush_due: dict[int, bool] = {}
        self._lines: list[Line] = []
        self._request_place: list[tuple[int, int]] = []  # task, number of the sample
        self._request_prompt: list[int] = []
        self._request_new: list[int] = []
        self._sample_place: list[tuple[int, int, int]] = []  # model, task, number
        self._judge_free_s = 0.0
        self._coordinator_free_s = 0.0
        self._samples_left = 0
        self._end_s = 0.0
        self._decisions = 0
        self._decide_s = 0.0

    def outcome(self) -> EvaluationOutcome:
        self._begin()
        while self._samples_left and self._heap:
            now_s, _, happens, what = heappop(self._heap)
            happens(now_s, *what)
        if self._samples_left:
            raise RuntimeError(f"{self._samples_left} samples were not done after the last event.")
        for engine, (model, since_s) in self._serving.items():
            self._span(
                EngineSpan(
                    what="serve",
                    engine=engine,
                    node=self._node(engine),
                    model=model,
                    t0=since_s,
                    t1=self._end_s,
                )
            )
        begin = Begin(
            started_at_s=0.0, suite="simulated", tasks=[task.name for task in self._workload.tasks]
        )
        lines = [begin, *self._lines, End(state="done", t1=self._end_s)]
        return EvaluationOutcome(
            makespan_s=self._end_s,
            bound=bound_of(self._workload, self._cluster),
            timeline=timeline_of(lines),
            requests=len(self._request_new),
            samples=len(self._sample_place),
            decisions=self._decisions,
            decide_s=self._decide_s,
        )

    def _begin(self) -> None:
        cluster = self._cluster
        for node in range(cluster.nodes):
            self._at(
                cluster.node_start_s,
                self._told,
                NodeJoined(
                    now_s=cluster.node_start_s, node=node, metric_slots=cluster.metric_slots
                ),
            )
        loaded_s = 0.0
        for number, model in enumerate(self._workload.models):
            from_s = max(model.release_s, cluster.node_start_s)
            if number == 0 or not cluster.prefetch:
                from_s = max(from_s, loaded_s)
            loaded_s = max(from_s, loaded_s) + cluster.fetch_s(model.size_bytes)
            self._at(loaded_s, self._fetched, number)
            self._add_samples(number, max(model.release_s, cluster.prepare_s))
        first = self._workload.models[0]
        ready_s = max(
            cluster.node_start_s + cluster.engine_start_s,
            first.release_s,
            cluster.node_start_s + cluster.fetch_s(first.size_bytes),
        )
        ready_s = max(ready_s, first.release_s + cluster.fetch_s(first.size_bytes))
        ready_s += first.size_bytes / cluster.device_bytes_per_s
        for engine in range(cluster.engines):
            self._unsent[engine] = []
            self._flush_due[engine] = False
            self._span(
                EngineSpan(what="load", engine=engine, node=self._node(engine), t0=0.0, t1=ready_s)
            )
            self._at(ready_s, self._ready, engine, 0)
        self._at(TICK_S, self._tick)

    def _add_samples(self, model: int, now_s: float) -> None:
        order = list(range(len(self._workload.tasks)))
        self._rng.shuffle(order)
        for number in order:
            task = self._workload.tasks[number]
            has_metric = task.has_metric
            specs: list[SampleSpec] = []
            for place in range(len(task)):
                sample = len(self._sample_place)
                self._sample_place.append((model, number, place))
                requests = []
                new_tokens = task.new_tokens[place]
                for choice in range(task.choices):
                    request = len(self._request_new)
                    self._request_place.append((number, place))
                    self._request_prompt.append(task.prompt_tokens[place])
                    self._request_new.append(new_tokens)
                    requests.append(
                        RequestSpec(
                            request=request,
                            prompt_tokens=task.prompt_tokens[place],
                            max_new_tokens=task.max_new_tokens,
                            affinity=(number + 1) << 32 | (place * 64 + choice) & 0xFFFFFFFF,
                        )
                    )
                specs.append(
                    SampleSpec(
                        sample=sample,
                        model=model,
                        task=number,
                        number=place,
                        requests=tuple(requests),
                        has_metric=has_metric and task.metric_s[place] > 0,
                    )
                )
                if len(specs) == CHUNK:
                    self._at(now_s, self._told, SamplesAdded(now_s=now_s, samples=tuple(specs)))
                    specs = []
            if specs:
                self._at(now_s, self._told, SamplesAdded(now_s=now_s, samples=tuple(specs)))
            self._samples_left += len(task)

    def _heard(self, now_s: float, engine: int, answers: list[tuple[int, int, float]]) -> None:
        for request, new_tokens, engine_s in answers:
            self._tell(
                Answered(
                    now_s=now_s,
                    engine=engine,
                    request=request,
                    new_tokens=new_tokens,
                    engine_s=engine_s,
                )
            )

    def _asked(self, now_s: float, engine: int, requests: tuple[int, ...]) -> None:
        machine = self._engines[engine]
        prompt, new = self._request_prompt, self._request_new
        machine.submit(now_s, [(request, prompt[request], new[request]) for request in requests])
        self._plan(engine, machine)

    def _flush_is_due(self, now_s: float, engine: int) -> None:
        if self._flush_due[engine]:
            self._flush(now_s, engine)

    def _measured(self, now_s: float, sample: int, metric_s: float) -> None:
        self._tell(Measured(now_s=now_s, sample=sample, metric_s=metric_s))

    def _told(self, now_s: float, event: Event) -> None:
        del now_s
        self._tell(event)

    def _tick(self, now_s: float) -> None:
        self._at(now_s + TICK_S, self._tick)
        self._tell(Tick(now_s=now_s))

    def _fetched(self, now_s: float, model: int) -> None:
        for node in range(self._cluster.nodes):
            self._tell(ModelReady(now_s=now_s, node=node, model=model))

    def _ready(self, now_s: float, engine: int, model: int) -> None:
        curve = self._cluster.curve
        self._engines[engine] = VirtualEngine(curve, self._cluster.slowness.get(engine, 1.0))
        self._serving[engine] = model, now_s
        self._tell(
            EngineReady(
                now_s=now_s, engine=engine, node=self._node(engine), model=model, curve=curve
            )
        )

    def _recalled(self, now_s: float, engine: int, requests: tuple[int, ...]) -> None:
        given = self._engines[engine].recall(set(requests))
        heard_s = now_s + self._cluster.latency_s
        self._at(heard_s, self._told, Recalled(now_s=heard_s, engine=engine, requests=tuple(given)))

    def _tell(self, event: Event) -> None:
        self._decisions += 1
        if self._timed:
            began_s = time.process_time()
            actions = decide(self.state, event)
            self._decide_s += time.process_time() - began_s
        else:
            actions = decide(self.state, event)
        if actions:
            self._act(event.now_s, actions)
        if self.state.samples_done == len(self._sample_place) and self._samples_left:
            self._samples_left = 0
            self._end_s = event.now_s

    def _act(self, now_s: float, actions: list[Action]) -> None:
        cluster = self._cluster
        sent_s = max(now_s, self._coordinator_free_s) + cluster.coordinator_s
        self._coordinator_free_s = sent_s
        there_s = sent_s + cluster.latency_s
        for action in actions:
            if isinstance(action, SendRequests):
                self._at(there_s, self._asked, action.engine, action.requests)
            elif isinstance(action, Measure):
                self._measure(there_s, action.sample, action.node)
            elif isinstance(action, Recall):
                self._at(there_s, self._recalled, action.engine, action.requests)
            elif isinstance(action, Swap):
                self._swap(there_s, action)

    def _measure(self, now_s: float, sample: int, node: int) -> None:
        model, task, place = self._sample_place[sample]
        metric_s = self._workload.tasks[task].metric_s[place] + self._cluster.metric_start_s
        begin_s = now_s
        if self._cluster.judge_per_s:
            begin_s = self._judge_free_s = max(
                now_s, self._judge_free_s + 1.0 / self._cluster.judge_per_s
            )
        done_s = begin_s + metric_s
        self._span(
            MetricSpan(node=node, model=model, task=task, sample=place, t0=begin_s, t1=done_s)
        )
        self._at(done_s + self._cluster.latency_s, self._measured, sample, metric_s)

    def _swap(self, now_s: float, action: Swap) -> None:
        model, since_s = self._serving.pop(action.engine)
        node = self._node(action.engine)
        copy_s = self._workload.models[action.model].size_bytes / self._cluster.device_bytes_per_s
        ready_s = now_s + copy_s + self._cluster.swap_s
        self._span(
            EngineSpan(
                what="serve", engine=action.engine, node=node, model=model, t0=since_s, t1=now_s
            )
        )
        self._span(
            EngineSpan(
                what="swap",
                engine=action.engine,
                node=node,
                model=action.model,
                t0=now_s,
                t1=ready_s,
            )
        )
        self._at(ready_s + self._cluster.latency_s, self._ready, action.engine, action.model)

    def _engine_happens(self, now_s: float, engine: int) -> None:
        machine = self._engines[engine]
        if machine.next_s != now_s:
            return
        unsent = self._unsent[engine]
        done = machine.advance()
        self._plan(engine, machine)
        if not done:
            return
        for request, begun_s in done:
            unsent.append((request, self._request_new[request], now_s - begun_s))
            if self._record:
                task, place = self._request_place[request]
                self._span(
                    RequestSpan(
                        engine=engine,
                        model=self._serving[engine][0],
                        task=task,
                        sample=place,
                        prompt_tokens=self._request_prompt[request],
                        new_tokens=self._request_new[request],
                        t0=begun_s,
                        t1=now_s,
                    )
                )
        if len(unsent) >= FLUSH_AT or not machine.held:
            self._flush(now_s, engine)
        elif not self._flush_due[engine]:
            self._flush_due[engine] = True
            self._at(now_s + self._cluster.flush_s, self._flush_is_due, engine)

    def _flush(self, now_s: float, engine: int) -> None:
        self._flush_due[engine] = False
        if self._unsent[engine]:
            self._at(now_s + self._cluster.latency_s, self._heard, engine, self._unsent[engine])
            self._unsent[engine] = []

    def _plan(self, engine: int, machine: VirtualEngine) -> None:
        if machine.next_s != float("inf"):
            self._at(machine.next_s, self._engine_happens, engine)

    def _at(self, at_s: float, happens: Callable[..., None], *what: Any) -> None:
        self._number += 1
        heappush(self._heap, (at_s, self._number, happens, what))

    def _span(self, line: Line) -> None:
        if self._record:
            self._lines.append(line)

    def _node(self, engine: int) -> int:
        return engine // self._cluster.engines_per_node
