"""Track the nodes of a simulated job, its spares, and the nodes under repair.

Some nodes, called lemons, fail more often than others.
"""

from functools import lru_cache
from heapq import heappop, heappush

from holdfast.simulate.pretrain.causes import DAY_S, Cause
from holdfast.simulate.pretrain.scenario import Hardware
from holdfast.simulate.pretrain.streams import draws, exponential


@lru_cache(maxsize=32)
def _uniforms(seed: int, nodes: int) -> tuple[float, ...]:
    """Return the number that decides whether a node is a lemon, for each node.

    The result is kept: the scenarios of one comparison have the same seeds.
    """
    return tuple(draws(seed, "lemon", node).random() for node in range(nodes))


class RepairShop:
    """Repair nodes, first come, first served, as many at a time as there are technicians."""

    def __init__(self, technicians: int | None) -> None:
        self._free_at_s = [0.0] * (technicians or 0)
        self._back: list[tuple[float, int]] = []

    def take(self, node: int, now_s: float, work_s: float) -> float:
        """Accept a node for a repair of `work_s` seconds; return the time at which the repair ends."""
        begin_s = now_s
        if self._free_at_s:
            begin_s = max(now_s, heappop(self._free_at_s))
            heappush(self._free_at_s, begin_s + work_s)
        heappush(self._back, (begin_s + work_s, node))
        return begin_s + work_s

    def returned(self, now_s: float) -> list[int]:
        """Return the nodes whose repair has ended by `now_s`, in the order of the ends."""
        back = []
        while self._back and self._back[0][0] <= now_s:
            back.append(heappop(self._back)[1])
        return back

    @property
    def held(self) -> int:
        """The number of nodes that are under repair or wait for a repair."""
        return len(self._back)

    @property
    def next_s(self) -> float | None:
        """The time at which the next repair ends; None if no node is under repair."""
        return self._back[0][0] if self._back else None


class Fleet:
    """The nodes of a job, its spares, and the nodes under repair.

    Nodes have numbers. At first, the job has the nodes with the lowest numbers.
    """

    def __init__(self, nodes: int, hardware: Hardware, seed: int) -> None:
        self._hardware, self._seed = hardware, seed
        self.size = nodes
        self.job = list(range(nodes))
        self._place = {node: node for node in self.job}
        total = nodes + hardware.spares
        self.spares = list(range(total - 1, nodes - 1, -1))
        self.shop = RepairShop(hardware.technicians)
        self._lemons = {
            node
            for node, uniform in enumerate(_uniforms(seed, total) if hardware.lemons else ())
            if uniform < hardware.lemons
        }
        self._job_lemons = sorted(self._lemons & set(self.job))
        self._visits: dict[int, int] = {}
        self.broken: dict[int, Cause] = {}
        """The nodes of the job that will soon fail again, each with the cause."""
        self.most_held = 0

    @property
    def weight(self) -> float:
        """The sum over the nodes of the job of their relative failure rates; 1 for a normal node."""
        return len(self.job) + len(self._job_lemons) * (self._hardware.lemon_factor - 1)

    def mean_factor(self) -> float:
        """Return the factor by which lemons and heat waves raise the mean failure rate of a node."""
        hot = self._hardware
        heat = 1.0
        if hot.heat_every_days:
            heat += (hot.heat_factor - 1) * hot.heat_days / (hot.heat_days + hot.heat_every_days)
        return (1 + hot.lemons * (hot.lemon_factor - 1)) * heat

    def culprit(self, uniform: float) -> int:
        """Return the node of the job that a failure struck, at the quantile `uniform` (0 to 1)."""
        lemons = self._job_lemons
        at = uniform * self.weight
        heavy = len(lemons) * self._hardware.lemon_factor
        if at < heavy:
            return lemons[min(int(at / self._hardware.lemon_factor), len(lemons) - 1)]
        place = int((at - heavy) / max(self.weight - heavy, 1e-9) * len(self.job))
        for offset in range(len(self.job)):
            node = self.job[(place + offset) % len(self.job)]
            if node not in self._lemons:
                return node
        return self.job[0]

    def take_out(self, node: int, now_s: float) -> None:
        """Send a node of the job to the repair shop."""
        place = self._place.pop(node)
        last = self.job.pop()
        if last != node:
            self.job[place] = last
            self._place[last] = place
        self.broken.pop(node, None)
        if node in self._lemons:
            self._job_lemons.remove(node)
        visit = self._visits[node] = self._visits.get(node, 0) + 1
        draw = draws(self._seed, f"repair {node}", visit)
        is_long, length, vain = draw.random(), draw.random(), draw.random()
        hardware = self._hardware
        work_s = exponential(length, hardware.repair_s)
        if is_long < hardware.long_repairs:
            work_s += exponential(draw.random(), hardware.long_repair_s)
        if vain >= hardware.in_vain:
            self._lemons.discard(node)
        self.shop.take(node, now_s, work_s)
        self.most_held = max(self.most_held, self.shop.held)

    def fill(self, now_s: float) -> float | None:
        """Replace missing nodes of the job by spares.

        Returns:
            None if no node is missing now; else the time at which the next repair ends.
        """
        self.spares += self.shop.returned(now_s)
        while len(self.job) < self.size and self.spares:
            self._join(self.spares.pop())
        return None if len(self.job) == self.size else self.shop.next_s

    def _join(self, node: int) -> None:
        self._place[node] = len(self.job)
        self.job.append(node)
        if node in self._lemons:
            self._job_lemons.append(node)
            self._job_lemons.sort()


class Heat:
    """Heat waves, during which hardware fails more often."""

    def __init__(self, hardware: Hardware, seed: int) -> None:
        self._hardware, self._seed = hardware, seed
        self._waves: list[tuple[float, float]] = []

    def at(self, now_s: float) -> tuple[float, float]:
        """Return the factor on the failure rate at `now_s`, and the time at which it changes."""
        hot = self._hardware
        if not hot.heat_every_days or hot.heat_factor == 1.0:
            return 1.0, float("inf")
        while not self._waves or self._waves[-1][1] <= now_s:
            since_s = self._waves[-1][1] if self._waves else 0.0
            uniform = draws(self._seed, "heat", len(self._waves)).random()
            begin_s = since_s + exponential(uniform, hot.heat_every_days * DAY_S)
            self._waves.append((begin_s, begin_s + hot.heat_days * DAY_S))
        begin_s, end_s = self._waves[-1]
        return (1.0, begin_s) if now_s < begin_s else (hot.heat_factor, end_s)
