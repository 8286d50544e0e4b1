"""What the policy knows: plain columns and heaps, about 100 bytes a request, so that a million fit many times over."""

from array import array
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from holdfast.evaluate.policy.events import Action, Ask, Measure, Recall, Swap
from holdfast.evaluate.policy.longest_first import LongestFirst
from holdfast.evaluate.policy.priors import Priors
from holdfast.evaluate.types.engine import Curve

TOLERANCE = 1.03
"""By how much an engine may exceed the pace: lengths are guesses, and a batch grows by whole sequences."""
WAITING, ASKED, DONE = 0, 1, 2
NO_METRIC, METRIC_WANTED, METRIC_READY, METRIC_RUNS, SAMPLE_DONE = 0, 1, 2, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """What the policy is told once.

    Attributes:
        round_trip_s: from an answer on an engine until the next request is there: flushes, network, coordinator. Each
            engine is given so much work ahead.
        newest_first: a newer model comes before an older one, and takes its engines.
        swap_pays_s: engine-seconds of waiting work that are worth one more engine's swap.
        duplicate: whether a request may be asked twice, of a straggler and of an idle engine; the first answer wins.
        engines: how many are expected; until so many have come the first ones are not given what the others should do.
        patience_s: how long after the first engine the others are waited for in that sense.
        straggler: how many times longer than expected an answer is out before it may be asked a second time.
    """

    round_trip_s: float = 0.05
    newest_first: bool = False
    swap_pays_s: float = 5.0
    duplicate: bool = True
    straggler: float = 3.0
    engines: int = 0
    patience_s: float = 30.0


class EngineState:
    """One engine: what it holds, and how far it must be.

    `clock` counts the tokens that a sequence running since the start would have generated if the curve held; a request
    of `n` tokens that begins at clock `c` ends at `c + n * slowness`. It is how progress is known between answers,
    whatever the batch does meanwhile.
    """

    __slots__ = (
        "asked",
        "base_s",
        "clock",
        "debt_s",
        "decode_load_s",
        "decode_s",
        "decoding",
        "drain_for",
        "engine",
        "forward_entry_s",
        "forward_s",
        "last_clock",
        "max_batch",
        "model",
        "node",
        "prefill_token_s",
        "recalled",
        "request_s",
        "seen_s",
        "sequence_s",
        "slowness",
        "stamp_decode",
        "stamp_forward",
        "swapping",
    )

    def __init__(self, engine: int, node: int) -> None:
        self.engine = engine
        self.node = node
        self.model = -1
        self.asked: dict[int, tuple[float, float, float]] = {}
        """Request to (seconds charged, when it was asked, the clock then), in the order asked.

        The clock is -1 where it had to wait for a place: when it began is then not known.
        """
        self.recalled: set[int] = set()
        self.decoding = 0
        self.decode_load_s = 0.0
        self.forward_s = 0.0
        self.forward_entry_s = 0.0
        self.slowness = 1.0
        """Observed over expected time of its answers."""
        self.swapping = False
        self.drain_for = -1
        self.stamp_decode = 0
        self.stamp_forward = 0
        self.clock = 0.0
        self.last_clock = 0.0
        self.seen_s = 0.0
        self.debt_s = 0.0

    def serve(self, model: int, curve: Curve, now_s: float) -> None:
        """It is idle and serves a model."""
        self.model = model
        self.request_s = curve.request_s
        self.prefill_token_s = 1.0 / curve.prefill_tokens_per_s
        self.base_s = curve.step_base_s
        self.sequence_s = curve.step_sequence_s
        self.max_batch = curve.max_batch
        self.decode_s = curve.step_base_s / curve.max_batch + curve.step_sequence_s
        self.swapping = False
        self.drain_for = -1
        self.recalled.clear()
        self.seen_s = now_s
        self.debt_s = 0.0
        self.last_clock = self.clock

    def prefill_s(self, prompt_tokens: int) -> float:
        """Reading a prompt; nothing for one that shares another's forward."""
        return self.request_s + prompt_tokens * self.prefill_token_s if prompt_tokens else 0.0

    def step_s(self, batch: int) -> float:
        """One token of each of `batch` sequences, by the curve."""
        return self.base_s + batch * self.sequence_s

    def load_s(self) -> float:
        """What it has to do, in seconds of a full batch."""
        return (self.decode_load_s + self.forward_s) * self.slowness

    def advance(self, now_s: float) -> None:
        """Let its clock go on to `now_s`: prompts are read first, then everything that runs takes steps."""
        passed_s = now_s - self.seen_s
        self.seen_s = now_s
        if self.debt_s > 0:
            paid_s = min(self.debt_s, passed_s)
            self.debt_s -= paid_s
            passed_s -= paid_s
        batch = min(self.decoding, self.max_batch)
        if batch:
            self.clock += passed_s / self.step_s(batch)

    def takes(self, tokens: float, slack_s: float) -> bool:
        """Whether it still answers all it holds within `slack_s` with one more of so many tokens in its batch."""
        return not self.decoding or self.with_one_more_s(tokens) <= TOLERANCE * slack_s

    def with_one_more_s(self, tokens: float) -> float:
        """In how many seconds it would have answered all it holds with one more of so many tokens in its batch."""
        rest = max(self.last_clock - self.clock, tokens * self.slowness)
        return rest * self.step_s(min(self.decoding + 1, self.max_batch))

    def end_s(self) -> float:
        """In how many seconds it should have answered all it holds: its work, or its longest answer."""
        load_s = self.load_s()
        if not self.decoding:
            return load_s
        return max(
            load_s, (self.last_clock - self.clock) * self.step_s(min(self.decoding, self.max_batch))
        )


