"""Collect the facts about one attempt from the messages of its processes."""

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from holdfast.core.whole import whole_number
from holdfast.diagnose import BrokenLoss, Diagnosis, Hang, JobContext, RankExit, observed_lines
from holdfast.recover import policy
from holdfast.recover.channel import Peer
from holdfast.recover.detectors.anomaly import Anomaly
from holdfast.recover.detectors.collectives import Begun, collectives_of
from holdfast.recover.detectors.hang import (
    STOPPED_STATES,
    Frozen,
    HangDetector,
    HangLimits,
    Look,
)
from holdfast.recover.skipping.plan import Skip
from holdfast.recover.stacks import Stand, stand_of

TOGETHER_S = 5.0
"""When the training is complete, all ranks end within this number of seconds of each other."""
LEFT_S = 10.0
"""If a rank ends with exit code 0 and the other ranks wait for it in collectives for at least this
number of seconds, its end counts as a failure."""
CITED_FRAMES = 8
MAX_SKIPPED = 1024
"""The largest number of reports of left-out batches that are recorded per attempt."""
KILLED = (
    ("observer-killed",),
    ("observer-terminated",),
    ("observer-launcher",),
    ("observer-node",),
    ("launcher-killed",),
    ("task-killed",),
)
"""The ids of rules that decide a diagnosis if a signal from outside ended a rank or the launcher,
and the logs state no other root."""


