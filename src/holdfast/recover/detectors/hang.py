"""Find a job that makes no progress, and the rank that is to blame.

The detector is pure: it receives events with their times.

A rank is silent from its last step on, or from the end of its last section (save, restore,
evaluate). Silence by itself is no hang, since the rank may evaluate, export or upload after its
last step. So the limit for silence is long: `silence_s`, or twice the longest pause of the attempt
so far.

If there is a second sign, the limit is short: `factor` times the recent median step time, but at
least `floor_s`. The second sign is a state in which the rank cannot be working. Each look must have
found the state for as long as the limit, and a lock for half as long. There are these states:

- The process is stopped.
- The process is blocked in the kernel without finishing a read or write.
- Its main thread waits for a lock that no thread of the process can release. Looks begin after
  half of the limit, so half of the limit remains for the state. Half is enough, since such a rank cannot continue.
- All ranks wait in collectives.

A section may have its own limit. By default, its limit is the limit for silence, or twice the
longest section of the attempt. Within a section, waiting in collectives is no second sign, since an
evaluation also waits in collectives. The time before the first step of an attempt, when ranks
compile and load, has a separate limit. While any rank is in a section, the silence of the other
ranks does not count, since they may wait for that rank, and a false alarm costs more than a late
one. The exception is a rank that waits for a lock that no thread of its process can release.

One of these signs identifies the frozen rank; the strongest comes first:

- The kernel reports that the rank's process is stopped or blocked.
- It is the only rank that has not begun a collective which others have begun. Neither PyTorch's
  recorder nor its stack shows that it waits for another rank.
- It is the only rank whose stack is outside the collective in which the others wait.
- Its main thread waits for a lock that no thread of its process can release.
- Its last step is behind the last steps of the others.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from holdfast.recover.detectors.collectives import Begun, without_the_others_collective
from holdfast.recover.stacks import Activity, Stand

RECENT_STEPS = 64
STOPPED_STATES = {"stopped": "T", "tracing-stop": "t"}
STUCK_STATES = {"disk-sleep": "D"}
"""The names of process states in psutil, with their letters in /proc/PID/stat (proc(5))."""

LONGEST_PAUSE_FACTOR = 2.0
LOOKS_WITHIN_LIMIT = 8
"""The number of looks at a silent rank in the second half of its limit."""
LONGEST_BETWEEN_LOOKS_S = 10.0
SHORTEST_BETWEEN_LOOKS_S = 0.5
IDLE_CPU_SHARE = 0.05
"""A process that uses less than this share of a core does no work, apart from its answers to looks.
The share is above 0, since threads of libraries use some CPU time."""


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """The limits after which silence is a hang. All but `factor` are in seconds."""

    factor: float = 10.0
    floor_s: float = 60.0
    first_step_s: float = 1800.0
    section_s: float = 900.0
    """The minimum of the limit in a section that has no own limit. `silence_s` applies if it is
    larger.
    """
    silence_s: float = 1800.0
    """The minimum of the limit between steps if there is no second sign."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The state of one rank's process at one moment; None for values that cannot be read."""

    state: str | None = None
    """The state of the process, as psutil names it."""
    cpu_s: float | None = None
    """The CPU seconds of the process and its children."""
    io_bytes: int | None = None
    """The number of bytes that the process and its children have read and written."""
    stand: Stand | None = None
    begun: Begun | None = None
    """The collectives that the rank has begun."""
    answers_cpu_s: float | None = None
    """The part of `cpu_s` that the rank has used to answer looks; None without a recent answer."""


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A hang: a job that makes no progress."""

    waited_s: float
    limit_s: float
    rank: int | None
    """The rank to blame; None if no rank can be identified."""
    state: str | None = None
    """The letter of that rank's process state, if the state identified the rank."""
    behind_at_step: int | None = None
    """The last step of that rank, if the rank was identified because it is behind the others."""
    why: str | None = None
    """Other evidence that identified the rank, or what all ranks are doing."""
    only_silence: bool = False
    """True if there was no second sign."""
    option: str | None = None
    """The option that sets the exceeded limit; None if there was a second sign.

    If a section has its own limit, that limit applies instead of the option.
    """
    is_locked: bool = False
    """True if the rank to blame waits for a lock that no thread of its process can release."""

    @property
    def is_of_software(self) -> bool:
        """True if hardware cannot be the cause.

        In this case a signal has stopped the process, or a lock of the process blocks it.
        """
        return self.is_locked or self.state in STOPPED_STATES.values()