class ModelState:
    """One model's work. `late` is what came before any engine served it, not yet put in order."""

    __slots__ = (
        "coming",
        "decode",
        "decode_engines",
        "decode_limit",
        "decode_room",
        "dropped",
        "engines",
        "first_request",
        "first_sample",
        "forward",
        "forward_room",
        "last_request",
        "last_sample",
        "late",
        "model",
        "nodes",
        "pace_s",
        "packing",
        "recalled",
        "steal_after_s",
        "target_s",
        "too_slow",
    )

    def __init__(self, model: int) -> None:
        self.model = model
        self.decode = LongestFirst()
        self.forward = LongestFirst()
        self.decode_room: list[tuple[float, int, int]] = []
        """A heap of (when it would be free, stamp, engine): engines that take more. Old stamps are void."""
        self.forward_room: list[tuple[float, int, int]] = []
        self.late: list[int | tuple[int, ...]] = []
        self.engines: set[int] = set()
        self.coming = 0
        self.recalled = 0
        """Requests that its engines were asked to give back and still hold."""
        self.nodes: set[int] = set()
        """Where its weights lie."""
        self.dropped = False
        self.first_sample = self.first_request = 1 << 62
        self.last_sample = self.last_request = -1
        """Of its own, with others' between them where models overlap: a stream's end of one must not look at all."""
        self.steal_after_s = 0.0
        self.target_s = 0.0
        """When it could all be done, by what is known: long answers go into batches small enough for that."""
        self.pace_s = 0.0
        """When each answer should be done: before the target where engines have time to spare."""
        self.decode_limit = 1 << 30
        """How many engines are enough for what is to be generated: more would leave their batches half empty."""
        self.decode_engines = 0
        self.too_slow: dict[int, None] = {}
        """Engines with a place in their batch that were passed by, since with one more they would answer too late."""
        self.packing = -1
        """The engine that takes long answers now: they go together, for one alone slows down a whole batch's worth."""

    def compact(self, engines: dict[int, EngineState]) -> None:
        """Drop void entries when they are most of a heap."""
        most = 2 * len(self.engines) + 16
        if len(self.decode_room) > most:
            self.decode_room = [
                one for one in self.decode_room if _stamps(engines, one[2])[0] == one[1]
            ]
            heapify(self.decode_room)
        if len(self.forward_room) > most:
            self.forward_room = [
                one for one in self.forward_room if _stamps(engines, one[2])[1] == one[1]
            ]
            heapify(self.forward_room)

    def waiting(self) -> int:
        """Entries that no engine has."""
        return self.decode.count + self.forward.count + len(self.late)


