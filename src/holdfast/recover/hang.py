"""Finds a job that stands still, and the rank to blame. Pure: told what happened and when, asked now and then.

A rank is silent since its last step or the end of its last section (save, restore, evaluate). The limit is
`factor` times the recent median step time, at least `floor_s`; a section has a limit of its own, and so has the
time before an attempt's first step, when ranks compile and load. While any rank is in a section, the others'
silence is waiting for it and counts for nothing: a false alarm costs more than a late one.

What singles out the frozen rank, strongest first: the kernel says that its process is stopped or stuck; it is
behind the others, which wait for it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

RECENT_STEPS = 64
STOPPED_STATES = {"stopped": "T", "tracing-stop": "t"}
STUCK_STATES = {"disk-sleep": "D"}
"""psutil's names of process states, and their letters in /proc/PID/stat (proc(5))."""


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """When silence is a hang; all in seconds but the factor."""

    factor: float = 10.0
    floor_s: float = 60.0
    first_step_s: float = 1800.0
    section_s: float = 900.0


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A job that stands still."""

    waited_s: float
    limit_s: float
    rank: int | None
    """The rank to blame; None where none stands out."""
    state: str | None = None
    """The letter of that rank's process state, where that told it apart."""
    behind_at_step: int | None = None
    """The last step of that rank, where being behind told it apart."""


@dataclass(kw_only=True)
class _Rank:
    last_step: int | None = None
    last_sign_s: float
    section_limit_s: float | None = None
    """None outside sections."""
    stopped_since_s: float | None = None
    done: bool = False


class HangDetector:
    """Watches the ranks of one attempt. Times are monotonic seconds of one clock."""

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._ranks: dict[int, _Rank] = {}
        self._step_s: deque[float] = deque(maxlen=RECENT_STEPS)

    def attached(self, rank: int, now_s: float) -> None:
        """A rank reported for the first time."""
        self._ranks[rank] = _Rank(last_sign_s=now_s)

    def stepped(self, rank: int, step: int, step_s: float, now_s: float) -> None:
        """A rank completed a step that took `step_s`."""
        seen = self._ranks[rank]
        if seen.last_step is not None:  # the first step is mostly warm-up
            self._step_s.append(step_s)
        seen.last_step, seen.last_sign_s = step, now_s

    def section(self, rank: int, now_s: float, *, is_open: bool, limit_s: float | None) -> None:
        """A rank entered or left a section."""
        seen = self._ranks[rank]
        seen.section_limit_s = (limit_s or self._limits.section_s) if is_open else None
        # The others may have waited for this rank: from here on their silence is their own.
        for one in self._ranks.values() if not is_open else (seen,):
            one.last_sign_s = now_s

    def finished(self, rank: int) -> None:
        """A rank's process ended; silence is its right."""
        if rank in self._ranks:
            self._ranks[rank].done = True

    def resumed(self, gap_s: float) -> None:
        """The watcher itself stood still for `gap_s`; what it did not see in that time is nobody's fault."""
        for seen in self._ranks.values():
            seen.last_sign_s += gap_s
            if seen.stopped_since_s is not None:
                seen.stopped_since_s += gap_s

    @property
    def step_limit_s(self) -> float:
        """How long a rank between two steps may be silent now."""
        typical_s = median(self._step_s) if self._step_s else 0.0
        return max(self._limits.floor_s, self._limits.factor * typical_s)

    @property
    def median_step_s(self) -> float | None:
        """The recent median step time; None before there is one."""
        return median(self._step_s) if self._step_s else None

    def check(self, now_s: float, process_states: Mapping[int, str | None]) -> Frozen | None:
        """Whether the job stands still, given the kernel's view of each rank's process."""
        living = {rank: seen for rank, seen in self._ranks.items() if not seen.done}
        for rank, seen in living.items():
            if process_states.get(rank) not in STOPPED_STATES:
                seen.stopped_since_s = None
            elif seen.stopped_since_s is None:
                seen.stopped_since_s = now_s
        in_section = any(seen.section_limit_s is not None for seen in living.values())
        overdue = [
            (waited_s, limit_s)
            for seen in living.values()
            for waited_s, limit_s in self._waits(seen, now_s, others_in_section=in_section)
            if waited_s > limit_s
        ]
        if not overdue:
            return None
        waited_s, limit_s = max(overdue)
        blamed, state, behind_at_step = _blame(living, process_states)
        return Frozen(waited_s=waited_s, limit_s=limit_s, rank=blamed, state=state, behind_at_step=behind_at_step)

    def _waits(self, seen: _Rank, now_s: float, *, others_in_section: bool) -> list[tuple[float, float]]:
        waits = []
        if seen.section_limit_s is not None:
            waits.append((now_s - seen.last_sign_s, seen.section_limit_s))
        elif not others_in_section:
            limit_s = self._limits.first_step_s if seen.last_step is None else self.step_limit_s
            waits.append((now_s - seen.last_sign_s, limit_s))
        if seen.stopped_since_s is not None:
            # A stopped process will not go on by itself, in a section or before its first step either.
            waits.append((now_s - seen.stopped_since_s, self.step_limit_s))
        return waits


def _blame(ranks: Mapping[int, _Rank], states: Mapping[int, str | None]) -> tuple[int | None, str | None, int | None]:
    """The rank to blame, its state's letter, the step it is behind at: the first None where no rank stands out."""
    for letters in (STOPPED_STATES, STUCK_STATES):
        held = {rank: letters[state] for rank in ranks if (state := states.get(rank)) in letters}
        if len(held) == 1:
            rank, letter = held.popitem()
            return rank, letter, None
    steps = {rank: seen.last_step or 0 for rank, seen in ranks.items()}
    behind = [rank for rank, step in steps.items() if step == min(steps.values())]
    if len(behind) == 1 and len(ranks) > 1:
        return behind[0], None, steps[behind[0]]
    return None, None, None
