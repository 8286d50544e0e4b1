"""Raw score to share of right answers: isotonic regression; its steps for `holdfast.diagnose.explain.answer`."""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Steps = Sequence[tuple[float, float]]
LEAST_SAMPLES = 12
"""A step that fewer answers stand for is joined with its neighbour."""
LEAST_RISE = 0.001
"""Of each step over the one before: a level stretch could not be undone by `raw_of`."""


@dataclass
class _Block:
    score: float
    """The sum of the raw scores."""
    right: float
    size: int

    @property
    def share(self) -> float:
        """Of right answers, drawn to one half as if two more had been seen, one of them right (Laplace)."""
        return (self.right + 1) / (self.size + 2)


def steps_of(said: Iterable[tuple[float, bool]]) -> tuple[tuple[float, float], ...]:
    """The steps from raw scores and whether each answer was right: isotonic regression by pooling adjacent violators.

    Both columns rise strictly from the raw score 0 to 1. Source: Zadrozny and Elkan, "Transforming Classifier Scores
    into Accurate Multiclass Probability Estimates", KDD 2002.
    """
    blocks: list[_Block] = []
    for score, group in _grouped(said):
        blocks.append(_Block(score * len(group), sum(group), len(group)))
        while len(blocks) > 1 and (
            blocks[-2].right / blocks[-2].size >= blocks[-1].right / blocks[-1].size
            or blocks[-2].size < LEAST_SAMPLES
        ):
            last = blocks.pop()
            blocks[-1].score += last.score
            blocks[-1].right += last.right
            blocks[-1].size += last.size
    if len(blocks) > 1 and blocks[-1].size < LEAST_SAMPLES:
        last = blocks.pop()
        blocks[-1] = _Block(
            blocks[-1].score + last.score,
            blocks[-1].right + last.right,
            blocks[-1].size + last.size,
        )
    return _strict([(block.score / block.size, block.share) for block in blocks])


def _grouped(said: Iterable[tuple[float, bool]]) -> list[tuple[float, list[bool]]]:
    groups: dict[float, list[bool]] = {}
    for score, right in sorted(said):
        groups.setdefault(round(score, 4), []).append(right)
    return sorted(groups.items())


def _strict(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """From 0 to 1, both columns rising; beyond the outer points the share stays what it is there."""
    if not points:
        return ((0.0, 0.0), (1.0, 1.0))
    inner = [point for point in points if 0 < point[0] < 1]
    low = points[0][1] if points[0][0] == 0 else points[0][1] - LEAST_RISE
    steps = [(0.0, max(0.0, low))]
    for score, share in [*inner, (1.0, points[-1][1])]:
        steps.append((round(score, 4), round(max(share, steps[-1][1] + LEAST_RISE), 4)))
    return tuple((score, min(1.0, share)) for score, share in steps)


def by_steps(score: float, steps: Steps) -> float:
    """The share that `steps` give a raw score: as `holdfast.diagnose.explain.answer.calibrated`."""
    return _between(score, [raw for raw, _ in steps], [share for _, share in steps])


def raw_of(confidence: float, steps: Steps) -> float:
    """The raw score that `steps` made `confidence` of."""
    return _between(confidence, [share for _, share in steps], [raw for raw, _ in steps])


def _between(value: float, known: Sequence[float], wanted: Sequence[float]) -> float:
    at = min(max(value, known[0]), known[-1])
    right = min(max(bisect.bisect_right(known, at), 1), len(known) - 1)
    part = (at - known[right - 1]) / (known[right] - known[right - 1])
    return wanted[right - 1] + part * (wanted[right] - wanted[right - 1])
