"""Draw a synthetic trace, given a calibration, a number of jobs and a seed."""

import heapq
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import BadUse
from holdfast.trace.twin.arrivals import arrival_rate, load_at, moments_s, offsets_s
from holdfast.trace.twin.model import Calibration, Column, Floats, Ints, TwinJobs
from holdfast.trace.twin.outcomes import StateModel, dealt_states
from holdfast.trace.twin.placing import Demand, peak_gpus, placed
from holdfast.trace.twin.reasons import FAILED, dealt_reasons
from holdfast.trace.twin.rounding import cumulative_rounded, rounded_cells
from holdfast.trace.twin.sessions import Sessions, in_sessions, retried
from holdfast.trace.twin.values import drawn_values, shifted_to_totals, with_median

RESERVED: Final = "Pretrain"
"""The job type that has a GPU quota of its own."""


def draw(calibration: Calibration, n: int | None = None, *, seed: int = 0) -> TwinJobs:
    """Draw a synthetic trace of `n` jobs, by default as many as the calibration has.

    Equal seeds give equal traces. At another size, every count is scaled and rounded, so that the
    cumulative curves hold. The time window keeps its length, except for a trace larger than full
    size. Such a trace has a longer window, so that its jobs fit into the cluster.

    Raises:
        BadUse: `n` is not positive.
    """
    n = calibration.jobs if n is None else n
    if n < 1:
        message = f"A twin cannot have {n} jobs. Give 1 or more."
        raise BadUse(message)
    return _Draw(calibration, n, seed).jobs()


