"""Compute a lower bound on the makespan of any schedule, from the actual costs of a run.

Each term keeps only one constraint on schedules and drops all others. So no term exceeds the best
makespan, and the lower bound is the largest term.

**engines.** An engine with `b` sequences in its batch (at most `B`) generates one token of each in
`base + b * sequence` seconds. Let a token count as `base / B + sequence` seconds of work, which is
its cost in a full batch (`Curve.saturated_s`). In one second, the engine then does `b * (base / B +
sequence) / (base + b * sequence)` seconds of work, which is at most 1 since `b * base / B <= base`.
Reading a prompt does exactly 1 second of work in a second. Let `W(t)` be the work that is not ready
before `t`, and `there` the time from which an engine can serve. Then the end `T` obeys `sum over
engines of max(0, T - max(t, there)) >= W(t)` for every `t`. It is enough to check each `t` at which
a sample becomes ready. This is the preemptive relaxation with release times, and takes `O(n log
n)`.

**pace.** This term refines the term for engines, since a long answer in a full batch may end too
late. Let a sequence of `n` tokens be ready at `r`, its prompt take `p` seconds and its metric `m`,
and let the end be `T`. Its steps take at most `H = T - r - p - m` together. Divide each step's time
among the `b` sequences in it: a token costs the engine `base / b + sequence`, which is convex in
`b`, while the step takes `base + b
* sequence`, which is linear. If `a` is the mean of `b` over its tokens, then `n * (base + a *
  sequence) <= H`, and by Jensen's inequality the tokens cost at least `n * (base / a + sequence)`.
  With the largest `a` that `H` and `B` allow, the sum of these costs over all sequences may not
  exceed the engines' time until `T`. The sum falls and the engines' time grows with `T`, so
  bisection finds the least feasible `T`. This term is never below `engines` at `t = 0`.

**sample.** Each sample takes a minimum of time, even without other samples. No engine generates a
token in less than `base + sequence` seconds, in any batch, and the sample's metric starts after its
answers. So the end is not before `ready + alone + metric`.

**metrics.** A metric cannot start before `ready + alone` of its sample, and `C` slots do `C`
seconds of metrics in a second. The term is derived as for engines, with slots in place of engines.

**judge.** A quota admits at most `burst + rate * (T - t)` requests (or tokens) from `t` to `T`; the
judge's work after `t` is at least the work that is not ready before `t`.

**storage.** All bytes of the models that become ready at `t` or later cross the storage's network
link after `t`, and each node's share of the bytes crosses the link of that node. So `T >= t + bytes
/ bandwidth` for each link. After the last byte, at least one sample of that model still takes its
minimum of time.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from holdfast.evaluate.types.engine import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWork:
    """Hold the actual costs of one sample.

    Attributes:
        ready_s: the earliest time at which the sample can start: the sample was submitted, and its
            model could have been loaded.
        engine_s: the engine-seconds of all requests on the fastest engine in full batches
            (`Curve.saturated_s`).
        alone_s: the seconds of the longest request if it has an engine to itself (`Curve.alone_s`).
        metric_s: the seconds that the metric occupies one slot.
        tokens: the number of generated tokens of the longest request.
        judge_requests, judge_tokens: how much of the judge's quota the sample uses.
    """

    ready_s: float = 0.0
    engine_s: float
    alone_s: float
    metric_s: float = 0.0
    tokens: float = 0.0
    judge_requests: float = 0.0
    judge_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Allow at most `burst + rate_per_s * t` requests or tokens in any `t` seconds."""

    rate_per_s: float
    burst: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Bytes that must cross a network link, and that are available from `ready_s` on.

    `then_s` is the minimum time of the work that follows the last byte.
    """

    ready_s: float = 0.0
    size_bytes: float
    bytes_per_s: float
    then_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWork:
    """Hold the actual work of a run.

    Attributes:
        samples: all finished samples, each once.
        curve: the cost curve of the fastest engine; without it, the term "pace" is left out.
        engines_there_s: for each engine, the earliest time from which it could have served.
        slots_there_s: for each metric slot, the time from which it was available.
        judge_requests, judge_tokens: the judge's quotas; None without a quota.
        transfers: the transfers on each network link.
    """

    samples: Sequence[SampleWork]
    engines_there_s: Sequence[float]
    curve: Curve | None = None
    slots_there_s: Sequence[float] = ()
    judge_requests: Quota | None = None
    judge_tokens: Quota | None = None
    transfers: Sequence[Sequence[Transfer]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The lower bound on the makespan: no schedule ends before `seconds`.

    `terms` are the terms that the module describes. `binds` is the name of the largest term.
    """

    seconds: float
    binds: str
    terms: dict[str, float] = field(default_factory=dict)

    def ratio(self, makespan_s: float) -> float:
        """Return the makespan divided by the bound; 1 for a run without work."""
        return makespan_s / self.seconds if self.seconds > 0 else 1.0


