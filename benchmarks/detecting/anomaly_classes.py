"""Emulated trainings whose loss breaks by a known cause, and the class that the replays find.

A linear model is trained by SGD with momentum on data-parallel ranks; the mean of the ranks'
gradients is applied. The losses go to the supervisor's own detector, checkpoints become healthy
after `HEALTHY_AFTER` steps, and after a broken loss the next attempt begins where the supervisor's
would. Half of the trainings repeat themselves to the last bit; the others have a relative noise of
1e-6 in each gradient, as GPUs have.

| cause | fault |
|---|---|
| data | one rank's batch of one step is 300 times larger, or NaN |
| passing | one high bit of one rank's gradient is flipped at one step, once |
| node | the same from one step on, again and again, in whichever ranks run on one node |
| unseeded | NaN once, in a training that gets other data in each attempt |
| checkpoint | the job fails; the momentum or the weights in the newest checkpoint file are wrong, with right digests |
"""

import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from holdfast.recover.detectors.anomaly import AnomalyDetector
from holdfast.recover.replay.classes import AnomalyClass, Finding, of_failure, of_passed
from holdfast.recover.replay.replays import without_an_older_file
from holdfast.recover.replay.traces import Numbers, Trace

CAUSES: dict[str, AnomalyClass] = {
    "data": "data_or_model",
    "passing": "hardware",
    "node": "hardware",
    "checkpoint": "checkpoint",
    "unseeded": "cannot_tell",
}
HEALTHY_AFTER = 20
EVERY = 10
STEPS = 260
ATTEMPTS = 8
WIDTH = 3
SAMPLES = 8
RATE = 0.02
MOMENTUM = 0.9

State = tuple[list[float], list[float]]
"""The weights and the momentum."""