class _Draw:
    """Hold the state of one draw.

    Each stage has its own random generator, so a change in one stage does not change the random
    numbers of the others.
    """

    def __init__(self, calibration: Calibration, n: int, seed: int) -> None:
        self.calibration = calibration
        self.n = n
        self.factor = n / calibration.cells.sum()
        self.seed = seed

    def rng(self, stage: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stage])

    def jobs(self) -> TwinJobs:
        known = self.calibration
        # A generator that does not depend on the seed: all draws of a size have the same counts.
        cells, seconds = rounded_cells(
            known.cells,
            known.seconds,
            known.duration_limit_s,
            known.gpu_nums,
            self.n,
            np.random.default_rng(1),
        )
        types, places, bins = (
            np.repeat(index, cells.ravel())
            for index in (i.ravel() for i in np.indices(cells.shape))
        )
        gpus = known.gpu_nums[places].astype(np.int64)
        durations = self._durations(types, places, bins, gpus, seconds)
        states = dealt_states(
            types, places, bins, (gpus * durations).astype(float),
            StateModel(
                states=known.states, shares=known.state_shares, totals=known.state_totals,
                gpu_time=known.state_gpu_time,
            ),
            gpus > 0, self.rng(5),
        )  # fmt: skip
        names = np.array(known.states)[states]
        window_s = known.window_s * max(self.factor, 1.0)
        rng = self.rng(7)
        rate = arrival_rate(
            known.start_s, window_s, known.zone, known.hour_of_week, known.dispersion, rng
        )

        def moments_of(parts: Floats, type_: int) -> Floats:
            return moments_s(parts, known.rhythm.drift[type_], rate, window_s)

        sessions = in_sessions(
            types, gpus, durations, names == "COMPLETED", np.isin(names, FAILED),
            mean_sizes=known.batch_sizes, rhythm=known.rhythm, capacity_gpus=known.capacity_gpus,
            moments_s=moments_of, rng=self.rng(3),
        )  # fmt: skip
        batches, batch_places = sessions.batches, sessions.places
        offsets = offsets_s(batch_places, batches, rng)
        first = np.concatenate(
            [moments_of(sessions.parts[sessions.types == type_], type_) for type_ in np.unique(types).tolist()]
        )  # fmt: skip

        def with_retries(lasting: Ints) -> Floats:
            ends = np.zeros(len(first), dtype=np.int64)
            np.maximum.at(ends, batches, offsets + lasting)
            return retried(first, ends, sessions.retries, sessions.pauses_s)

        # Queue times depend on the load. A retry follows a failure, which comes later by the queue
        # time.
        queues = self._queues(
            types, gpus, durations, sessions, with_retries(durations)[batches] + offsets
        )
        runs = durations - queues if known.counts_queue else durations
        moments = with_retries(queues + runs)
        users = self._users(sessions, np.bincount(batches))
        # A job that still runs was not submitted with others, so it becomes a batch of its own.
        running = np.flatnonzero(names == "RUNNING")
        moments = np.concatenate([moments, moments[batches[running]]])
        batches[running] = batches.max() + 1 + np.arange(len(running))
        offsets[running] = 0
        kept, batches = np.unique(batches, return_inverse=True)
        submits = self._submits(
            types, gpus, queues, runs, batches, offsets, moments[kept], window_s, running, rng
        )
        order = np.lexsort((np.arange(self.n), submits))
        type_names = np.array(known.types)[types]
        reasons = np.zeros(self.n, dtype="U1")
        if known.reasons is not None:
            reasons, names = dealt_reasons(
                known.reasons, self.factor, type_names, gpus, runs, names, self.rng(11)
            )
        starts = submits + queues
        gpu = gpus > 0
        return TwinJobs(
            cluster=known.cluster,
            zone=known.zone,
            counts_queue=known.counts_queue,
            capacity_gpus=known.capacity_gpus,
            peak_gpus=peak_gpus(starts[gpu], (starts + runs)[gpu], gpus[gpu]),
            job_id=self._ids(),
            user=users[order],
            type=type_names[order],
            state=names[order],
            reason=reasons[order],
            gpu_num=gpus[order],
            node_num=np.maximum(-(-gpus // 8), 1)[order],
            cpu_num=self._cpus(types, places)[order],
            submit_s=submits[order],
            queue_s=queues[order],
            duration_s=durations[order],
        )

    def _durations(
        self, types: Ints, places: Ints, bins: Ints, gpus: Ints, seconds: Floats
    ) -> Ints:
        known = self.calibration
        limit_s = known.duration_limit_s[types]
        longest = None
        if known.longest is not None:
            of_type = np.flatnonzero(types == known.longest[0])
            if len(of_type) and self.factor >= 1:
                longest = int(of_type[np.argmax(bins[of_type])])
                # The job can have the longest duration only if this duration lies in the job's bin.
                longest = (
                    longest
                    if 2.0 ** (bins[longest] - 1) < known.longest[1] <= 2.0 ** bins[longest]
                    else None
                )
        count = len(known.gpu_nums)
        values = drawn_values(
            bins, types * count + places, limit_s, seconds.ravel(), self.rng(2), longest
        )
        gpu_time = seconds * known.gpu_nums
        by_type = np.where(gpu_time.sum(axis=1) > 0, gpu_time.sum(axis=1), np.nan)
        by_gpus = np.where(gpu_time.sum(axis=0) > 0, gpu_time.sum(axis=0), np.nan)
        values = shifted_to_totals(
            values,
            bins,
            limit_s,
            gpus.astype(float),
            [(types, by_type), (places, by_gpus)],
            keep=longest,
        )
        return self._with_medians(values, bins, gpus, "duration")

    def _with_medians(self, values: Ints, bins: Ints, gpus: Ints, what: str) -> Ints:
        for kind, members in (("gpu", gpus > 0), ("cpu", gpus == 0)):
            median = self.calibration.medians_s.get(f"{kind}_{what}")
            if median is not None:
                values[members] = with_median(values[members], bins[members], median)
        return values

    def _reserved(self, types: Ints) -> npt.NDArray[np.bool_]:
        names = self.calibration.types
        reserved: npt.NDArray[np.bool_] = types == (
            names.index(RESERVED) if RESERVED in names else -1
        )
        return reserved

    def _queues(
        self, types: Ints, gpus: Ints, durations: Ints, sessions: Sessions, submits: Floats
    ) -> Ints:
        known = self.calibration
        gpu_of_type = known.cells[:, known.gpu_nums > 0].sum(axis=(1, 2)) > 0
        counts = np.bincount(types, minlength=len(known.types))
        by_bin = np.array(
            [
                cumulative_rounded(own, int(count))
                for own, count in zip(known.queue_cells, counts, strict=True)
            ]
        )
        own_types, bins = (
            np.repeat(index.ravel(), by_bin.ravel()) for index in np.indices(by_bin.shape)
        )
        limit_s = np.full(len(bins), 2.0**24)
        seconds = known.queue_seconds * self.factor
        values = drawn_values(bins, own_types, limit_s, seconds, self.rng(4))
        values = shifted_to_totals(
            values, bins, limit_s, np.ones(len(bins)), [(own_types, seconds)]
        )
        values = self._with_medians(values, bins, gpu_of_type[own_types].astype(np.int64), "queue")
        ceiling = durations if known.counts_queue else None
        # Pretraining has its own quota, so only pretraining jobs delay it. All jobs delay the
        # others.
        reserved = self._reserved(types)
        load = np.zeros(len(types))
        for waiting, counted in ((reserved, reserved), (~reserved, gpus >= 0)):
            load[waiting] = load_at(
                submits[waiting], submits[counted], (submits + durations)[counted], gpus[counted]
            )
        return dealt_queues(
            values, types, sessions.batches, sessions.places, ceiling, self.rng(6), load=load
        )

    def _submits(
        self,
        types: Ints,
        gpus: Ints,
        queues: Ints,
        runs: Ints,
        batches: Ints,
        offsets: Ints,
        moments: Floats,
        window_s: float,
        running: Ints,
        rng: np.random.Generator,
    ) -> Ints:
        known = self.calibration
        stretch_s = window_s - known.window_s
        count = int(batches.max()) + 1
        latest = np.full(count, window_s)
        np.minimum.at(latest, batches, window_s - offsets)
        fixed = {}
        if known.snapshot_s is not None:
            snapshot = known.snapshot_s - known.start_s + stretch_s
            np.minimum.at(latest, batches, snapshot - offsets - queues - runs - 1.0)
            fixed = {int(batches[job]): int(snapshot - queues[job] - runs[job]) for job in running}
        gpu = np.flatnonzero(gpus > 0)
        reserved = np.unique(batches[self._reserved(types)])
        starts = np.empty(count, dtype=np.int64)
        for members, capacity in ((gpu, known.capacity_gpus), (np.flatnonzero(gpus == 0), None)):
            own, numbers = np.unique(batches[members], return_inverse=True)
            begins = (offsets + queues)[members]
            starts[own] = placed(
                Demand(
                    batches=numbers, gpu_nums=gpus[members], begins_s=begins, ends_s=begins + runs[members],
                ),
                wanted_s=moments[own],
                latest_s=np.maximum(latest[own], 0.0),
                fixed={int(np.searchsorted(own, batch)): start for batch, start in fixed.items() if batch in own},
                reserved=frozenset(np.flatnonzero(np.isin(own, reserved)).tolist()),
                capacity_gpus=capacity,
                may_exceed_window=known.snapshot_s is None,
                rng=rng,
            )  # fmt: skip
        return np.asarray(starts[batches] + offsets + round(known.start_s), dtype=np.int64)

    def _users(self, sessions: Sessions, jobs: Ints) -> Column:
        """Assign a user to each campaign, and thereby to its jobs.

        Each user gets the given share of a type's jobs.
        """
        known, rng = self.calibration, self.rng(8)
        who = np.empty(int(sessions.campaigns[-1]) + 1, dtype=np.int64)
        size = np.bincount(sessions.campaigns, jobs)
        first = np.searchsorted(sessions.campaigns, np.arange(len(who)))
        type_of = sessions.types[first]
        for type_ in np.unique(type_of):
            curve = np.cumsum(known.users[type_])
            own = rng.permutation(np.flatnonzero(type_of == type_))
            middle = (np.cumsum(size[own]) - size[own] / 2) / size[own].sum()
            who[own] = np.searchsorted(curve / curve[-1], middle, side="right")
        numbers = rng.permutation(16**4)[: known.users.shape[1]]
        names = np.array([f"u{number:04x}" for number in numbers])
        by_campaign = names[np.minimum(who, len(names) - 1)]
        return np.asarray(by_campaign[sessions.campaigns[sessions.batches]])

    def _cpus(self, types: Ints, places: Ints) -> Ints:
        cpus = self.calibration.cpus[types, places]
        alone = self.calibration.gpu_nums[places] == 0
        # A CPU job requests the usual number of cores, half of this number, or twice this number.
        scale = np.where(alone, 2.0 ** self.rng(9).integers(-1, 2, size=len(types)), 1.0)
        return np.maximum(np.rint(cpus * scale), 1).astype(np.int64)

    def _ids(self) -> Column:
        rng = self.rng(10)
        if self.calibration.cluster == "kalos":
            letters = np.array(list("0123456789abcdefghijklmnopqrstuvwxyz"))
            drawn = rng.choice(letters, size=(self.n, 13))
            return np.char.add("dlc", drawn.view("U13").ravel())
        return np.cumsum(rng.integers(1, 4, size=self.n)) + 5_000_000


def dealt_queues(
    queues: Ints,
    types: Ints,
    batches: Ints,
    places: Ints,
    ceiling: Ints | None,
    rng: np.random.Generator,
    load: Floats | None = None,
) -> Ints:
    """Assign given queueing times to the jobs of each type, the longest where the load is highest.

    Args:
        queues: the queueing times in seconds, whose types are also given by `types`. Within a type,
            they may be in any order.
        types: the type of each job.
        batches: the batch number of each job.
        places: the index of each job within its batch, from 0.
        ceiling: the largest possible queueing time of each job. This is the job's duration if
            durations begin at submission (Kalos). None means no limit.
        rng: the random generator.
        load: the load of the cluster, or of the type's quota, when each job arrives; None if
            unknown.
    """
    count = int(batches.max()) + 1 if len(batches) else 0
    congestion = rng.normal(size=count)
    longest = np.bincount(batches, minlength=count)
    score = (
        0.9 * (congestion[batches] if load is None else _normal_ranks(load, types))
        + 0.4 * rng.normal(size=len(types))
        + 0.5 * places / longest[batches]
    )
    dealt = np.empty_like(queues)
    # Within each type, the jobs with the highest scores get the longest queue times.
    dealt[np.lexsort((score, types))] = queues[np.lexsort((queues, types))]
    if ceiling is not None:
        for type_ in np.unique(types).tolist():
            members = np.flatnonzero(types == type_)
            dealt[members] = _below(queues[members], score[members], ceiling[members])
    return dealt


def _normal_ranks(values: Floats, groups: Ints) -> Floats:
    """Replace the values of each group by their ranks, scaled to mean 0 and variance 1."""
    order = np.lexsort((values, groups))
    counts = np.bincount(groups)
    first = (np.cumsum(counts) - counts)[groups[order]]
    ranks = np.empty(len(values))
    ranks[order] = (np.arange(len(values)) - first + 0.5) / counts[groups[order]]
    return np.asarray((ranks - 0.5) * 12**0.5)


def _below(queues: Ints, score: Floats, ceiling: Ints) -> Ints:
    """Assign queueing times to jobs so that no job exceeds its ceiling.

    The longest time is assigned first. Each time goes to the job with the highest score among the
    jobs whose ceiling permits it. All times are assigned unchanged if that is possible. A time
    above all remaining ceilings is cut to the highest of these.
    """
    by_ceiling = np.argsort(-ceiling, kind="stable").tolist()
    ceilings, scores = ceiling.tolist(), score.tolist()
    fitting: list[tuple[float, int]] = []
    dealt, taken = np.empty_like(queues), 0
    for queue in np.sort(queues)[::-1].tolist():
        while taken < len(by_ceiling) and ceilings[by_ceiling[taken]] >= queue:
            heapq.heappush(fitting, (-scores[by_ceiling[taken]], by_ceiling[taken]))
            taken += 1
        if fitting:
            dealt[heapq.heappop(fitting)[1]] = queue
        else:
            dealt[by_ceiling[taken]] = ceilings[by_ceiling[taken]]
            taken += 1
    return dealt