@dataclass(kw_only=True)
class AttemptView:
    """The facts known so far about one attempt, which is one start of the job.

    All times are monotonic seconds.
    """

    number: int
    detector: HangDetector
    world_size: int | None = None
    rank_pids: dict[int, int] = field(default_factory=dict)
    """The process id of each rank: the attached process or, before a process has attached, the
    process that the shim started."""
    attached: set[int] = field(default_factory=set)
    watched: set[int] = field(default_factory=set)
    """The attached ranks that report steps; other attached ranks only save checkpoints."""
    lowest_watched: int | None = None
    steps: dict[int, int] = field(default_factory=dict)
    """The last reported step of each rank."""
    exits: list[RankExit] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    """The ranks that have exited."""
    frozen: Frozen | None = None
    anomaly: Anomaly | None = None
    loss_leader: int | None = None
    """The lowest rank that has reported a loss. It is not always 0, since in a pipeline only the
    last ranks have a loss.
    """
    left: RankExit | None = None
    """The rank that ended with exit code 0 while the others continued, once this is certain."""
    states: dict[int, str | None] = field(default_factory=dict)
    """The kernel's state of each rank's process, from the agent's last message."""
    stopped_since_s: dict[int, float] = field(default_factory=dict)
    """For each rank that does not report yet, the time since when its process has been stopped."""
    launcher_is_gone: bool = False
    """True if a launcher has ended, or a node is lost."""
    lost_node: str | None = None
    """The name of the first node that was lost."""
    launcher_ended_first: bool = False
    killed: bool = False
    """True if the supervisor ended the attempt, so that the ends of ranks say nothing about the
    cause.
    """
    answers: dict[int, Stand] = field(default_factory=dict)
    """The position of each rank in its code, from the answers since the last look."""
    begun: dict[int, Begun | None] = field(default_factory=dict)
    """The collectives that the ranks have begun, from the answers since the last look."""
    answers_cpu_s: dict[int, float] = field(default_factory=dict)
    """The CPU seconds that each rank has used for all of its answers, from the same answers."""
    collectives_s: float | None = None
    """The time of the last answer with the collectives of a rank."""
    start_step: int | None = None
    """The number of steps that the state at the start of the attempt includes; None before its
    first step.
    """
    restored: dict[str, Any] | None = None
    """The data of the `restored` event, once a rank has sent this event."""
    skipped: set[tuple[int, int]] = field(default_factory=set)
    """The ranges of batches that ranks have reported as left out."""
    dropped_log_bytes: int = 0
    shim_count: int | None = None
    """The world size of the shims; None before the first shim has reported. The ranks may report a
    different world size.
    """
    shims: set[int] = field(default_factory=set)
    """The ranks whose shims have reported."""
    swept: set[int] = field(default_factory=set)
    """The ranks of which no process is left."""
    starts_again: set[int] = field(default_factory=set)
    """The ranks whose shims can start the trainer of the next attempt."""

    @classmethod
    def begin(cls, number: int, limits: HangLimits) -> "AttemptView":
        """Begin an attempt, about which nothing is known yet."""
        return cls(number=number, detector=HangDetector(limits))

    def on_message(self, peer: Peer, message: dict[str, Any], now_s: float) -> None:
        """Record a message of a rank or shim.

        Raises:
            KeyError, TypeError, ValueError, IndexError: a field is malformed.
        """
        kind, rank = message["kind"], peer.rank
        if kind == "hello":
            self.world_size = self.detector.world_size = peer.world_size
            if peer.role == "rank":
                if self.rank_pids.get(rank) != peer.pid:
                    self.watched.discard(rank)  # a new pid: the command started another program
                    self.lowest_watched = min(self.watched, default=None)
                self.attached.add(rank)
                self.rank_pids[rank] = peer.pid
        elif peer.role == "shim":
            self._from_shim(peer, message, now_s)
        elif kind == "watch" and rank in self.attached:
            self._watch(rank, now_s)
        elif kind == "stacks":
            self.answers[rank] = stand_of(message["threads"])
        elif kind == "collectives" and message["collectives"]:
            self.collectives_s = now_s
        elif kind == "begun":
            self.begun[rank] = collectives_of(message["collectives"])
            self.answers_cpu_s[rank] = float(message.get("cpu_s") or 0.0)
        elif kind == "step" and rank in self.attached:
            self._watch(rank, now_s)
            self.steps[rank] = int(message["step"])
            self._went_on(int(message["step"]), now_s)
            self.detector.stepped(rank, int(message["step"]), float(message["step_s"]), now_s)
        elif kind == "section" and rank in self.watched:
            limit_s = None if message["limit_s"] is None else float(message["limit_s"])
            self.detector.section(rank, now_s, is_open=bool(message["open"]), limit_s=limit_s)
        elif kind == "gone":
            # The process that reported steps has ended. A later program of the same command reports
            # no steps.
            self.detector.finished(rank)
        elif kind == "event" and message["event"] == "restored":
            self.restored = dict(message["data"])

    def _from_shim(self, shim: Peer, message: dict[str, Any], now_s: float) -> None:
        kind, rank = message["kind"], shim.rank
        if kind == "started":
            self.shim_count = shim.world_size
            self.shims.add(rank)
            if self.world_size is None:
                self.world_size = self.detector.world_size = shim.world_size
            self.rank_pids.setdefault(rank, int(message["pid"]))
            if message["starts_again"] is True:
                self.starts_again.add(rank)
        elif kind == "exited":
            pid, returncode = int(message["pid"]), int(message["returncode"])
            self._exited(rank, pid, returncode, float(message["at_monotonic_s"]))
        elif kind == "swept":
            if rank not in self.swept:  # otherwise, the message is a repetition
                self.dropped_log_bytes += int(message["log_dropped_bytes"])
            self.swept.add(rank)
        elif kind == "gone":
            self._shim_left(shim, now_s, launcher_lives=message["launcher_lives"] is True)

    def _shim_left(self, shim: Peer, now_s: float, *, launcher_lives: bool) -> None:
        self.starts_again.discard(shim.rank)
        self.swept.add(shim.rank)
        self.launcher_is_gone |= not launcher_lives
        if shim.rank in self.ended:
            return
        # If a shim is killed, the kernel kills its rank, and no end is reported. If the launcher is
        # gone, too, the kernel has killed this shim.
        unexplained = self.culprit is None and not self.killed
        self.launcher_ended_first |= unexplained and not launcher_lives
        self._exited(shim.rank, self.rank_pids.get(shim.rank, shim.pid), -signal.SIGKILL, now_s)

    def launcher_ended(self, returncode: int) -> None:
        """Record the return code of a launcher, whose ranks may end later.

        A negative code is the number of the signal that ended the launcher or its guard.
        """
        self.launcher_is_gone = True
        self.launcher_ended_first |= (
            returncode < 0 and self.culprit is None and not self.killed and self.lost_node is None
        )

    def node_lost(self, name: str, ranks: Collection[int], now_s: float) -> None:
        """Record that a node is lost, and its ranks with it."""
        self.launcher_is_gone = True
        if self.lost_node is None and self.frozen is None and self.anomaly is None:
            self.lost_node = name
        for rank in ranks:
            self.starts_again.discard(rank)
            self.swept.add(rank)
            self._exited(rank, self.rank_pids.get(rank, 0), -signal.SIGKILL, now_s)

    def _watch(self, rank: int, now_s: float) -> None:
        if rank not in self.watched:
            self.watched.add(rank)
            lowest = self.lowest_watched
            self.lowest_watched = rank if lowest is None else min(rank, lowest)
            self.steps.pop(rank, None)  # an earlier program of the rank reported the step
            self.detector.attached(rank, now_s)

    def _exited(self, rank: int, pid: int, returncode: int, at_monotonic_s: float) -> None:
        if rank in self.ended:
            return
        self.ended.add(rank)
        self.detector.finished(rank)
        self.exits.append(
            RankExit(
                rank=rank,
                pid=pid,
                exit_code=returncode if returncode >= 0 else None,
                signal=-returncode if returncode < 0 else None,
                at_monotonic_s=at_monotonic_s,
                last_step=self.steps.get(rank),
            )
        )

    def _went_on(self, step: int, now_s: float) -> None:
        """Record a rank that ended with code 0, but left the others in the middle of the training."""
        if self.left is not None or self.killed:
            return
        for end in self.exits:
            # If another rank reports a step beyond the next one more than `TOGETHER_S` after the
            # end of this rank, the ranks did not complete the training together.
            early = end.exit_code == 0 and end.last_step is not None and step > end.last_step + 1
            if early and now_s - end.at_monotonic_s > TOGETHER_S:
                self.left = end

    def looked(self, used: Mapping[int, tuple[float, int] | None], now_s: float) -> None:
        """Record a look at the ranks: the usage of their processes, and their answers.

        `used` has the form of `core.processes.activity`.
        """
        answers, self.answers = self.answers, {}
        begun, self.begun = self.begun, {}
        answers_cpu_s, self.answers_cpu_s = self.answers_cpu_s, {}
        looks = {}
        for rank, one in used.items():
            cpu_s, io_bytes = (None, None) if one is None else one
            state = self.states.get(rank)
            looks[rank] = Look(
                state=state,
                cpu_s=cpu_s,
                io_bytes=io_bytes,
                stand=answers.get(rank),
                begun=begun.get(rank),
                answers_cpu_s=answers_cpu_s.get(rank),
            )
        self.detector.looked(looks, now_s)

    def check(self, now_s: float) -> Frozen | None:
        """Return the hang if the job stands still now, and store it in `frozen`.

        A rank that left the others is stored in `left`.
        """
        ended = [end for end in self.exits if end.exit_code == 0 and end.last_step is not None]
        # In a section at the end of the training, the other ranks may continue in collectives
        # without a rank that has ended.
        may_have_left = self.left is None and ended and not self.detector.in_section
        if may_have_left and self.detector.all_wait_s(now_s, quiet=True) > max(
            LEFT_S, self.detector.step_limit_s
        ):
            self.left = min(ended, key=lambda end: end.at_monotonic_s)
        self.frozen = self.detector.check(now_s, self.states) or self._stopped_at_start(now_s)
        return self.frozen

    def _stopped_at_start(self, now_s: float) -> Frozen | None:
        """Return the hang of a rank that has been stopped for too long before its first report."""
        ended = {end.rank for end in self.exits}
        limit_s = self.detector.step_limit_s
        for rank in self.rank_pids:
            state = self.states.get(rank)
            if state not in STOPPED_STATES or rank in self.watched or rank in ended:
                self.stopped_since_s.pop(rank, None)
            elif (waited_s := now_s - self.stopped_since_s.setdefault(rank, now_s)) > limit_s:
                letter = STOPPED_STATES[state]
                return Frozen(waited_s=waited_s, limit_s=limit_s, rank=rank, state=letter)
        return None

    def is_first_to_skip(self, data: Mapping[str, Any]) -> bool:
        """Record a range of batches that a rank has left out; return True for a new range.

        Raises:
            KeyError, TypeError, ValueError: the data is malformed.
        """
        skip = Skip.of_json({**data, "doublings": 0})
        place = skip.first, skip.last
        is_new = place not in self.skipped and len(self.skipped) < MAX_SKIPPED
        if is_new:
            self.skipped.add(place)
        return is_new

    @property
    def without_a_shim(self) -> set[int]:
        """Return the ranks whose shims have not reported yet."""
        return set(range(self.shim_count or 0)) - self.shims

    @property
    def all_ended(self) -> bool:
        """Return True if no process of any rank is left."""
        return self.shim_count is not None and len(self.swept) == self.shim_count

    @property
    def all_exited(self) -> bool:
        """Return True if the trainer of every rank has ended; its descendants may still run."""
        return self.shim_count is not None and len(self.exits) >= self.shim_count

    @property
    def can_start_again(self) -> bool:
        """Return True if all launchers live, and each rank's shim can start another trainer."""
        return (
            self.shim_count is not None
            and self.shim_count == self.world_size == len(self.starts_again)
            and not self.launcher_is_gone
        )

    def leads_losses(self, rank: int) -> bool:
        """Record that a rank reports losses; return True if its losses are searched for spikes."""
        if self.loss_leader is None or rank < self.loss_leader:
            self.loss_leader = rank
        return rank == self.loss_leader

    @property
    def last_step(self) -> int | None:
        """Return the highest step that any rank completed."""
        return max(self.steps.values(), default=None)

    @property
    def steps_completed(self) -> int | None:
        """Return the number of steps that the training has completed; None if no rank reports steps."""
        if self.last_step is not None or not self.watched:
            return self.last_step
        return 0 if self.restored is None else int(self.restored["step"])

    @property
    def first_failure(self) -> RankExit | None:
        """Return the rank that failed first, by the time of its death."""
        failed = [end for end in self.exits if end.exit_code != 0]
        return min(failed, key=lambda end: end.at_monotonic_s, default=None)

    @property
    def culprit(self) -> RankExit | None:
        """Return the exit of the rank at which the failure began."""
        return self.left or self.first_failure

    @property
    def blamed_rank(self) -> int | None:
        """Return the rank at which the failure began; None if unknown."""
        if self.frozen is not None:
            return self.frozen.rank
        if self.anomaly is not None:
            return self.anomaly.rank
        if self.culprit is None or self.launcher_ended_first or self.lost_node is not None:
            return None
        return self.culprit.rank

    @property
    def kind_of_failure(self) -> Literal["exit", "hang", "anomaly"]:
        """Return the kind of the failure, in the terms of the ledger."""
        if self.anomaly is not None:
            return "anomaly"
        return "hang" if self.frozen is not None else "exit"

    @property
    def in_doubt(self) -> bool:
        """Return True if a rank ended with code 0 before the first failure.

        It is then unclear if this rank completed the training, or left the others, which then
        failed.
        """
        first = self.first_failure
        return (
            self.left is None
            and first is not None
            and any(
                end.exit_code == 0 and end.at_monotonic_s < first.at_monotonic_s
                for end in self.exits
            )
        )

    def context(self) -> JobContext:
        """Return the observations that the diagnosis needs in addition to the logs."""
        hang = None
        if (frozen := self.frozen) is not None:
            blamed = () if frozen.rank is None else (frozen.rank,)
            hang = Hang(
                ranks=blamed,
                pids=tuple(self.rank_pids[rank] for rank in blamed),
                process_state=frozen.state,
                last_step=self.last_step,
                frozen_step=frozen.behind_at_step,
                waited_s=frozen.waited_s,
                limit_s=frozen.limit_s,
                only_silence=frozen.only_silence,
                option=frozen.option,
                why=frozen.why,
            )
        broken_loss = None
        if (anomaly := self.anomaly) is not None:
            broken_loss = BrokenLoss(
                value=anomaly.value,
                step=anomaly.step,
                first_step=anomaly.first_step,
                usual=anomaly.usual,
            )
        # These ranks were ended by the launcher's SIGTERM after the first failure, or by the
        # supervisor's SIGKILL. Their ends say nothing about the cause.
        was_killed = self.frozen is not None or anomaly is not None
        is_explained = self.launcher_ended_first or self.lost_node or self.left is not None
        first = None if is_explained else self.first_failure
        ended = tuple(
            end.rank
            for end in self.exits
            if end.signal is not None and (was_killed or end is not first)
        )
        return JobContext(
            exits=tuple(self.exits),
            hang=hang,
            broken_loss=broken_loss,
            last_step=self.last_step,
            stopped_ranks=ended,
            left_rank=None if self.left is None else self.left.rank,
            launcher_ended_first=self.launcher_ended_first,
            lost_node=self.lost_node,
        )

    def failure(
        self,
        diagnosis: Diagnosis,
        *,
        step: int | None,
        checkpoint_step: int | None,
        mitigation: str,
    ) -> policy.Diagnosed:
        """Summarize the failed attempt for the policy.

        Args:
            diagnosis: why the attempt failed.
            step: the number of steps completed before the failure.
            checkpoint_step: the step of the newest checkpoint of the attempt; for a broken loss,
                the step of the checkpoint to go back to.
            mitigation: the advice for the user.
        """
        restored_step = None if self.restored is None else whole_number(self.restored.get("step"))
        can_go_back = checkpoint_step is not None
        return policy.Diagnosed(
            fingerprint=diagnosis.fingerprint,
            step=step,
            has_stepped=self.last_step is not None,
            checkpoint_step=checkpoint_step,
            summary=diagnosis.summary,
            mitigation=mitigation,
            restart_helps=diagnosis.restart_helps if self.anomaly is None else can_go_back,
            work_done=self.anomaly is None and diagnosis.outcome == "completed_teardown_failed",
            waits_for_outside=diagnosis.action == "wait_and_retry",
            killed_from_outside=diagnosis.decided_by[:1] in KILLED,
            # For a hang or a broken loss, the advice is shown even though the action is a restart.
            advises_only_restart=diagnosis.action == "restart" and self.kind_of_failure == "exit",
            restored_step=restored_step if self.start_step is None else self.start_step,
            healthy_step=None if self.anomaly is None else checkpoint_step,
            batches=None if self.anomaly is None or not can_go_back else self.anomaly.batches,
        )

    def observations(self, at_s: float) -> list[str]:
        """Return the observations as lines of a log, with the time `at_s` in Unix seconds.

        The diagnosis can cite these lines.
        """
        stamp = (
            datetime.fromtimestamp(at_s, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
        lines = [*self._standing(), *observed_lines(self.context())]
        return [f"{stamp} {line}\n" for line in lines]

    def _standing(self) -> list[str]:
        """Return where each rank was in its code at the last look before the job was ended."""
        if self.frozen is None and self.left is None:
            return []
        return [
            f"holdfast: rank {rank} (pid {self.rank_pids[rank]}) stands in {stand.activity.value}: "
            + " < ".join(stand.frames[:CITED_FRAMES])
            for rank, stand in sorted(self.detector.stands.items())
        ]
