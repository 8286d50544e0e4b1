"""Make routine output of healthy jobs, recovered errors, and last lines of peers."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from failure_lab.routines import CASCADE, LIBRARY, NOISE, RECOVERED


class _Values(Mapping[str, Any]):
    """The values of a line's template, drawn on access."""

    def __init__(self, draw: random.Random, step: int) -> None:
        rank, second = draw.randrange(64), 3 * step
        self._make: Mapping[str, Callable[[], Any]] = {
            "step": lambda: step,
            "samples": lambda: step * 1024,
            "rank": lambda: rank,
            "peer": lambda: (rank + 8) % 64,
            "local": lambda: rank % 8,
            "node": lambda: f"node{rank // 8 + 1:02d}",
            "date": lambda: "2026-03-14",
            "clock": lambda: f"{2 + second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}",
            "loss": lambda: f"{2.2 + 6 / (step + 4) + draw.random() / 20:.4f}",
            "ms": lambda: f"{3100 + 60 * draw.random():.1f}",
            "digit": lambda: draw.randrange(10),
            "small": lambda: draw.randrange(10, 100),
            "micro": lambda: draw.randrange(10**6),
            "pid": lambda: draw.randrange(2000, 99_000),
            "tid": lambda: draw.randrange(2000, 99_000),
        }

    def __getitem__(self, name: str) -> Any:
        return self._make[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._make)

    def __len__(self) -> int:
        return len(self._make)


def routine(trainer: str, draw: random.Random, lines: int, first_step: int = 1) -> list[str]:
    """Return about `lines` lines of a healthy job of `trainer`, with 2 to 5 recovered errors."""
    noise = NOISE[trainer]
    text = [_filled(template, draw, first_step) for template in noise.start]
    troubles = sorted(draw.uniform(0.1, 0.8) for _ in range(draw.randint(2, 5)))
    step = first_step
    while len(text) < lines:
        if troubles and len(text) > troubles[0] * lines:
            troubles.pop(0)
            text += _group(draw.choice(noise.recovered + RECOVERED), draw, step)
        text.append(_filled(noise.step, draw, step))
        text += [
            _filled(draw.choice(noise.chatter + LIBRARY), draw, step)
            for _ in range(draw.randrange(4))
        ]
        step += 1
    return text


def cascade(draw: random.Random, step: int, groups: int = 6) -> list[str]:
    """Return the last lines of several peers as the job of step `step` goes down."""
    return [line for _ in range(groups) for line in _group(draw.choice(CASCADE), draw, step)]


def _group(templates: tuple[str, ...], draw: random.Random, step: int) -> list[str]:
    values = _Values(draw, step)  # one rank and node for all lines of a group
    return [template.format_map(values) for template in templates]


def _filled(template: str, draw: random.Random, step: int) -> str:
    return template.format_map(_Values(draw, step))
