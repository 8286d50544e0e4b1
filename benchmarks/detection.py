"""Measure `holdfast run` on emulated trainings: broken losses, their classes, slow ranks, hangs.

- `losses`: curves of training losses with six kinds of noise and no fault, and curves with a loss
  that jumps and stays, or becomes NaN. The peers are two rules in use: 1.5 times the loss before
  (InternEvo's monitor), and twice the mean of the last ten (Lightning's SpikeDetection).
- `classes`: small real trainings in this process (`detecting/anomaly_classes.py`). The loss breaks
  by bad data, a passing bit flip, a node that flips bits repeatedly, or a damaged checkpoint with
  right digests; some trainings do not repeat themselves. The figure is the class that the replays
  find for the first broken loss. No peer finds classes.
- `slow`: ranks that compute, and wait for each other at the end of each step. One of them is slower
  by 30% to 100%, or none. There is no peer: other tools compare step times, which are the same for
  all ranks.
- `hangs`: 24 hours of a training with pauses that are no hang: steps of up to five times the
  median, saves, an unmarked evaluation of 10 minutes by one rank, ranks without CPU time for half a
  minute, and a suspended machine. Further trainings have one rank that is stopped, waits for a
  lock, sleeps, computes for ever, or keeps the interpreter's lock.

Nothing here runs in real time, so no figure depends on the machine.
"""

import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from common.table import Must, Row, parse_arguments, report
from detecting.anomaly_classes import CAUSES, classified
from holdfast.recover.detectors.anomaly import NOT_FINITE_STEPS, SPIKE_STEPS, AnomalyDetector
from holdfast.recover.detectors.collectives import Begun
from holdfast.recover.detectors.hang import Frozen, HangDetector, HangLimits, Look
from holdfast.recover.detectors.slow import SlowDetector
from holdfast.recover.stacks import Activity, Stand

PARTS = ("losses", "classes", "slow", "hangs")
NOISE = ("even", "heavy tails", "slow", "sawtooth", "other data", "taking turns", "outliers")
BEFORE = 300
"""Steps before the loss breaks."""
AFTER = 40
WORLDS = (2, 4, 8, 16, 64)
RANKS_A_NODE = 8
STEPS = 20
TICK_S = 0.1
"""The tick of the supervisor."""
STEP_S = 1.0
HOUR_S = 3600.0
KINDS = ("stopped", "lock", "sleep", "busy", "interpreter")
TRAIN = Stand(Activity.OTHER, ("forward (model.py:80)",))
WAIT = Stand(Activity.BACKWARD, ("_engine_run_backward (graph.py:979)", "<module> (train.py:6)"))
BARRIER = Stand(
    Activity.COLLECTIVE, ("barrier (distributed_c10d.py:4159)", "<module> (train.py:9)")
)
EVALUATE = Stand(Activity.OTHER, ("evaluate (train.py:40)",))

Rule = Callable[[float], bool]
"""Receives a loss; returns True if the rule takes the loss for a spike."""


# Losses


