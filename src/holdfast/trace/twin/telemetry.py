"""Draw telemetry for a twin: wide CSVs of 15-second samples that have the published curves.

Each GPU has a hidden variable that describes its work. The work is constant during each phase of a
job, apart from small changes. Each value of a metric is a quantile of the metric's published curve.
The rank of the quantile is the rank of the GPU's work among all samples, with some noise. The
metrics of a GPU therefore change together, and each metric has its published curve. Utilisation, SM
activity, tensor activity and power are idle in the same samples, because a GPU without utilisation
draws idle power. Temperatures follow the work with a lag.

As in AcmeTrace's release, jobs and telemetry cannot be joined.
"""

import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import BadUse
from holdfast.trace.twin.model import Calibration, Column, Floats
from holdfast.trace.twin.writing import time_texts, whole_file

SAMPLE_S: Final = 15
"""Seconds between samples; Prometheus' scrapes have the same interval."""

_PHASE_S: Final = 5400.0
"""Mean seconds of a phase, which is a job or the gap after a job."""
_WANDER_S: Final = 300.0
"""Time constant of the small changes within a phase, in seconds."""


def ranked(values: Floats) -> Floats:
    """Return each value's rank among all values, scaled to (0, 1); ties rank by position."""
    flat = values.ravel()
    ranks = np.empty(len(flat))
    ranks[np.argsort(flat, kind="stable")] = (np.arange(len(flat)) + 0.5) / len(flat)
    return ranks.reshape(values.shape)