@dataclass(kw_only=True)
class _Rank:
    last_step: int | None = None
    last_sign_s: float
    section_since_s: float | None = None
    """The time at which the rank entered its present section; None outside sections."""
    section_limit_s: float | None = None
    """The own limit of the section, if it has one."""
    stopped_since_s: float | None = None
    done: bool = False
    look: Look | None = None
    """The last look at the rank since its last sign of life."""
    look_s: float = 0.0
    stand: Stand | None = None
    """The position in its code that the rank has last answered since its last sign of life."""
    stuck_since_s: float | None = None
    locked_since_s: float | None = None
    waits_since_s: float | None = None
    """The time since when every look has found the rank in the same wait for other ranks."""
    quiet_since_s: float | None = None
    """The time since when the rank has also neither read nor written."""

    def sign(self, now_s: float) -> None:
        """Record a sign of life, which makes earlier looks obsolete."""
        self.last_sign_s, self.look, self.stand = now_s, None, None
        self.stuck_since_s = self.locked_since_s = self.waits_since_s = self.quiet_since_s = None

    def looked(self, look: Look, now_s: float) -> None:
        before, self.look = self.look, look
        since_s, self.look_s = self.look_s, now_s
        stand = look.stand
        self.stand = stand or self.stand
        same = before is not None and stand is not None and before.stand == stand
        idle = before is not None and _idle(before, look, now_s - since_s)
        quiet = before is not None and before.io_bytes == look.io_bytes
        activity = None if stand is None else stand.activity
        stuck = before is not None and before.state in STUCK_STATES and look.state in STUCK_STATES
        self.stuck_since_s = _since(self.stuck_since_s, since_s, holds=stuck and idle and quiet)
        locked = same and activity is Activity.LOCK
        self.locked_since_s = _since(self.locked_since_s, since_s, holds=locked and idle and quiet)
        waits = same and (
            activity is Activity.COLLECTIVE or (activity is Activity.BACKWARD and idle)
        )
        self.waits_since_s = _since(self.waits_since_s, since_s, holds=waits)
        self.quiet_since_s = _since(
            self.quiet_since_s, since_s, holds=waits and quiet and look.io_bytes is not None
        )