def lower_bound(work: RunWork) -> Bound:
    """Compute the largest of the terms that the module describes, in O(n log n).

    Raises:
        ValueError: there is work but no engine, or there are metrics but no slot.
    """
    samples = work.samples
    terms = {
        "engines": _over_machines(
            [(one.ready_s, one.engine_s) for one in samples], work.engines_there_s
        ),
        "pace": 0.0,
        "sample": max((one.ready_s + one.alone_s + one.metric_s for one in samples), default=0.0),
        "metrics": _over_machines(
            [(one.ready_s + one.alone_s, one.metric_s) for one in samples if one.metric_s],
            work.slots_there_s,
        ),
        "judge": max(
            _under_quota(
                ((one.ready_s + one.alone_s, one.judge_requests) for one in samples),
                work.judge_requests,
            ),
            _under_quota(
                ((one.ready_s + one.alone_s, one.judge_tokens) for one in samples),
                work.judge_tokens,
            ),
        ),
        "storage": max((_over_wire(wire) for wire in work.transfers), default=0.0),
    }
    terms["pace"] = _at_pace(work, max(terms["engines"], terms["sample"]))
    binds = max(terms, key=lambda name: terms[name])
    return Bound(seconds=terms[binds], binds=binds, terms=terms)


def _over_machines(jobs: list[tuple[float, float]], there_s: Sequence[float]) -> float:
    """Return the earliest end of divisible jobs on machines of speed 1.

    Each job is (time from which it is ready, seconds of work); `there_s` is the time from which
    each machine is available.
    """
    if not jobs:
        return 0.0
    if not there_s:
        raise ValueError("There is work, but no engine or slot for it.")
    there = sorted(there_s)
    there_before = [0.0, *accumulate(there)]
    end_s = rest_s = 0.0
    for ready_s, cost_s in sorted(jobs, reverse=True):
        rest_s += cost_s
        end_s = max(end_s, _end_of(rest_s, ready_s, there, there_before))
    return end_s


def _end_of(rest_s: float, from_s: float, there: list[float], there_before: list[float]) -> float:
    """Return the smallest T with sum(max(0, T - max(from_s, there))) >= rest_s.

    Machines are added in the order in which they become available.
    """
    first = bisect_right(there, from_s)
    count, sum_s = first, first * from_s
    if count == 0:
        count, sum_s = 1, there[0]
    while True:
        end_s = (rest_s + sum_s) / count
        if count == len(there) or end_s <= there[count]:
            return end_s
        # All machines that are available before this end take part; later ends only add machines.
        grown = max(count + 1, bisect_right(there, end_s) if count else 1)
        sum_s += there_before[grown] - there_before[count]
        count = grown
        end_s = (rest_s + sum_s) / count


def _at_pace(work: RunWork, least_s: float) -> float:
    """Compute the term "pace"; 0 if it is at most `least_s`, the maximum of the other terms."""
    curve = work.curve
    if curve is None or not work.samples or curve.step_sequence_s <= 0:
        return 0.0
    base_s, sequence_s, most = curve.step_base_s, curve.step_sequence_s, curve.max_batch
    full_s = base_s + most * sequence_s
    hurried: list[tuple[float, float]] = []  # (T minus the latest end of the last step, tokens)
    rest_s = 0.0
    for one in work.samples:
        rest_s += one.engine_s
        # The time for a sample's prompt is `alone_s` minus the steps of the sample's tokens.
        late_s = one.ready_s + one.alone_s - one.tokens * (base_s + sequence_s) + one.metric_s
        if one.tokens and one.tokens * full_s > least_s - late_s:
            hurried.append((late_s, one.tokens))

    def lacks_s(end_s: float) -> float:
        extra_s = rest_s
        for late_s, tokens in hurried:
            batch = ((end_s - late_s) / tokens - base_s) / sequence_s
            extra_s += tokens * base_s * (1.0 / min(max(batch, 1.0), most) - 1.0 / most)
        return extra_s - sum(max(0.0, end_s - there_s) for there_s in work.engines_there_s)

    if lacks_s(least_s) <= 0:
        return 0.0
    low_s, high_s = least_s, 2 * least_s + 1e-6
    while lacks_s(high_s) > 0:
        low_s, high_s = high_s, 2 * high_s
    for _ in range(30):
        middle_s = (low_s + high_s) / 2
        if lacks_s(middle_s) > 0:
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def _under_quota(demands: Iterable[tuple[float, float]], quota: Quota | None) -> float:
    if quota is None:
        return 0.0
    end_s = rest = 0.0
    for ready_s, demand in sorted((one for one in demands if one[1]), reverse=True):
        rest += demand
        end_s = max(end_s, ready_s + max(0.0, rest - quota.burst) / quota.rate_per_s)
    return end_s


def _over_wire(transfers: Sequence[Transfer]) -> float:
    end_s = rest_s = 0.0
    then_s = float("inf")
    for transfer in sorted(transfers, key=lambda transfer: transfer.ready_s, reverse=True):
        rest_s += transfer.size_bytes / transfer.bytes_per_s
        then_s = min(then_s, transfer.then_s)
        end_s = max(end_s, transfer.ready_s + rest_s + then_s)
    return end_s