def _stamps(engines: dict[int, EngineState], number: int) -> tuple[int, int]:
    engine = engines.get(number)
    return (engine.stamp_decode, engine.stamp_forward) if engine else (-1, -1)


class State:
    """Everything `decide` knows. Made once; `decide` alone changes it.

    Attributes:
        priors: what samples cost; corrected while running, and asked for the history at the end.
        samples, samples_done, requests, requests_done: counts, for a display. Those of dropped models stay counted.
    """

    def __init__(self, priors: Priors, config: PolicyConfig | None = None) -> None:
        """Know the tasks' history and nothing else."""
        self.priors = priors
        self.config = config or PolicyConfig()
        self.now_s = 0.0
        self.engines: dict[int, EngineState] = {}
        self.models: dict[int, ModelState] = {}
        self.waiting_models: set[int] = set()
        self.idle: dict[int, set[int]] = {}
        """Node to its engines that have nothing to do."""
        self.reference: Curve | None = None
        self.samples = self.samples_done = self.requests = self.requests_done = 0
        # Columns by sample.
        self.sample_task = array("i")
        self.sample_model = array("i")
        self.sample_number = array("i")
        self.sample_left = array("i")
        self.sample_stage = array("b")
        # Columns by request. A request that shares another's forward has no prompt of its own.
        self.request_sample = array("i")
        self.request_state = array("b")
        self.request_prompt = array("i")
        self.request_max_new = array("i")
        self.request_tokens = array("f")
        self.request_most = array("f")
        self.request_prefix = array("I")
        self.request_group = array("i")
        self.more_samples: dict[int, list[int]] = {}
        """Request to the other samples that wait for it."""
        self.doubled: dict[int, set[int]] = {}
        """Request that was asked twice to the engines that have it."""
        # Metrics.
        self.slots_free: dict[int, int] = {}
        self.slots: list[tuple[int, int]] = []
        """A heap of (negated free slots, node); entries that differ from `slots_free` are void."""
        self.metrics: list[tuple[float, int]] = []
        """A heap of (negated seconds expected, sample)."""
        self.metric_node: dict[int, int] = {}
        # Estimates, renewed now and then.
        self.reviewed_s = -1.0
        self.events_until_review = 0
        self.looked_at = 0  # requests in flight at the last review: what it costs
        self.corrections: list[float] = []
        self.shares: list[list[float]] = []
        """By task: decoding and metric seconds, as expected when they were put in order, and a metric then."""
        self.first_ready_s = -1.0
        self.stamp = 0
        self.asks: dict[int, list[int]] = {}
        self.actions: list[Action] = []

    def model(self, model: int) -> ModelState:
        """The state of a model, made when it is first heard of."""
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelState(model)
        return found

    def correction(self, task: int) -> float:
        """By what the expected tokens of a task are to be multiplied, as of the last review."""
        return self.corrections[task] if task < len(self.corrections) else 1.0

    def expected_tokens(self, request: int) -> float:
        """What a request will generate, by what is known now."""
        task = self.sample_task[self.request_sample[request]]
        return min(
            self.request_tokens[request] * self.correction(task), self.request_max_new[request]
        )

    def most_tokens(self, request: int) -> float:
        """What a request will surely generate at most, nine times of ten."""
        task = self.sample_task[self.request_sample[request]]
        most = self.request_most[request] * (
            self.corrections[task] if task < len(self.corrections) else 1.0
        )
        return min(most, self.request_max_new[request])

    def note_shares(self, task: int, decode_s: float, metric_s: float) -> None:
        """Of what a request put in order will take: decoding `decode_s`, its metric `metric_s`."""
        while task >= len(self.shares):
            self.shares.append([0.0, 0.0, self.priors.mean_metric_s(len(self.shares))])
        share = self.shares[task]
        share[0] += decode_s
        share[1] += metric_s

    def length_factor(self, task: int) -> float:
        """By what to multiply a task's lengths, as they were when they were put in order."""
        if task >= len(self.shares):
            return 1.0
        decode_s, metric_s, mean_s = self.shares[task]
        if decode_s + metric_s <= 0:
            return 1.0
        now_s = (
            decode_s * self.correction(task) + metric_s * self.priors.mean_metric_s(task) / mean_s
        )
        return now_s / (decode_s + metric_s)

    def waiting_s(self, model: ModelState) -> float:
        """Full engines' seconds of what no engine has of a model; for what is not in order yet a second each."""
        total_s = float(len(model.late))
        if self.reference is None:
            return total_s
        token_s = self.reference.saturated_s(0, 1) - self.reference.request_s
        for queue in (model.decode, model.forward):
            for task, bucket in queue.buckets():
                cost_s = bucket.prefill_s + bucket.tokens * self.correction(task) * token_s
                total_s += len(bucket.entries) * cost_s
        return total_s

    def capacity(self) -> float:
        """How many engines of normal speed there are, or soon will be."""
        there = sum(1.0 / max(engine.slowness, 0.01) for engine in self.engines.values())
        return max(there, float(self.config.engines)) if self.expects_engines() else there

    def expects_engines(self) -> bool:
        """Whether more engines are about to come."""
        waited_s = self.now_s - self.first_ready_s
        return len(self.engines) < self.config.engines and waited_s < self.config.patience_s

    def rank(self, model: int) -> int:
        """Models of a lower rank come first."""
        return -model if self.config.newest_first else model

    def ask(self, engine: int, request: int) -> None:
        """Put a request on its way."""
        self.asks.setdefault(engine, []).append(request)

    def recall(self, engine: EngineState, requests: list[int]) -> None:
        """Want requests back that an engine may not have begun."""
        self.model(engine.model).recalled += len(set(requests) - engine.recalled)
        engine.recalled.update(requests)
        self.actions.append(Recall(engine.engine, tuple(requests)))

    def swap(self, engine: EngineState, model: int) -> None:
        """Let an idle engine serve another model."""
        self.model(engine.model).engines.discard(engine.engine)
        self.model(model).coming += 1
        engine.swapping = True
        engine.model = model
        self.idle[engine.node].discard(engine.engine)
        self.actions.append(Swap(engine.engine, model))

    def take_actions(self) -> list[Action]:
        """Return the actions that were decided since the last call."""
        # Asks come first: a recall of the same decision may name a request that was asked in it.
        asks = [Ask(engine, tuple(requests)) for engine, requests in self.asks.items()]
        actions = asks + self.actions
        self.asks, self.actions = {}, []
        return actions

    # Metric slots

    def ready_to_measure(self, sample: int) -> None:
        """All answers of a sample are there."""
        self.sample_stage[sample] = METRIC_READY
        expected_s = self.priors.metric_s(self.sample_task[sample], self.sample_number[sample])
        heappush(self.metrics, (-expected_s, sample))

    def free_slot(self, node: int) -> None:
        """A metric on a node ended."""
        if node in self.slots_free:
            self.slots_free[node] += 1
            heappush(self.slots, (-self.slots_free[node], node))

    def measure(self) -> None:
        """Start metrics while there are free slots, the longest first, on the node with most slots free."""
        while self.metrics and self.slots:
            free, node = self.slots[0]
            if free == 0 or self.slots_free.get(node) != -free:
                heappop(self.slots)
                continue
            _, sample = heappop(self.metrics)
            if self.sample_stage[sample] != METRIC_READY:
                continue
            heappop(self.slots)
            self.slots_free[node] -= 1
            heappush(self.slots, (free + 1, node))
            self.sample_stage[sample] = METRIC_RUNS
            self.metric_node[sample] = node
            self.actions.append(Measure(sample, node))