def flipped(value: float, source: random.Random) -> float:
    """Return a value with one of its exponent's upper bits flipped."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    (wrong,) = struct.unpack("<d", struct.pack("<Q", bits ^ (1 << source.randrange(57, 63))))
    return float(wrong)


@dataclass(kw_only=True)
class Training:
    """One run of several attempts with one fault."""

    cause: str
    source: random.Random
    world: int = 4
    nodes: tuple[str, ...] = ("a", "b")
    noise: float = 0.0
    faulty_step: int = 150
    faulty_rank: int = 0
    chance: float = 0.1
    """The probability of a fault in a step of the faulty node."""
    spoils: Callable[[float], float] = lambda value: value * 300.0
    files: dict[int, State] = field(default_factory=dict)
    healthy: set[int] = field(default_factory=set)
    traces: list[Trace] = field(default_factory=list)
    seed: int = 0
    has_struck: bool = False
    is_worn: bool = False
    """True once the faulty node has begun to fail."""

    def __post_init__(self) -> None:
        """Draw the data's seed."""
        self.seed = self.source.randrange(2**30)

    def inputs(self, step: int, rank: int) -> list[tuple[list[float], float]]:
        """Return the batch of a rank at a step: the same in each attempt."""
        draw = len(self.traces) if self.cause == "unseeded" else 0
        source = random.Random(f"{self.seed} {step} {rank} {draw}")
        batch = []
        for _ in range(SAMPLES):
            features = [source.gauss(0, 1) for _ in range(WIDTH)]
            batch.append((features, sum(features) + source.gauss(0, 0.5)))
        if (self.cause, step, rank) == ("data", self.faulty_step, self.faulty_rank):
            batch = [([self.spoils(one) for one in features], y) for features, y in batch]
        return batch

    def step(self, state: State, step: int, nodes: tuple[str, ...]) -> Numbers:
        """Train one step; return the loss and the norm of the gradient."""
        weights, momentum = state
        loss, gradient = 0.0, [0.0] * WIDTH
        for rank in range(self.world):
            own = [0.0] * WIDTH
            for features, y in self.inputs(step, rank):
                error = sum(w * x for w, x in zip(weights, features, strict=True)) - y
                loss += error * error / SAMPLES / self.world
                for place, x in enumerate(features):
                    own[place] += 2 * error * x / SAMPLES
            if self.strikes(step, nodes[rank * len(nodes) // self.world], rank):
                own[0] = flipped(own[0], self.source)
            for place in range(WIDTH):
                gradient[place] += own[place] / self.world
        for place in range(WIDTH):
            gradient[place] *= 1 + self.noise * self.source.gauss(0, 1)
            momentum[place] = MOMENTUM * momentum[place] + gradient[place]
            weights[place] -= RATE * momentum[place]
        return loss + 1.0, math.hypot(*gradient)

    def strikes(self, step: int, node: str, rank: int) -> bool:
        """Return whether the hardware fails in a rank's step."""
        is_once = self.cause in ("passing", "unseeded")
        if is_once and rank != self.faulty_rank:
            return False
        if is_once and step == self.faulty_step and not self.has_struck:
            self.has_struck = True
            return True
        if self.cause != "node" or node != "b":
            return False
        self.is_worn |= step >= self.faulty_step
        return self.is_worn and self.source.random() < self.chance

    def attempt(
        self,
        detector: AnomalyDetector,
        start_step: int | None,
        nodes: tuple[str, ...],
        *,
        ends: int,
        passes: int | None,
    ) -> Trace:
        """Train from a file until the loss breaks, step `ends`, or a calm pass of step `passes`."""
        weights, momentum = self.files[start_step or 0]
        state: State = (list(weights), list(momentum))
        numbers: dict[int, Numbers] = {}
        trace = Trace(
            attempt=len(self.traces) + 1, numbers=numbers, restored_step=start_step, nodes=nodes
        )
        detector.restarted(start_step or 0)
        candidate: int | None = None
        for step in range((start_step or 0) + 1, ends + 1):
            numbers[step] = self.step(state, step, nodes)
            anomaly = detector.look(0, step, numbers[step][0], leads=True)
            if anomaly is not None:
                return replace(trace, anomaly=anomaly)
            if detector.is_calm:
                if candidate is not None and step - candidate >= HEALTHY_AFTER:
                    self.healthy.add(candidate)
                    candidate = None
                if passes is not None and step > passes:
                    return trace
            if step % EVERY == 0:
                self.files[step] = (list(state[0]), list(state[1]))
                candidate = step if candidate is None else candidate
        return trace

    def damage(self, step: int) -> None:
        """Write wrong values into a file."""
        weights, momentum = self.files[step]
        factor = 10.0 ** self.source.uniform(3, 8)
        if self.source.random() < 0.5:
            self.files[step] = weights, [one * factor for one in momentum]
        else:
            self.files[step] = [weights[0] * factor, *weights[1:]], momentum

    def go_back(self, before_step: int) -> int | None:
        """Abandon the files newer than the newest healthy one below a step; return its step."""
        healthy = max((one for one in self.healthy if one < before_step), default=None)
        if healthy is not None:
            self.files = {step: one for step, one in self.files.items() if step <= healthy}
            self.healthy = {step for step in self.healthy if step <= healthy}
        return healthy

    def found(self) -> AnomalyClass | None:
        """Train until the class of the first broken loss is found.

        Returns:
            None if no loss broke, or if no class was found.
        """
        self.files[0] = ([0.0] * WIDTH, [0.0] * WIDTH)
        detector, nodes, start = AnomalyDetector(), self.nodes, None
        if self.cause == "checkpoint":
            fails_at = self.faulty_step + self.source.randrange(1, 30)
            self.traces.append(self.attempt(detector, None, nodes, ends=fails_at, passes=None))
            start = max(self.files)
            self.damage(start)
        first: Trace | None = None
        for _ in range(ATTEMPTS):
            passes = None if first is None or first.anomaly is None else first.anomaly.step
            trace = self.attempt(detector, start, nodes, ends=STEPS, passes=passes)
            earlier = list(self.traces)
            self.traces.append(trace)
            if trace.anomaly is None:
                return None if first is None else of_passed(first, trace, earlier).kind
            first = first or trace
            finding = of_failure(trace, earlier)
            start = self.back(finding, trace)
            finding = without_an_older_file(finding, start)
            if finding.kind is not None or start is None:
                return finding.kind
            nodes = (*nodes[1:], nodes[0])
        return None

    def back(self, finding: Finding, trace: Trace) -> int | None:
        """Return the step of the file to go on from, as `Losses.go_back` does."""
        assert trace.anomaly is not None
        for before_step in (finding.before_step, trace.anomaly.first_step):
            if before_step is not None and (step := self.go_back(before_step)) is not None:
                return step
        return None


def training(cause: str, source: random.Random) -> Training:
    """Return a training with a fault at a random place."""
    spoils = source.choice((lambda value: value * 300.0, lambda _value: math.nan))
    return Training(
        cause=cause,
        source=source,
        nodes=source.choice((("a", "b"), ("a", "b", "c", "d"))),
        noise=source.choice((0.0, 1e-6)),
        faulty_step=source.randrange(110, 180),
        faulty_rank=source.randrange(4),
        chance=source.uniform(0.02, 1.0),
        spoils=spoils,
    )


def classified(cause: str, count: int, source: random.Random) -> list[AnomalyClass | None]:
    """Return the classes found for `count` trainings with a broken loss; others do not count."""
    found: list[AnomalyClass | None] = []
    while len(found) < count:
        one = training(cause, source)
        kind = one.found()
        if any(trace.anomaly is not None for trace in one.traces):
            found.append(kind)
    return found