def curve(kind: str, steps: int, source: random.Random) -> Iterator[float]:
    """Yield the losses of a training without faults."""
    drift = 0.0
    for step in range(steps):
        base = 1.8 + 9.0 * math.exp(-step / 400)
        drift = 0.98 * drift + source.gauss(0, 0.01)
        tail = source.gauss(0, 1) / math.sqrt(source.gammavariate(1.5, 1 / 1.5))
        noise = {
            "even": source.gauss(0, 0.05),
            "heavy tails": 0.05 * tail,
            "slow": drift + source.gauss(0, 0.02),
            "sawtooth": 0.3 * (step % 500) / 500 + source.gauss(0, 0.02),
            "other data": (0.35 if step // 700 % 2 else 0.0) + source.gauss(0, 0.01),
            "taking turns": (0.6 if step // 40 % 2 else 0.0) + source.gauss(0, 0.02),
            "outliers": source.gauss(0, 0.03) + (3.0 if source.random() < 0.02 else 0.0),
        }[kind]
        yield base + noise


def poisoned(kind: str, source: random.Random) -> list[float]:
    """Return losses that jump after `BEFORE` steps by half to four times, and hardly come down."""
    losses = list(curve(kind, BEFORE + AFTER, source))
    height, ease = source.uniform(1.5, 5.0), source.choice((1.0, 0.98))
    for step in range(BEFORE, BEFORE + AFTER):
        losses[step] *= 1 + (height - 1) * ease ** (step - BEFORE)
    return losses


def ours() -> Rule:
    """Return our own detector as a rule."""
    detector, steps = AnomalyDetector(), iter(range(1, sys.maxsize))

    def look(loss: float) -> bool:
        found = detector.look(0, next(steps), loss, leads=True)
        if found is not None:
            detector.accept()
        return found is not None

    return look


def above_the_one_before() -> Rule:
    """Return the rule that compares a loss with the one before."""
    before = [math.inf]

    def look(loss: float) -> bool:
        is_spike = loss > 1.5 * before[0]
        before[0] = loss
        return is_spike

    return look


def above_the_last_ten() -> Rule:
    """Return the rule that compares a loss with the mean of the last ten."""
    last: deque[float] = deque(maxlen=10)

    def look(loss: float) -> bool:
        is_spike = len(last) == 10 and loss > 2.0 * statistics.fmean(last)
        last.append(loss)
        return is_spike

    return look


RULES = {
    "1.5 times the one before": above_the_one_before,
    "twice the mean of ten": above_the_last_ten,
}


def first_alarm(losses: Sequence[float], make: Callable[[], Rule]) -> int | None:
    """Return the steps from the break until a rule finds it; None if never.

    Earlier alarms do not count.
    """
    look = make()
    for step, loss in enumerate(losses, 1 - BEFORE):
        if look(loss) and step > 0:
            return step
    return None


def loss_rows(source: random.Random, *, steps: int, poisonings: int) -> list[Row]:
    """Measure the broken losses found, and the false alarms on noise."""
    curves = [list(curve(kind, steps // len(NOISE), source)) for kind in NOISE]
    broken = [poisoned(NOISE[number % len(NOISE)], source) for number in range(poisonings)]
    nan = [one[: BEFORE + 1] + [math.nan] * AFTER for one in broken]

    def false_alarms(make: Callable[[], Rule]) -> int:
        return sum(sum(map(make(), one)) for one in curves)

    def alarms(make: Callable[[], Rule], some: list[list[float]]) -> list[int]:
        return [found for one in some if (found := first_alarm(one, make)) is not None]

    spikes, not_finite = alarms(ours, broken), alarms(ours, nan)
    rows = [
        Row(
            measure=f"alarms in {steps:,} noisy steps, {name}",
            ours=false_alarms(ours) if name == "ours" else None,
            peer=None if name == "ours" else false_alarms(RULES[name]),
            limit=0,
            unit="alarms",
            must=Must("<=", 1) if name == "ours" else None,
        )
        for name in ("ours", *RULES)
    ]
    found = {"limit": poisonings, "unit": "trainings"}
    rows += [
        Row(
            measure=f"loss that jumps: found, of {poisonings}",
            ours=len(spikes),
            must=Must("=", poisonings),
            **found,
        ),
        *(
            Row(
                measure=f"loss that jumps: found, of {poisonings}, {name}",
                peer=len(alarms(make, broken)),
                **found,
            )
            for name, make in RULES.items()
        ),
        Row(
            measure="loss that jumps: steps to the alarm, slowest",
            ours=max(spikes, default=None),
            limit=SPIKE_STEPS,
            unit="steps",
            must=Must("<=", SPIKE_STEPS + 5),
        ),
        Row(
            measure=f"NaN: found, of {poisonings}",
            ours=len(not_finite),
            must=Must("=", poisonings),
            **found,
        ),
        Row(
            measure="NaN: steps to the alarm, slowest",
            # The curve has one ordinary step first.
            ours=max((one - 1 for one in not_finite), default=None),
            limit=NOT_FINITE_STEPS,
            unit="steps",
            must=Must("<=", NOT_FINITE_STEPS),
        ),
    ]
    return rows


# Classes


def class_rows(source: random.Random, *, each: int) -> list[Row]:
    """Measure the share of right classes for broken losses of known causes."""
    right = {
        cause: sum(found == kind for found in classified(cause, each, source))
        for cause, kind in CAUSES.items()
    }
    known = [cause for cause in CAUSES if cause != "unseeded"]
    total = len(known) * each
    rows = [
        Row(
            measure=f"cause {cause}: right class, of {each}",
            ours=found,
            limit=each,
            unit="trainings",
        )
        for cause, found in right.items()
    ]
    of_known = sum(right[cause] for cause in known)
    return [
        Row(
            measure=f"broken losses with a cause: right class, of {total}",
            ours=of_known,
            limit=total,
            unit="trainings",
            must=Must(">=", math.ceil(0.95 * total)),
        ),
        *rows,
    ]


# Slow ranks


def emulated(
    world: int, source: random.Random, *, slow: int | None, factor: float, jitter: float
) -> SlowDetector:
    """Return a detector after `STEPS` steps of 1 s of an emulated training."""
    buckets = source.choice((1, 4, 16))
    begun: list[dict[tuple[str, int], float]] = [{} for _ in range(world)]
    now_s, number, steps_s = 1000.0, 0, []
    for _ in range(STEPS):
        at_s = [now_s] * world
        for _ in range(buckets):
            number += 1
            for rank in range(world):
                part_s = (factor if rank == slow else 1.0) / buckets
                at_s[rank] += part_s * max(0.3, source.gauss(1.0, jitter))
                begun[rank]["0", number] = at_s[rank]
        now_s = max(at_s)
        steps_s.append(now_s)
    detector = SlowDetector()
    detector.request_sent(now_s)
    clocks = [source.uniform(-1, 1) for _ in range(world // RANKS_A_NODE + 1)]
    for rank, collectives in enumerate(begun):
        clock_s = clocks[rank // RANKS_A_NODE]
        one = Begun(
            at_s=collectives,
            last={"0": number},
            waits=False,
            steps_s=tuple(steps_s),
            read_at_s=now_s,
            cost_s=0.0,
        )
        detector.answered(
            rank,
            f"node{rank // RANKS_A_NODE}",
            one.shifted(clock_s),
            now_s + source.uniform(0.0, 0.01),
        )
    return detector


def slow_rows(source: random.Random, *, rounds: int) -> list[Row]:
    """Measure the ranks that are named after 20 steps."""
    named, wrong, of = 0, 0, 0
    false = 0
    for _ in range(rounds):
        for world in WORLDS:
            slow, factor = source.randrange(world), source.uniform(1.3, 2.0)
            jitter = source.uniform(0.01, 0.1)
            detector = emulated(world, source, slow=slow, factor=factor, jitter=jitter)
            found = detector.look(1e9, set(range(world)))
            ranks = set() if found is None else set(found.shares)
            of += 1
            named += slow in ranks
            wrong += len(ranks - {slow})
            calm = emulated(world, source, slow=None, factor=1.0, jitter=jitter)
            false += calm.look(1e9, set(range(world))) is not None
    none = {"limit": 0, "must": Must("=", 0)}
    return [
        Row(
            measure=f"slow rank named after {STEPS} steps, of {of}",
            ours=named,
            limit=of,
            unit="trainings",
            must=Must(">=", math.ceil(0.99 * of)),
        ),
        Row(measure="ranks named that are not slow", ours=wrong, unit="ranks", **none),
        Row(measure=f"alarms in {of} trainings alike", ours=false, unit="alarms", **none),
    ]


# Hangs


class Ranks:
    """Ranks that train in virtual time, under the hang detector."""

    def __init__(self, world: int, source: random.Random) -> None:
        self.world, self.source = world, source
        self.detector = HangDetector(HangLimits())
        self.detector.world_size = world
        self.now_s = self.step = 0.0
        self.looks: Callable[[], dict[int, Look]] = dict
        self.states: dict[int, str | None] = {}
        self.io_bytes = 0
        for rank in range(world):
            self.detector.attached(rank, self.now_s)

    def pass_time(self, seconds: float) -> Frozen | None:
        """Let the supervisor watch for some time; return the first alarm."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + TICK_S)
            if self.detector.look_due(self.now_s):
                self.detector.looked(self.looks(), self.now_s)
            frozen = self.detector.check(self.now_s, self.states)
            if frozen is not None:
                return frozen
        return None

    def steps(self, count: int, *, jitter: bool = False) -> Frozen | None:
        """Make steps, with `jitter` of up to five times the usual time."""
        self.looks = lambda: {rank: self.at_work(WAIT) for rank in range(self.world)}
        for _ in range(count):
            own_s = STEP_S * (self.source.uniform(0.8, 5.0) if jitter else 1.0)
            frozen = self.pass_time(own_s)
            if frozen is not None:
                return frozen
            self.step += 1
            for rank in range(self.world):
                self.detector.stepped(rank, int(self.step), own_s, self.now_s)
        return None

    def at_work(self, stand: Stand) -> Look:
        """Return a look at a rank that computes."""
        self.io_bytes += 1
        return Look(state="running", cpu_s=self.now_s, io_bytes=self.io_bytes, stand=stand)

    def idle(self, stand: Stand | None, *, last: int | None = None) -> Look:
        """Return a look at an idle rank, with its last collective if the rank answers."""
        begun = None
        if last is not None:
            waits = stand in (WAIT, BARRIER)
            begun = Begun(at_s={}, last={"0": last}, waits=waits, read_at_s=0.0, cost_s=0.0)
        return Look(state="sleeping", cpu_s=1.0, io_bytes=7, stand=stand, begun=begun)


def save(ranks: Ranks) -> Frozen | None:
    """Save on all ranks, for up to a minute."""
    for rank in range(ranks.world):
        ranks.detector.section(rank, ranks.now_s, is_open=True, limit_s=None)
    ranks.looks = lambda: {rank: ranks.at_work(TRAIN) for rank in range(ranks.world)}
    frozen = ranks.pass_time(ranks.source.uniform(1.0, 60.0))
    for rank in range(ranks.world):
        ranks.detector.section(rank, ranks.now_s, is_open=False, limit_s=None)
    return frozen


def evaluate(ranks: Ranks) -> Frozen | None:
    """Have one rank evaluate for 10 minutes without marking it, while the others wait."""
    ranks.looks = lambda: {
        rank: ranks.at_work(EVALUATE) if rank == 0 else ranks.idle(BARRIER)
        for rank in range(ranks.world)
    }
    return ranks.pass_time(600.0)


def starve(ranks: Ranks) -> Frozen | None:
    """Leave all ranks without CPU time for half a minute, at any place."""
    stands = [ranks.source.choice((TRAIN, WAIT, None)) for _ in range(ranks.world)]
    ranks.looks = lambda: {rank: ranks.idle(stand) for rank, stand in enumerate(stands)}
    return ranks.pass_time(30.0)


def suspend(ranks: Ranks) -> Frozen | None:
    """Suspend the machine, with the supervisor, for an hour."""
    ranks.now_s += HOUR_S
    ranks.detector.resumed(HOUR_S)
    return ranks.pass_time(STEP_S)


def false_alarms(source: random.Random, hours: float) -> tuple[int, float]:
    """Return the alarms in hours of noise, and the number of hours."""
    ranks, alarms, passed_s = Ranks(4, source), 0, 0.0
    ranks.steps(100)
    while passed_s < hours * HOUR_S:
        began_s = ranks.now_s
        pause = source.choice((save, save, save, evaluate, starve, suspend))
        alarms += ranks.steps(source.randrange(50, 400), jitter=True) is not None
        alarms += pause(ranks) is not None
        passed_s += ranks.now_s - began_s - (HOUR_S if pause is suspend else 0.0)
    return alarms, passed_s / HOUR_S


def hang(kind: str, source: random.Random) -> tuple[int, Frozen | None]:
    """Have a random rank hang; return the rank, and the alarm within 40 minutes."""
    ranks = Ranks(source.choice((2, 4, 8)), source)
    ranks.steps(source.randrange(20, 60))
    victim, last = source.randrange(ranks.world), int(ranks.step)
    stand = Stand(Activity.LOCK if kind == "lock" else Activity.OTHER, ("fetch (data.py:12)",))
    # A stopped process and one that keeps the interpreter's lock answer nothing.
    answers = kind not in ("stopped", "interpreter")
    if kind == "stopped":
        ranks.states = {victim: "stopped"}

    def look(rank: int) -> Look:
        if rank != victim:
            return ranks.idle(WAIT, last=last + 1)
        if kind in ("busy", "interpreter"):
            return ranks.at_work(stand) if answers else Look(state="running", cpu_s=ranks.now_s)
        return ranks.idle(stand if answers else None, last=last if answers else None)

    ranks.looks = lambda: {rank: look(rank) for rank in range(ranks.world)}
    return victim, ranks.pass_time(2400.0)


def hang_rows(source: random.Random, *, hours: float, hangs: int) -> list[Row]:
    """Measure the ranks named for hangs, and the false alarms on pauses."""
    alarms, passed_h = false_alarms(source, hours)
    found = [hang(KINDS[number % len(KINDS)], source) for number in range(hangs)]
    named = sum(frozen is not None and frozen.rank == victim for victim, frozen in found)
    return [
        Row(
            measure=f"alarms in {passed_h:.0f} h of pauses that are no hang",
            ours=alarms,
            limit=0,
            unit="alarms",
            must=Must("=", 0),
        ),
        Row(
            measure=f"rank that hangs: named, of {hangs}",
            ours=named,
            limit=hangs,
            unit="trainings",
            must=Must(">=", math.ceil(0.99 * hangs)),
        ),
    ]


def main() -> int:
    args = parse_arguments(__doc__ or "", parts=PARTS, rounds=40)
    source = random.Random(args.seed)
    parts = args.only or PARTS
    rows: list[Row] = []
    if "losses" in parts:
        steps, poisonings = (12_000, 12) if args.quick else (100_000, 50)
        rows += loss_rows(source, steps=steps, poisonings=poisonings)
    if "classes" in parts:
        rows += class_rows(source, each=2 if args.quick else 60)
    if "slow" in parts:
        rows += slow_rows(source, rounds=2 if args.quick else args.rounds)
    if "hangs" in parts:
        hours, hangs = (1.0, 10) if args.quick else (24.0, 200)
        rows += hang_rows(source, hours=hours, hangs=hangs)
    notes = [
        "losses: from 10.8 down to 1.8; each kind of noise has as many steps",
        "classes: 4 ranks on 2 or 4 nodes; a flip that breaks no loss is no broken loss",
        "slow ranks: worlds of 2 to 64, 8 a node with clocks up to 2 s apart; own times vary by 1% to 10%",
        "hangs: worlds of 2 to 8, the limits as they are by default; ranks stand where such ranks were found to stand",
    ]
    report("What the detectors find", rows, notes=notes, json_file=args.json)
    return 0 if all(row.met for row in rows if row.must is not None) else 1


if __name__ == "__main__":
    sys.exit(main())