class HangDetector:
    """Find hangs of the ranks in one attempt. All times are monotonic seconds of one clock."""

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self.world_size = 1
        """The number of ranks of the job. A wait in a collective counts only after all ranks, and
        more than one, have attached."""
        self._ranks: dict[int, _Rank] = {}
        self._living: dict[int, _Rank] = {}
        self._sections: set[int] = set()
        """The living ranks that are in a section."""
        self._median_s: float | None = None
        """The median time of the recent steps; None until it is computed again."""
        self._step_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._longest_pause_s = 0.0
        self._longest_section_s = 0.0
        self._last_look_s: float | None = None

    def attached(self, rank: int, now_s: float) -> None:
        """Begin to watch a rank, which has reported for the first time."""
        self._ranks[rank] = self._living[rank] = _Rank(last_sign_s=now_s)
        self._sections.discard(rank)

    def stepped(self, rank: int, step: int, step_s: float, now_s: float) -> None:
        """Record that a rank completed a step in `step_s` seconds."""
        seen = self._ranks[rank]
        if seen.last_step is not None:  # the first step is mainly warm-up
            self._step_s.append(step_s)
            self._median_s = None
            self._longest_pause_s = max(self._longest_pause_s, now_s - seen.last_sign_s)
        seen.last_step = step
        seen.sign(now_s)

    def section(self, rank: int, now_s: float, *, is_open: bool, limit_s: float | None) -> None:
        """Record that a rank entered or left a section."""
        seen = self._ranks[rank]
        if not is_open and seen.section_since_s is not None:
            self._longest_section_s = max(self._longest_section_s, now_s - seen.section_since_s)
        # A section within a section counts as a new section.
        seen.section_since_s = (
            (now_s if seen.section_since_s is None else seen.section_since_s) if is_open else None
        )
        seen.section_limit_s = limit_s or None
        if seen.section_since_s is None or seen.done:
            self._sections.discard(rank)
        else:
            self._sections.add(rank)
        # At the end of a section, the silence of all ranks counts from now on, since the other
        # ranks may have waited for this rank.
        for one in self._ranks.values() if not is_open else (seen,):
            one.sign(now_s)

    def finished(self, rank: int) -> None:
        """Record that a rank's process ended, so that its silence does not count."""
        if rank in self._ranks:
            self._ranks[rank].done = True
            self._living.pop(rank, None)
            self._sections.discard(rank)

    def resumed(self, gap_s: float) -> None:
        """Leave out `gap_s` seconds in which the watching process itself stood still."""
        for seen in self._ranks.values():
            seen.sign(seen.last_sign_s + gap_s)
            if seen.stopped_since_s is not None:
                seen.stopped_since_s += gap_s
            if seen.section_since_s is not None:
                seen.section_since_s += gap_s

    @property
    def step_limit_s(self) -> float:
        """Return the limit for silence between two steps if there is a second sign."""
        return max(self._limits.floor_s, self._limits.factor * (self.median_step_s or 0.0))

    @property
    def silence_limit_s(self) -> float:
        """Return the limit for silence between two steps if there is no second sign."""
        return max(
            self._limits.silence_s, self.step_limit_s, LONGEST_PAUSE_FACTOR * self._longest_pause_s
        )

    @property
    def section_limit_s(self) -> float:
        """Return the limit for a section that has no own limit, if there is no second sign."""
        learnt_s = LONGEST_PAUSE_FACTOR * self._longest_section_s
        return max(self._limits.section_s, self.silence_limit_s, learnt_s)

    @property
    def in_section(self) -> bool:
        """True if any living rank is in a section."""
        return bool(self._sections)

    @property
    def median_step_s(self) -> float | None:
        """Return the recent median step time in seconds; None if there are too few steps."""
        if self._median_s is None and self._step_s:
            self._median_s = median(self._step_s)
        return self._median_s

    @property
    def living(self) -> dict[int, _Rank]:
        """Return the ranks whose processes have not ended."""
        return self._living

    @property
    def stands(self) -> dict[int, Stand]:
        """Return the last answered position of each rank that has given no sign of life since then."""
        return {rank: seen.stand for rank, seen in self._ranks.items() if seen.stand is not None}

    @property
    def measured(self) -> set[int]:
        """Return the ranks whose CPU time was read since their last sign of life."""
        looks = {rank: seen.look for rank, seen in self._ranks.items()}
        return {rank for rank, look in looks.items() if look is not None and look.cpu_s is not None}

    def look_due(self, now_s: float) -> bool:
        """Return True if the processes of the living ranks must be inspected now.

        The inspections begin when a living rank has been silent for half of its limit, or when some
        ranks have ended, and are repeated at intervals.
        """
        in_section, shortest_s = self.in_section, self._shortest_limit_s
        patience_s = [
            (now_s - seen.last_sign_s, self._patience_s(seen))
            for seen in self.living.values()
            if 2 * (now_s - seen.last_sign_s) > min(shortest_s, seen.section_limit_s or shortest_s)
            and (seen.section_since_s is not None or not in_section)
        ]
        between_s = [
            limit_s / LOOKS_WITHIN_LIMIT
            for silent_s, limit_s in patience_s
            if silent_s > limit_s / 2
        ]
        if 0 < len(self.living) < len(self._ranks) and not self.in_section:
            between_s.append(self.step_limit_s / LOOKS_WITHIN_LIMIT)
        if not between_s:
            return False
        rest_s = max(SHORTEST_BETWEEN_LOOKS_S, min(LONGEST_BETWEEN_LOOKS_S, *between_s))
        return self._last_look_s is None or now_s - self._last_look_s >= rest_s

    def looked(self, looks: Mapping[int, Look], now_s: float) -> None:
        """Record a look at the processes of the living ranks."""
        self._last_look_s = now_s
        for rank, look in looks.items():
            if rank in self._ranks:
                self._ranks[rank].looked(look, now_s)

    def all_wait_s(self, now_s: float, *, quiet: bool = False) -> float:
        """Return the seconds for which all living ranks have been in the same wait for others.

        Args:
            now_s: the present time.
            quiet: True to count only the time without reads and writes.
        """
        if len(self._ranks) < max(2, self.world_size):
            return 0.0
        since_s = [
            seen.quiet_since_s if quiet else seen.waits_since_s for seen in self.living.values()
        ]
        known_s = [one for one in since_s if one is not None]
        return now_s - max(known_s) if known_s and len(known_s) == len(since_s) else 0.0

    def check(self, now_s: float, process_states: Mapping[int, str | None]) -> Frozen | None:
        """Return the hang if the job makes no progress now, else None.

        Args:
            now_s: the present time.
            process_states: the kernel's state of each rank's process.
        """
        living = self.living
        for rank, seen in living.items():
            if process_states.get(rank) not in STOPPED_STATES:
                seen.stopped_since_s = None
            elif seen.stopped_since_s is None:
                seen.stopped_since_s = now_s
        # Skip ranks that have reported lately and cannot be overdue: there may be thousands.
        shortest_s = self._shortest_limit_s
        overdue = [
            wait
            for seen in living.values()
            if now_s - seen.last_sign_s > min(shortest_s, seen.section_limit_s or shortest_s)
            or seen.stopped_since_s is not None
            for wait in self._waits(seen, now_s)
            if wait[1] > wait[2]
        ]
        all_wait_s = (
            0.0 if self.in_section or len(living) < len(self._ranks) else self.all_wait_s(now_s)
        )
        if all_wait_s > self.step_limit_s and all(
            seen.last_step is not None for seen in living.values()
        ):
            overdue.append((False, all_wait_s, self.step_limit_s, None))
        if not overdue:
            return None
        only_silence, _, limit_s, option = min(overdue, key=lambda one: one[:3])
        waited_s = max(one[1] for one in overdue)
        if not self.in_section:  # the silence began some time before the first look
            waited_s = max(now_s - seen.last_sign_s for seen in living.values())
        blamed, state, behind_at_step, why = _blame(living, process_states)
        if blamed is None and all_wait_s > 0:
            why = "all ranks wait in collectives"
        return Frozen(
            waited_s=waited_s,
            limit_s=limit_s,
            rank=blamed,
            state=state,
            behind_at_step=behind_at_step,
            why=why,
            only_silence=only_silence,
            option=option,
            is_locked=blamed is not None and living[blamed].locked_since_s is not None,
        )

    @property
    def _shortest_limit_s(self) -> float:
        """Return the shortest limit that can apply to a rank outside of sections."""
        return min(self.step_limit_s, self._limits.first_step_s)

    def _patience_s(self, seen: _Rank) -> float:
        if seen.section_since_s is not None:
            return min(self.step_limit_s, seen.section_limit_s or self.step_limit_s)
        return self._limits.first_step_s if seen.last_step is None else self.step_limit_s

    def _waits(self, seen: _Rank, now_s: float) -> list[tuple[bool, float, float, str | None]]:
        """Return the possible reasons to call a rank frozen.

        Returns:
            For each reason: True if it is only silence, its duration in seconds, its limit, and the
            option that sets the limit.
        """
        waits: list[tuple[bool, float, float, str | None]] = []
        silent_s = now_s - seen.last_sign_s
        in_section, own_limit_s = seen.section_since_s is not None, seen.section_limit_s
        if in_section:
            waits.append(
                (
                    own_limit_s is None,
                    silent_s,
                    own_limit_s or self.section_limit_s,
                    "--section-limit-s",
                )
            )
        elif not self.in_section and seen.last_step is None:
            waits.append((True, silent_s, self._limits.first_step_s, "--first-step-limit-s"))
        elif not self.in_section:
            waits.append((True, silent_s, self.silence_limit_s, "--silence-limit-s"))
        # A stopped process does not continue by itself, not even before its first step.
        signs_s = [] if seen.stopped_since_s is None else [now_s - seen.stopped_since_s]
        has_begun = in_section or seen.last_step is not None
        if seen.locked_since_s is not None and has_begun:
            # The sections of others do not matter: they wait for this rank, such as in a save.
            signs_s.append(min(silent_s, 2 * (now_s - seen.locked_since_s)))
        if seen.stuck_since_s is not None and has_begun and (in_section or not self.in_section):
            signs_s.append(now_s - seen.stuck_since_s)
        waits += [(False, sign_s, self.step_limit_s, None) for sign_s in signs_s]
        return waits


