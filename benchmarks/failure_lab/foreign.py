"""Put a recorded failure into the output of a job on another stack, as routine noise.

The lines are those of `foreign_lines`. Health chatter surrounds the failure, with errors that the
job survives. The last lines of the peers stand before or after the failure. Every line has the
prefix of one launcher. The same seed gives the same log.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from failure_lab.foreign_lines import CHATTER, DOWN, PREFIXES, PROGRESS, START, SURVIVED

LINES: Final = 900
WORLD: Final = 64
_AFTER: Final = 60
_DOWN_GROUPS: Final = 8
_RANK = re.compile(r"(?i)\brank[ :=\[]{0,2}(\d+)")


@dataclass(frozen=True, slots=True)
class Made:
    """A line, and its number in the failure's own log; 0 for the noise."""

    text: str
    origin: int = 0


@dataclass(kw_only=True)
class _Job:
    """The job whose output is invented."""

    draw: random.Random
    prefix: str
    loop: str
    step: int
    at_s: float = 7200.0
    hosts: tuple[str, ...] = field(default=())

    def filled(self, template: str, rank: int | None = None) -> str:
        """Return `template` with its values; with `rank`, that rank's values."""
        return template.format_map(self.values(rank))

    def values(self, rank: int | None) -> dict[str, Any]:
        """Return the values of one line."""
        draw = self.draw
        rank = draw.randrange(WORLD) if rank is None else rank
        second = int(self.at_s)
        return {
            "step": self.step,
            "loss": f"{1.9 + 5 / (self.step / 50 + 4) + draw.random() / 30:.4f}",
            "n": draw.randrange(11, 99),
            "m": draw.randrange(11, 99),
            "big": draw.randrange(10_000, 99_999),
            "ms": draw.randrange(120, 990),
            "milli": f"{draw.randrange(1000):03d}",
            "micro": f"{draw.randrange(10**6):06d}",
            "pid": draw.randrange(300, 30_000),
            "port": draw.randrange(20_000, 60_000),
            "world": WORLD,
            "rank": rank,
            "peer": (rank + 5) % WORLD,
            "local": rank % 8,
            "node": rank // 8,
            "host": self.hosts[rank // 8 % len(self.hosts)],
            "suffix": "x7k2p",
            "date": "2026-05-19",
            "short": "26/05/19",
            "month": "05",
            "day": "19",
            "clock": f"{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}",
        }

    def printed(self, text: str, origin: int = 0) -> Made:
        """Return `text` as the launcher prints it."""
        self.at_s += self.draw.random() / 2
        named = _RANK.search(text)
        rank = int(named[1]) % WORLD if named else None
        return Made(self.filled(self.prefix, rank) + text, origin)

    def group(self, templates: Sequence[str]) -> list[Made]:
        """Return lines of one rank that belong together."""
        rank = self.draw.randrange(WORLD)
        values = self.values(rank)
        return [self.printed(template.format_map(values)) for template in templates]


def surround(failure: Sequence[str], seed: str, *, cascade_first: bool) -> list[Made]:
    """Return `failure`, the lines of a failed job, within the output of a job of another make.

    Args:
        failure: the lines, without line feeds.
        seed: names the log; equal seeds give equal logs.
        cascade_first: the peers' last lines stand before the failure, else after it.
    """
    draw = random.Random(f"foreign/{seed}")
    job = _Job(
        draw=draw,
        prefix=draw.choice(PREFIXES),
        loop=draw.choice(PROGRESS),
        step=draw.randrange(2000, 60_000),
        hosts=tuple(f"{draw.choice(('abra', 'kilo', 'oslo'))}{draw.randrange(100, 999)}" for _ in range(8)),
    )  # fmt: skip
    made = [job.printed(job.filled(template)) for template in START]
    troubles = sorted(draw.uniform(0.05, 0.85) for _ in range(draw.randint(4, 8)))
    while len(made) < LINES:
        if troubles and len(made) > troubles[0] * LINES:
            troubles.pop(0)
            made += job.group(draw.choice(SURVIVED))
        job.step += 1
        made.append(job.printed(job.filled(job.loop)))
        made += [job.printed(job.filled(draw.choice(CHATTER))) for _ in range(draw.randrange(5))]
    down = [line for _ in range(_DOWN_GROUPS) for line in job.group(draw.choice(DOWN))]
    own = [job.printed(text, number) for number, text in enumerate(failure, 1)]
    made += [*down, *own] if cascade_first else [*own, *down]
    return made + [job.printed(job.filled(draw.choice(CHATTER))) for _ in range(_AFTER)]