class Latents:
    """Draw the hidden variables, one block of samples after another.

    A phase is a period of work of about one length; phases continue from one block to the next. In
    two thirds of the phases, all eight GPUs of a node do the same work, as if one job used the
    whole node. In the other phases, each GPU has work of its own.
    """

    def __init__(self, nodes: int, cpu_nodes: int, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes = nodes
        self.own = rng.normal(size=8 * nodes)
        self.shared = rng.normal(size=nodes)
        self.whole = rng.random(nodes) < 2 / 3
        self.wander = rng.normal(size=8 * nodes)
        self.cpu = rng.normal(size=cpu_nodes)
        self.inlet = rng.normal(size=nodes)
        self.warm: Floats | None = None

    def block(self, count: int) -> tuple[Floats, Floats, Floats]:
        """Draw the next `count` samples of the work.

        Returns:
            The work, of shapes (samples, GPUs), (samples, nodes) and (samples, CPU nodes).
        """
        rng = self.rng
        work = np.empty((count, 8 * self.nodes))
        cpu = np.empty((count, len(self.cpu)))
        change = SAMPLE_S / _PHASE_S
        keep = np.exp(-SAMPLE_S / _WANDER_S)
        for sample in range(count):
            ended = rng.random(self.nodes) < change
            if ended.any():
                self.shared[ended] = rng.normal(size=int(ended.sum()))
                self.whole[ended] = rng.random(int(ended.sum())) < 2 / 3
            alone = rng.random(8 * self.nodes) < change
            if alone.any():
                self.own[alone] = rng.normal(size=int(alone.sum()))
            self.wander = keep * self.wander + np.sqrt(1 - keep**2) * rng.normal(
                size=8 * self.nodes
            )
            self.cpu = 0.995 * self.cpu + 0.0999 * rng.normal(size=len(self.cpu))
            base = np.where(np.repeat(self.whole, 8), np.repeat(self.shared, 8), self.own)
            work[sample] = base + 0.12 * self.wander
            cpu[sample] = self.cpu
        by_node = work.reshape(count, self.nodes, 8).mean(axis=2)
        return work, by_node, cpu

    def noise(self, count: int, devices: int) -> Floats:
        """Draw the noise of one metric, which is correlated in time over about a minute."""
        noise = self.rng.normal(size=(count, devices))
        keep = np.exp(-SAMPLE_S / 60.0)
        for sample in range(1, count):
            noise[sample] = keep * noise[sample - 1] + np.sqrt(1 - keep**2) * noise[sample]
        return noise

    def slow(self, shape: tuple[int, ...]) -> Floats:
        """Draw a value for each device that drifts slowly over the block.

        The value models memory that is in use independently of the work.
        """
        count, devices = shape
        ends = self.rng.normal(size=(2, devices))
        return np.asarray(ends[0] + np.linspace(0, 1, count)[:, None] * (ends[1] - ends[0]))

    def warmth(self, work: Floats, times_s: npt.NDArray[np.float64]) -> Floats:
        """Return the work with a lag of two minutes, plus offsets by node and time of day."""
        warm = np.empty_like(work)
        now = work[0] if self.warm is None else self.warm
        part = SAMPLE_S / 120
        for sample in range(len(work)):
            now = now + part * (work[sample] - now)
            warm[sample] = now
        self.warm = now
        hour = times_s / 3600 % 24 + 8
        day = 0.15 * np.cos(2 * np.pi * (hour - 15) / 24)
        return np.asarray(warm + 0.2 * np.repeat(self.inlet, 8)[None, :] + day[:, None])


_ZONE: Final = "+08:00"
_START: Final = "2023-08-01 00:00:00"
"""Default start, because the published temperatures and power are from August."""

_FRAME_MIB: Final = 81920
_USABLE_MIB: Final = 81248
"""The most memory in use in a published sample, in MiB: 99.18% of 80 GB."""

_BLOCK_VALUES: Final = 2_000_000
"""Number of values in a block, samples times GPUs. Every block has the published curves."""

_XID_HOURS: Final = 376.5
"""Hours in which Kalos had 852 onsets, from 15 to 31 August 2023.

Source: jcmiller/hackathon-datacenter-agent.
"""
_XID_CODES: Final = {43: 794, 31: 55, 94: 2, 45: 1}
_XID_BURSTS: Final = 8
_XID_SINGLES: Final = 19
"""Number of small events, each ended by a pause of five minutes.

Eight events have 50 to 116 GPUs (`_XID_BURSTS`), and 19 events have 1 to 13 GPUs.
"""
_XID_NODES: Final = 71 / 293
"""Share of the nodes that have an onset in a burst; such a node has 1.5 onsets on average."""
_XID_GPUS: Final = 1.5 / 8
_XID_SPREAD_S: Final = 120.0
"""Approximate seconds between the first and the last onset of a burst (chosen)."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Hold a published cumulative curve: values, and the share of samples at or below each."""

    values: Floats
    parts: Floats
    steps: bool

    def at(self, ranks: Floats) -> Floats:
        """Return the quantile at each rank, where ranks are in (0, 1)."""
        if self.steps:
            return np.asarray(
                self.values[np.minimum(np.searchsorted(self.parts, ranks), len(self.values) - 1)]
            )
        return np.interp(ranks, self.parts, self.values)

    @property
    def idle(self) -> float:
        """Return the share of the samples that have the lowest value."""
        return float(self.parts[self.values == self.values[0]].max())


def curves(cluster: str) -> dict[str, Curve]:
    """Return the published curves of a cluster, by the name of the metric's file.

    Raises:
        BadUse: no telemetry of the cluster was published.
    """
    path = (
        resources.files("holdfast.trace.twin")
        .joinpath("tables")
        .joinpath(f"{cluster}_telemetry.toml")
    )
    if not path.is_file():
        message = (
            f"The twin has no telemetry of {cluster!r}: only that of seren and kalos was published. "
            "Write telemetry with the calibration of one of these."
        )
        raise BadUse(message)
    tables: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    found = {}
    for name, table in tables.items():
        points = np.array(table["curve"], dtype=float)
        found[name] = Curve(
            values=points[:, 0], parts=points[:, 1] / 100, steps=table.get("steps", False)
        )
    return found


def write_telemetry(
    calibration: Calibration,
    folder: Path | str,
    *,
    samples: int,
    seed: int = 0,
    gpus: int = 64,
    start: str = _START,
) -> None:
    """Write `<METRIC>.csv` files in AcmeTrace's form into a folder; equal seeds give equal files.

    Args:
        calibration: the calibration of `seren` or `kalos`.
        folder: the folder; created if it does not exist.
        samples: the number of rows in each file, 15 seconds apart.
        seed: the seed of all random draws.
        gpus: the number of GPUs, with eight per node; a part of a node counts as a whole node.
        start: the local time (+08:00) of the first sample. Temperatures are as in August; in other
            months, they are lower depending on the season.

    Raises:
        BadUse: the cluster has no telemetry, or a size is not positive.
        OSError: a file cannot be written; no file of this call is left.
    """
    if samples < 1 or gpus < 1:
        message = (
            f"Telemetry of {samples} samples and {gpus} GPUs is empty. Give 1 or more of each."
        )
        raise BadUse(message)
    known = curves(calibration.cluster)
    try:
        first_s = datetime.fromisoformat(f"{start}{_ZONE}").astimezone(UTC).timestamp()
    except ValueError as error:
        message = f"{start!r} is not a time. Write it like {_START}."
        raise BadUse(message) from error
    folder = Path(folder)
    nodes = -(-gpus // 8)
    rng = np.random.default_rng([seed, 100])
    addresses = _addresses(nodes, rng)
    of_gpus = [f"{address}-{index}" for address in addresses for index in range(8)]
    of_cpu_nodes = _addresses(max(nodes // 4, 1), rng)
    (folder / "ipmi" if "GPU_AB_Power" in known else folder).mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        opened = {}
        for first in range(0, samples, max(_BLOCK_VALUES // len(of_gpus), 1)):
            if not first:
                latents = Latents(nodes, len(of_cpu_nodes), rng)
                codes = np.zeros(len(of_gpus), dtype=np.int64)
            count = min(max(_BLOCK_VALUES // len(of_gpus), 1), samples - first)
            times_s = first_s + SAMPLE_S * np.arange(first, first + count, dtype=np.float64)
            texts = time_texts(times_s, _ZONE)
            xids = _xids(codes, count, rng)
            codes = xids[-1]
            for name, values in _metrics(known, latents, count, times_s, xids, rng):
                if name not in opened:
                    devices = {"GPU_AB_Power": addresses, "CPU_D_Power": of_cpu_nodes}.get(
                        name, addresses if name.startswith("NODE_") else of_gpus
                    )
                    path = folder / ("ipmi" if name.endswith("_Power") else "") / f"{name}.csv"
                    opened[name] = files.enter_context(whole_file(path))
                    opened[name].write(",".join(["Time", *devices]) + "\n")
                rows = (
                    ",".join([time, *map(str, row)])
                    for time, row in zip(texts.tolist(), values.tolist(), strict=True)
                )
                opened[name].write("\n".join(rows) + "\n")


def _metrics(
    known: dict[str, Curve],
    latents: Latents,
    count: int,
    times_s: Floats,
    xids: Column,
    rng: np.random.Generator,
) -> Iterator[tuple[str, Any]]:
    """Yield each metric's name and its values, of shape (samples, devices)."""
    work, by_node, cpu_nodes = latents.block(count)
    idle = known["GPU_UTIL"].idle
    order = ranked(work)

    def together(name: str, blur: float) -> Floats:
        """Return the values of a metric that follow the work, and are idle in the same samples."""
        ranks = ranked(work + blur * latents.noise(count, work.shape[1]))
        busy = order > idle
        again = np.empty_like(order)
        share = 1 - busy.mean()
        again[~busy] = ranked(ranks[~busy]) * share
        again[busy] = share + ranked(ranks[busy]) * (1 - share)
        return known[name].at(again)

    yield "GPU_UTIL", known["GPU_UTIL"].at(order).astype(np.int64)
    # Percent, as in the released data; DCGM itself reports a number from 0 to 1.
    sm = together("SM_ACTIVE", 0.15)
    yield "SM_ACTIVE", np.round(sm, 3)
    yield "PIPE_TENSOR_ACTIVE", np.round(together("PIPE_TENSOR_ACTIVE", 0.2), 3)
    # No curve of memory traffic is published: half of the SM activity is usual for training.
    yield "DRAM_ACTIVE", np.round(sm * (0.45 + 0.1 * rng.random(sm.shape)), 3)
    yield "POWER_USAGE", np.round(together("POWER_USAGE", 0.2), 1)
    used = np.rint(
        known["FB_USED"].at(ranked(work + 0.35 * latents.slow(work.shape))) / 100 * _FRAME_MIB
    )
    yield "FB_USED", used.astype(np.int64)
    yield "FB_FREE", np.maximum(_USABLE_MIB - used, 0).astype(np.int64)
    warm = latents.warmth(work, times_s)
    season = _season_c(times_s)[:, None]
    yield "GPU_TEMP", np.rint(known["GPU_TEMP"].at(ranked(warm)) - season).astype(np.int64)
    memory_warm = warm + 0.1 * latents.slow(work.shape)
    yield (
        "MEMORY_TEMP",
        np.rint(known["MEMORY_TEMP"].at(ranked(memory_warm)) - season).astype(np.int64),
    )
    yield "XID_ERRORS", xids

    def of_nodes(name: str, blur: float) -> Floats:
        return known[name].at(ranked(by_node + blur * latents.noise(count, by_node.shape[1])))

    yield "NODE_CPU_UTILIZATION", np.round(of_nodes("NODE_CPU_UTILIZATION", 0.5), 3)
    memory = known["NODE_MEMORY_UTILIZATION"].at(
        ranked(by_node + 0.6 * latents.slow(by_node.shape))
    )
    yield "NODE_MEMORY_UTILIZATION", np.round(memory, 3)
    if "NODE_IB_SEND" in known:
        sent = by_node + 0.4 * latents.noise(count, by_node.shape[1])
        yield "NODE_IB_SEND", np.round(known["NODE_IB_SEND"].at(ranked(sent)), 3)
        received = sent + 0.05 * latents.noise(count, by_node.shape[1])
        yield "NODE_IB_RECEIVE", np.round(known["NODE_IB_RECEIVE"].at(ranked(received)), 3)
    if "GPU_AB_Power" in known:
        yield "GPU_AB_Power", np.rint(of_nodes("GPU_AB_Power", 0.15)).astype(np.int64)
        yield "CPU_D_Power", np.rint(known["CPU_D_Power"].at(ranked(cpu_nodes))).astype(np.int64)


def _season_c(times_s: Floats) -> Floats:
    """Return the temperature's difference to August in degrees, positive if it is lower.

    The temperature of the machine room follows the year by a few degrees, with its maximum at the
    end of July.
    """
    day = times_s / 86400 % 365.2425 - 208
    warmth = 3.0 * np.cos(2 * np.pi * day / 365.2425)
    august = 3.0 * np.cos(2 * np.pi * 20 / 365.2425)
    return np.asarray(np.round(august - warmth))


def _xids(codes: Any, count: int, rng: np.random.Generator) -> Any:
    """Return the last Xid of each GPU at each sample, of shape (samples, GPUs); 0 before the first.

    As in DCGM, the last code is kept until another one occurs.
    """
    latched = np.tile(codes, (count, 1))
    for sample, gpu, code in xid_onsets(len(codes), count, rng):
        latched[sample:, gpu] = code
    return latched


def xid_onsets(gpus: int, samples: int, rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """Draw the onsets of Xid errors, in order of time: sample, GPU and code of each.

    As in Kalos, most onsets come in bursts over a quarter of the nodes, and most are caused by
    applications (Xid 43).

    Args:
        gpus: the number of GPUs, with eight per node.
        samples: the number of samples, 15 seconds apart.
        rng: the random generator.
    """
    hours = samples * SAMPLE_S / 3600
    numbers, shares = np.array(list(_XID_CODES)), np.array(list(_XID_CODES.values()), dtype=float)
    hits: list[tuple[int, int]] = []
    bursts, singles = (
        rng.integers(samples, size=rng.poisson(number * hours / _XID_HOURS)).tolist()
        for number in (_XID_BURSTS, _XID_SINGLES)
    )
    for sample in bursts:
        on = np.repeat(rng.random(-(-gpus // 8)) < _XID_NODES, 8)[:gpus]
        on &= rng.random(gpus) < _XID_GPUS
        late = rng.integers(int(_XID_SPREAD_S / SAMPLE_S), size=gpus)
        hits += [(sample + int(late[gpu]), gpu) for gpu in np.flatnonzero(on).tolist()]
    hits += [(sample, int(rng.integers(gpus))) for sample in singles]
    drawn = rng.choice(numbers, size=len(hits), p=shares / shares.sum()).tolist()
    return [(sample, gpu, code) for (sample, gpu), code in zip(sorted(hits), drawn, strict=True)]


def _addresses(count: int, rng: np.random.Generator) -> list[str]:
    drawn = rng.choice(16 * 253, size=count, replace=False)
    return [f"10.140.{number // 253}.{number % 253 + 1}" for number in np.sort(drawn).tolist()]
