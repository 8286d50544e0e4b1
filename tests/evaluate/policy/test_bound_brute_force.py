"""Compare the bound with the best schedule, found by brute force."""

import itertools
import random

import pytest

from holdfast.evaluate.policy.bound import Quota, RunWork, SampleWork, Transfer, lower_bound
from holdfast.evaluate.types.engine import Curve

INSTANCES = 250
QUICK = 70


def ends_on_engine(curve, jobs, there_s):
    """Return all Pareto-best vectors of ends of `jobs` (ready, prompt, tokens) on one engine.

    Before every step, the engine chooses: read the prompt of a ready job, make a step with any set
    of read jobs, or wait for the next job to be ready.
    """
    found, seen = [], set()

    def go(now_s, rest, read, ends):
        state = round(now_s, 9), rest, read, ends
        if state in seen:
            return
        seen.add(state)
        if None not in ends:
            if any(all(a <= b for a, b in zip(other, ends, strict=True)) for other in found):
                return
            found.append(ends)
            return
        for job, (ready_s, prompt, tokens) in enumerate(jobs):
            if not read[job] and ready_s <= now_s + 1e-12:
                done_s = now_s + curve.request_s + prompt / curve.prefill_tokens_per_s
                its_end = done_s if tokens == 0 else None
                go(done_s, rest, _with(read, job, True), _with(ends, job, its_end))
        running = [job for job in range(len(jobs)) if read[job] and rest[job]]
        for size in range(1, min(len(running), curve.max_batch) + 1):
            for batch in itertools.combinations(running, size):
                after_s = now_s + curve.step_base_s + size * curve.step_sequence_s
                left, after = rest, ends
                for job in batch:
                    left = _with(left, job, left[job] - 1)
                    if not left[job]:
                        after = _with(after, job, after_s)
                go(after_s, left, read, after)
        later = [
            ready_s
            for job, (ready_s, _, _) in enumerate(jobs)
            if not read[job] and ready_s > now_s + 1e-12
        ]
        if later:
            go(min(later), rest, read, ends)

    count = len(jobs)
    go(there_s, tuple(tokens for _, _, tokens in jobs), (False,) * count, (None,) * count)
    return found


def _with(values, place, value):
    return (*values[:place], value, *values[place + 1 :])


def best_end_of_metrics(metrics, slots, per_s):
    """Return the best end of metrics (ready, seconds) over all orders, each on the first free slot."""
    best = float("inf")
    for order in itertools.permutations(metrics):
        free, end_s, admitted_s = [0.0] * slots, 0.0, float("-inf")
        for ready_s, metric_s in order:
            slot = free.index(min(free))
            begin_s = max(free[slot], ready_s)
            if per_s:
                begin_s = admitted_s = max(begin_s, admitted_s + 1.0 / per_s)
            free[slot] = begin_s + metric_s
            end_s = max(end_s, free[slot])
        best = min(best, end_s)
    return best


def optimum(curve, samples, there_s, slots, per_s):
    best = float("inf")
    for places in itertools.product(range(len(there_s)), repeat=len(samples)):
        parts = []
        for engine, its_s in enumerate(there_s):
            mine = [job for job, place in enumerate(places) if place == engine]
            parts.append(
                (
                    mine,
                    ends_on_engine(curve, [samples[job][:3] for job in mine], its_s)
                    if mine
                    else [()],
                )
            )
        for choice in itertools.product(*(ends for _, ends in parts)):
            ends = {
                job: end_s
                for (mine, _), its in zip(parts, choice, strict=True)
                for job, end_s in zip(mine, its, strict=True)
            }
            end_s = max(ends.values())
            metrics = [(ends[job], sample[3]) for job, sample in enumerate(samples) if sample[3]]
            if metrics and end_s < best:
                end_s = max(end_s, best_end_of_metrics(metrics, slots, per_s))
            best = min(best, end_s)
    return best


