"""The latents behind the telemetry: how hard each GPU and node works, sample by sample."""

from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.trace.twin.model import Floats

SAMPLE_S: Final = 15
"""Between samples, as Prometheus scraped them."""

_PHASE_S: Final = 5400.0
"""Mean length of a phase: a job, or the gap after it."""
_WANDER_S: Final = 300.0
"""Memory of the wandering within a phase."""


def ranked(values: Floats) -> Floats:
    """The rank of each value among all, in (0, 1); ties by position."""
    flat = values.ravel()
    ranks = np.empty(len(flat))
    ranks[np.argsort(flat, kind="stable")] = (np.arange(len(flat)) + 0.5) / len(flat)
    return ranks.reshape(values.shape)


class Latents:
    """Draws block after block; phases and wandering go on from one block to the next.

    A phase holds a node's eight GPUs together two times out of three (a job of whole nodes), else each on its own.
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
        """(samples, GPUs), (samples, nodes) and (samples, CPU nodes) of the next `count` samples."""
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
        """What sets one metric apart from the work: it forgets within minutes."""
        noise = self.rng.normal(size=(count, devices))
        keep = np.exp(-SAMPLE_S / 60.0)
        for sample in range(1, count):
            noise[sample] = keep * noise[sample - 1] + np.sqrt(1 - keep**2) * noise[sample]
        return noise

    def slow(self, shape: tuple[int, ...]) -> Floats:
        """A constant of each device and a drift over the block: how much a job keeps in memory beside its work."""
        count, devices = shape
        ends = self.rng.normal(size=(2, devices))
        return np.asarray(ends[0] + np.linspace(0, 1, count)[:, None] * (ends[1] - ends[0]))

    def warmth(self, work: Floats, times_s: npt.NDArray[np.float64]) -> Floats:
        """The work with a lag of two minutes, the place in the machine room, and the time of day."""
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
