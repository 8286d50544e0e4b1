"""Check the policy under any order of events: each sample is done once."""

from collections import deque

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.evaluate.policy.decisions import decide
from holdfast.evaluate.policy.events import (
    Answered,
    EngineLeft,
    EngineReady,
    Measure,
    Measured,
    MetricLost,
    ModelDropped,
    ModelReady,
    NodeJoined,
    NodeLeft,
    Recall,
    Recalled,
    RequestRefused,
    RequestSpec,
    SamplesAdded,
    SampleSpec,
    SendRequests,
    Swap,
    Tick,
)
from holdfast.evaluate.policy.priors import Priors
from holdfast.evaluate.policy.state import PolicyConfig, State
from holdfast.evaluate.types.engine import Curve

SLOTS = 2


class Cluster(RuleBasedStateMachine):
    """Engines, nodes and metrics with arbitrary events, and a check of every action."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.next_engine = self.next_node = self.next_sample = self.next_request = 0
        self.nodes, self.held, self.serving, self.node_of, self.swapping = {}, {}, {}, {}, {}
        self.curve_of = {}
        self.recalls = deque()
        self.model_nodes = {}
        self.request_model, self.request_samples = {}, {}
        self.answered, self.refused, self.dropped = set(), set(), set()
        self.samples, self.measuring, self.measured = {}, {}, set()

    @initialize(newest_first=st.booleans(), double=st.booleans())
    def begin(self, newest_first, double):
        config = PolicyConfig(
            newest_first=newest_first, duplicate=double, straggler=0.5, swap_pays_s=0.5
        )
        self.state = State(Priors(), config)

    def tell(self, event):
        for action in decide(self.state, event):
            match action:
                case SendRequests():
                    assert action.engine in self.serving, (
                        "nothing is asked of a dead or swapping engine"
                    )
                    for request in action.requests:
                        assert self.request_model[request] == self.serving[action.engine]
                        assert request not in self.held[action.engine]
                        assert request not in self.answered | self.refused
                        self.held[action.engine].append(request)
                case Recall():
                    assert set(action.requests) <= set(self.held[action.engine])
                    self.recalls.append(action)
                case Measure():
                    assert action.sample not in self.measuring
                    assert action.sample not in self.measured
                    assert self.samples[action.sample]["metric"]
                    assert self.samples[action.sample]["requests"] <= self.answered
                    self.measuring[action.sample] = action.node
                    assert list(self.measuring.values()).count(action.node) <= SLOTS
                    assert action.node in self.nodes
                case Swap():
                    assert not self.held[action.engine], "only an idle engine changes its model"
                    assert self.serving.pop(action.engine) != action.model
                    assert self.node_of[action.engine] in self.model_nodes[action.model]
                    self.swapping[action.engine] = action.model

    def later(self, seconds=0.1):
        self.now_s += seconds
        return self.now_s

    @rule()
    def node_joins(self):
        self.nodes[self.next_node] = True
        self.tell(NodeJoined(now_s=self.later(), node=self.next_node, metric_slots=SLOTS))
        self.next_node += 1

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(data=st.data())
    def node_leaves(self, data):
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        del self.nodes[node]
        for engine in [engine for engine, its in self.node_of.items() if its == node]:
            self.engine_leaves(engine)
        for nodes in self.model_nodes.values():
            nodes.discard(node)
        self.measuring = {sample: its for sample, its in self.measuring.items() if its != node}
        self.tell(NodeLeft(now_s=self.later(), node=node))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), model=st.integers(0, 2), batch=st.integers(1, 4))
    def engine_joins(self, data, model, batch):
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        engine = self.next_engine
        self.next_engine += 1
        curve = Curve(
            prefill_tokens_per_s=1e4,
            request_s=1e-3,
            step_base_s=0.01,
            step_sequence_s=0.001,
            max_batch=batch,
        )
        self.held[engine], self.serving[engine], self.node_of[engine] = [], model, node
        self.curve_of[engine] = curve
        self.model_nodes.setdefault(model, set()).add(node)
        self.tell(
            EngineReady(now_s=self.later(), engine=engine, node=node, model=model, curve=curve)
        )

    def engine_leaves(self, engine):
        del self.held[engine], self.node_of[engine]
        self.serving.pop(engine, None)
        self.swapping.pop(engine, None)
        self.tell(EngineLeft(now_s=self.later(), engine=engine))

    @precondition(lambda self: self.node_of)
    @rule(data=st.data())
    def an_engine_leaves(self, data):
        self.engine_leaves(data.draw(st.sampled_from(sorted(self.node_of))))

    @precondition(lambda self: self.swapping)
    @rule(data=st.data())
    def an_engine_has_swapped(self, data):
        engine = data.draw(st.sampled_from(sorted(self.swapping)))
        self.serving[engine] = self.swapping.pop(engine)
        self.tell(
            EngineReady(
                now_s=self.later(),
                engine=engine,
                node=self.node_of[engine],
                model=self.serving[engine],
                curve=self.curve_of[engine],
            )
        )

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), model=st.integers(0, 2))
    def model_is_ready(self, data, model):
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        self.model_nodes.setdefault(model, set()).add(node)
        self.tell(ModelReady(now_s=self.later(), node=node, model=model))

    @rule(
        model=st.integers(0, 2),
        task=st.integers(0, 3),
        shapes=st.lists(
            st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=6
        ),
        shared=st.booleans(),
    )
    def samples_come(self, model, task, shapes, shared):
        specs = []
        before = [
            request
            for request, its in self.request_model.items()
            if its == model and request not in self.answered | self.refused
        ]
        for count, generates, has_metric in shapes:
            requests = []
            if shared and before:
                requests.append(RequestSpec(request=before[0], prompt_tokens=10, max_new_tokens=0))
                self.request_samples[before[0]].add(self.next_sample)
            for place in range(count):
                affinity = (self.next_sample + 1) << 32 | place // 2
                requests.append(
                    RequestSpec(
                        request=self.next_request,
                        prompt_tokens=10 + place,
                        max_new_tokens=50 if generates else 0,
                        affinity=affinity,
                    )
                )
                self.request_model[self.next_request] = model
                self.request_samples[self.next_request] = {self.next_sample}
                self.next_request += 1
            self.samples[self.next_sample] = {
                "requests": {one.request for one in requests}, "metric": has_metric, "model": model,
            }  # fmt: skip
            specs.append(
                SampleSpec(
                    sample=self.next_sample, model=model, task=task, number=self.next_sample, requests=tuple(requests),
                    has_metric=has_metric,
                )
            )  # fmt: skip
            self.next_sample += 1
        self.tell(SamplesAdded(now_s=self.later(), samples=tuple(specs)))

    def answer(self, engine, request):
        self.held[engine].remove(request)
        self.answered.add(request)
        self.tell(
            Answered(
                now_s=self.later(0.01),
                engine=engine,
                request=request,
                new_tokens=request % 50,
                engine_s=0.05,
            )
        )

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), count=st.integers(1, 20))
    def answers_come(self, data, count):
        for _ in range(count):
            busy = sorted(engine for engine, held in self.held.items() if held)
            if not busy:
                return
            engine = data.draw(st.sampled_from(busy))
            self.answer(engine, data.draw(st.sampled_from(self.held[engine])))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), retry=st.booleans())
    def a_request_is_refused(self, data, retry):
        engine = data.draw(
            st.sampled_from(sorted(engine for engine, held in self.held.items() if held))
        )
        request = data.draw(st.sampled_from(self.held[engine]))
        self.held[engine].remove(request)
        if not retry and request not in self.answered:
            self.refused.add(request)
        self.tell(RequestRefused(now_s=self.later(), engine=engine, request=request, retry=retry))

    @precondition(lambda self: self.recalls)
    @rule(data=st.data())
    def requests_come_back(self, data):
        recall = self.recalls.popleft()
        if recall.engine not in self.node_of:
            return
        given = [
            request
            for request in recall.requests
            if request in self.held[recall.engine] and data.draw(st.booleans())
        ]
        for request in given:
            self.held[recall.engine].remove(request)
        self.tell(Recalled(now_s=self.later(), engine=recall.engine, requests=tuple(given)))

    def measure(self, sample):
        del self.measuring[sample]
        self.measured.add(sample)
        self.tell(Measured(now_s=self.later(), sample=sample, metric_s=0.3))

    @precondition(lambda self: self.measuring)
    @rule(data=st.data(), lost=st.booleans())
    def a_metric_ends(self, data, lost):
        sample = data.draw(st.sampled_from(sorted(self.measuring)))
        if lost:
            del self.measuring[sample]
            self.tell(MetricLost(now_s=self.later(), sample=sample))
        else:
            self.measure(sample)

    @rule(seconds=st.sampled_from((0.5, 60.0)))
    def time_goes_by(self, seconds):
        self.tell(Tick(now_s=self.later(seconds)))

    @precondition(lambda self: not self.dropped)
    @rule(model=st.integers(0, 2))
    def a_model_is_dropped(self, model):
        self.dropped.add(model)
        self.tell(ModelDropped(now_s=self.later(), model=model))

    @invariant()
    def columns_agree(self):
        if not hasattr(self, "state"):
            return
        for number, engine in self.state.engines.items():
            assert set(engine.asked) == set(self.held[number])
            generating = sum(self.state.request_max_new[request] > 0 for request in engine.asked)
            assert engine.decoding == generating
        for model in self.state.models.values():
            assert model.coming >= 0

    def teardown(self):
        """Afterwards, one engine per model on a healthy node finishes everything."""
        if not hasattr(self, "state"):
            return
        self.node_joins()
        node = self.next_node - 1
        for model in range(3):
            self.engine_joins_on(node, model)
        for _ in range(20_000):
            if self.swapping:
                engine = min(self.swapping)
                self.serving[engine] = self.swapping.pop(engine)
                self.tell(
                    EngineReady(
                        now_s=self.later(), engine=engine, node=self.node_of[engine], model=self.serving[engine],
                        curve=self.curve_of[engine],
                    )
                )  # fmt: skip
            elif self.recalls:
                recall = self.recalls.popleft()
                if recall.engine in self.node_of:
                    given = [one for one in recall.requests if one in self.held[recall.engine]]
                    for one in given:
                        self.held[recall.engine].remove(one)
                    self.tell(
                        Recalled(now_s=self.later(), engine=recall.engine, requests=tuple(given))
                    )
            elif any(self.held.values()):
                engine = next(engine for engine, held in self.held.items() if held)
                self.answer(engine, self.held[engine][0])
            elif self.measuring:
                self.measure(next(iter(self.measuring)))
            else:
                break
        for sample, facts in self.samples.items():
            if facts["model"] in self.dropped:
                continue
            assert facts["requests"] <= self.answered | self.refused, "no request is lost"
            if facts["metric"] and not facts["requests"] & self.refused:
                assert sample in self.measured, "no metric is lost"
        for model in self.state.models.values():
            assert model.dropped or not model.waiting()
        if not self.dropped:
            assert self.state.samples_done == self.state.samples == len(self.samples)

    def engine_joins_on(self, node, model):
        engine = self.next_engine
        self.next_engine += 1
        curve = Curve(
            prefill_tokens_per_s=1e4,
            request_s=1e-3,
            step_base_s=0.01,
            step_sequence_s=1e-3,
            max_batch=2,
        )
        self.held[engine], self.serving[engine], self.node_of[engine] = [], model, node
        self.curve_of[engine] = curve
        self.model_nodes.setdefault(model, set()).add(node)
        self.tell(
            EngineReady(now_s=self.later(), engine=engine, node=node, model=model, curve=curve)
        )


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