def instance(seed):
    rng = random.Random(seed)
    engines = rng.randint(1, 3)
    count = rng.randint(1, 4 if engines > 1 else 3)
    curve = Curve(
        prefill_tokens_per_s=rng.choice((10.0, 100.0)),
        request_s=rng.choice((0.0, 0.1)),
        step_base_s=rng.choice((0.1, 1.0, 2.0)),
        step_sequence_s=rng.choice((0.05, 0.5)),
        max_batch=rng.randint(1, 3),
    )
    samples = [
        (
            rng.choice((0.0, 0.0, 1.0, 3.5)),
            rng.randint(1, 10),
            rng.randint(0, {1: 4, 2: 3, 3: 2, 4: 1}[count]),
            rng.choice((0.0, 0.0, 1.0, 5.0)),
        )
        for _ in range(count)
    ]
    there_s = [rng.choice((0.0, 0.0, 2.0)) for _ in range(engines)]
    return curve, samples, there_s, rng.randint(1, 2), rng.choice((0.0, 0.0, 0.5))


def work_of(curve, samples, there_s, slots, per_s):
    return RunWork(
        samples=[
            SampleWork(
                ready_s=ready_s,
                engine_s=curve.saturated_s(prompt, tokens),
                alone_s=curve.alone_s(prompt, tokens),
                tokens=tokens,
                metric_s=metric_s,
                judge_requests=1.0 if per_s and metric_s else 0.0,
            )
            for ready_s, prompt, tokens, metric_s in samples
        ],
        engines_there_s=there_s,
        slots_there_s=[0.0] * slots,
        curve=curve,
        judge_requests=Quota(rate_per_s=per_s, burst=1.0) if per_s else None,
    )


@pytest.mark.parametrize(
    "seeds", [range(QUICK), pytest.param(range(QUICK, INSTANCES), marks=pytest.mark.slow)]
)
def test_never_above_the_best_of_all_schedules(seeds):
    tight, bound_by = 0, set()
    for seed in seeds:
        case = instance(seed)
        bound, best_s = lower_bound(work_of(*case)), optimum(*case)
        assert bound.seconds <= best_s + 1e-9, f"instance {seed}: {bound} above {best_s}"
        tight += bound.seconds > best_s - 1e-6
        bound_by.add(bound.binds)
    assert tight > len(seeds) // 4, "a bound that is never reached says little"
    assert bound_by >= {"engines", "sample", "metrics"}


def test_the_terms_by_hand():
    curve = Curve(
        prefill_tokens_per_s=1e9, request_s=0.0, step_base_s=1.0, step_sequence_s=0.5, max_batch=2
    )
    one = SampleWork(engine_s=4.0, alone_s=6.0, tokens=4)
    bound = lower_bound(RunWork(samples=[one] * 6, engines_there_s=[0.0, 4.0], curve=curve))
    assert bound.terms["engines"] == 14.0, (
        "24 seconds of work, of which the first engine does 4 before the other comes"
    )
    assert bound.terms["sample"] == 6.0
    assert bound.seconds == 14.0
    assert bound.ratio(15.4) == pytest.approx(1.1)


def test_pace_binds_where_a_full_batch_would_be_too_slow():
    curve = Curve(
        prefill_tokens_per_s=1e9, request_s=0.0, step_base_s=1.0, step_sequence_s=0.5, max_batch=8
    )
    long = SampleWork(engine_s=curve.saturated_s(0, 10), alone_s=curve.alone_s(0, 10), tokens=10)
    bound = lower_bound(RunWork(samples=[long] * 4, engines_there_s=[0.0], curve=curve))
    assert bound.binds == "pace"
    assert bound.seconds == pytest.approx(30.0, abs=1e-3), (
        "four together: 10 steps of 1 + 4 / 2 seconds"
    )


def test_quota_and_storage():
    sample = SampleWork(
        engine_s=1.0, alone_s=1.0, metric_s=0.5, judge_requests=1.0, judge_tokens=100.0
    )
    work = RunWork(
        samples=[sample] * 10,
        engines_there_s=[0.0],
        slots_there_s=[0.0] * 4,
        judge_requests=Quota(rate_per_s=0.5, burst=2.0),
        judge_tokens=Quota(rate_per_s=10.0),
        transfers=[[Transfer(size_bytes=100.0, bytes_per_s=10.0, then_s=1.0)]],
    )
    bound = lower_bound(work)
    assert bound.terms["judge"] == 1.0 + 1000 / 10
    assert bound.terms["storage"] == 11.0
    assert bound.binds == "judge"


def test_nothing_to_do_and_nobody_to_do_it():
    assert lower_bound(RunWork(samples=[], engines_there_s=[])).seconds == 0.0
    with pytest.raises(ValueError, match="no engine or slot for it"):
        lower_bound(RunWork(samples=[SampleWork(engine_s=1.0, alone_s=1.0)], engines_there_s=[]))