def _idle(before: Look, now: Look, passed_s: float) -> bool:
    if before.cpu_s is None or now.cpu_s is None:
        return False
    answers_s = 0.0
    if before.answers_cpu_s is not None and now.answers_cpu_s is not None:
        answers_s = max(0.0, now.answers_cpu_s - before.answers_cpu_s)
    worked_s = now.cpu_s - before.cpu_s - answers_s
    # 0.02 s is one or two ticks of the kernel's clock.
    return abs(worked_s) <= IDLE_CPU_SHARE * passed_s + 0.02


def _since(known_s: float | None, before_s: float, *, holds: bool) -> float | None:
    """Return since when a state holds: `known_s`, or else `before_s`; None if it does not hold."""
    return (before_s if known_s is None else known_s) if holds else None


_Blame = tuple[int | None, str | None, int | None, str | None]


def _blame(ranks: Mapping[int, _Rank], states: Mapping[int, str | None]) -> _Blame:
    """Find the rank to blame for a hang.

    Returns:
        The rank, or None if none can be identified; the letter of its process state; its last step,
        if it is behind the others; and other evidence.
    """
    for letters in (STOPPED_STATES, STUCK_STATES):
        held = {rank: letters[state] for rank in ranks if (state := states.get(rank)) in letters}
        if len(held) == 1:
            rank, letter = held.popitem()
            return rank, letter, None, None
    begun = {
        rank: seen.look.begun
        for rank, seen in ranks.items()
        if seen.look is not None and seen.look.begun is not None
    }
    late = without_the_others_collective(begun) if len(begun) == len(ranks) else []
    # gloo does not record messages between two ranks. That a rank waits for such a message is
    # visible only in its stack.
    late = [rank for rank in late if not _waits_for_others(ranks[rank].stand)]
    if len(late) == 1:
        return late[0], None, None, f"the others wait for it{_where(ranks[late[0]].stand)}"
    stands = {rank: seen.stand for rank, seen in ranks.items() if seen.look is not None}
    waiting = {rank for rank, stand in stands.items() if _waits_for_others(stand)}
    outside = set(ranks) - waiting
    if waiting and len(outside) == 1:
        (rank,) = outside
        # The name of the collective is left out, because the same hang must have the same words
        # each time to be recognised again.
        return rank, None, None, f"the others wait for it{_where(stands.get(rank))}"
    locked = [rank for rank, seen in ranks.items() if seen.locked_since_s is not None]
    if len(locked) == 1:
        lock = f"it waits for {Activity.LOCK.value}{_where(stands.get(locked[0]))}"
        return locked[0], None, None, lock
    steps = {rank: seen.last_step or 0 for rank, seen in ranks.items()}
    behind = [rank for rank, step in steps.items() if step == min(steps.values())]
    if len(behind) == 1 and len(ranks) > 1:
        return behind[0], None, steps[behind[0]], None
    return None, None, None, None


def _waits_for_others(stand: Stand | None) -> bool:
    waits = (Activity.COLLECTIVE, Activity.BACKWARD, Activity.DEVICE)
    return stand is not None and stand.activity in waits


def _where(stand: Stand | None) -> str:
    if stand is None:
        return "; its Python code does not answer"
    return f"; it stands in {stand.frames[0]}" if stand.frames else ""
