"""Sort nodes into buckets by their number of free GPUs, to place a job without a search."""

from collections.abc import Sequence
from typing import Final

Placement = list[tuple[int, int]]
"""Pairs of a node and the number of GPUs that the job holds on the node."""


class Nodes:
    """Equal nodes in groups; each group has a bucket for every number of free GPUs.

    A job takes as many whole nodes as it can fill. The remaining GPUs come from the fullest node
    that has enough free GPUs (best fit).
    """

    __slots__ = ("_at", "buckets", "free", "group", "per")

    def __init__(self, sizes: Sequence[int], per: int) -> None:
        """Create nodes that are all free.

        Args:
            sizes: the number of nodes in each group.
            per: the number of GPUs per node.
        """
        self.per: Final = per
        self.free = [per] * sum(sizes)
        self.group: list[int] = []
        self.buckets: list[list[list[int]]] = []
        self._at: list[int] = []
        for number, size in enumerate(sizes):
            rows: list[list[int]] = [[] for _ in range(per + 1)]
            first = len(self.group)
            rows[per] = list(range(first, first + size))
            self._at += range(size)
            self.group += [number] * size
            self.buckets.append(rows)

    def _remove(self, node: int) -> None:
        row = self.buckets[self.group[node]][self.free[node]]
        at, last = self._at[node], row.pop()
        if last != node:
            row[at] = last
            self._at[last] = at

    def _add(self, node: int) -> None:
        row = self.buckets[self.group[node]][self.free[node]]
        self._at[node] = len(row)
        row.append(node)

    def change(self, node: int, gpus: int) -> None:
        """Free `gpus` GPUs of a node; a negative number takes GPUs."""
        self._remove(node)
        self.free[node] += gpus
        self._add(node)

    def move(self, node: int, group: int) -> None:
        """Put a node into another group."""
        self._remove(node)
        self.group[node] = group
        self._add(node)

    def whole(self, groups: Sequence[int]) -> int:
        """Return the number of entirely free nodes in the groups."""
        return sum(len(self.buckets[group][self.per]) for group in groups)

    def partly(self, groups: Sequence[int], least: int) -> int | None:
        """Return the fullest partly used node with at least `least` free GPUs, or None."""
        for free in range(least, self.per):
            for group in groups:
                if row := self.buckets[group][free]:
                    return row[-1]
        return None

    def fits(self, groups: Sequence[int], gpus: int) -> bool:
        """Return True if a job of `gpus` GPUs fits into the groups now."""
        full, rest = divmod(gpus, self.per)
        spare = self.whole(groups) - full
        if spare < 0:
            return False
        return not rest or spare > 0 or self.partly(groups, rest) is not None

    def find(self, groups: Sequence[int], gpus: int) -> Placement | None:
        """Return a placement for a job of `gpus` GPUs, or None; the call itself takes no GPU."""
        full, rest = divmod(gpus, self.per)
        if self.whole(groups) < full:
            return None
        found: Placement = []
        if rest and (node := self.partly(groups, rest)) is not None:
            found.append((node, rest))
            rest = 0
        wanted = full + (1 if rest else 0)
        if not wanted:
            return found
        picked: list[int] = []
        for group in groups:
            row = self.buckets[group][self.per]
            picked += row[max(0, len(row) - (wanted - len(picked))) :]
            if len(picked) == wanted:
                break
        if len(picked) < wanted:
            return None
        found += [(node, self.per) for node in picked[:full]]
        if rest:
            found.append((picked[full], rest))
        return found
