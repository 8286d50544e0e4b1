"""Queue a run again when nodes are missing in its Slurm job.

A node that is gone does not return to its job, so the run is queued again as a new job. The next
job does not use nodes that are gone or cordoned. Slurm starts it only after the present job has
ended, so the two never run at the same time. With `--requeue=expedite`, Slurm itself may start the
present job again. In this case, the next job takes over only if the present job has finally ended.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from holdfast.cluster import SlurmJobs, SlurmNode, read_slurm_nodes
from holdfast.core.clock import Clock
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.paths import RunPaths
from holdfast.recover.slurm.submission import ENV_JOB, Submission, submit

PATIENCE_S = 300.0
"""The seconds that a missing node has to connect, if it is healthy according to Slurm.

By default, Slurm itself gives up a node after the same time.
"""
RETRY_S = 60.0
"""The seconds from a failed submission to the next attempt."""
QUEUED_AGAIN = "queued_again"
"""The kind of the event that records that the run was queued again."""


class RequeueRecords(Protocol):
    """The interface of the recorder that this module needs."""

    def event(self, kind: str, data: dict[str, Any], rank: int | None = None) -> None:
        """Record an event."""

    def events(self, *kinds: str) -> list[tuple[str, int, dict[str, Any]]]:
        """Return the kind, attempt and data of the run's events with the given kinds."""

    @property
    def reached(self) -> int | None:
        """The step of the newest checkpoint, or else the highest step.

        None if the job reports neither.
        """


def is_due(
    allocation: Collection[str],
    connected: Collection[str],
    cordoned: Collection[str],
    states: Mapping[str, SlurmNode],
    *,
    nnodes: int,
    waited_s: float,
) -> bool:
    """Return True if a run with too few nodes must continue in another job.

    Args:
        allocation: the names of the job's nodes.
        connected: the names of the nodes whose agents are connected.
        cordoned: the names of nodes on which nothing is launched.
        states: the states of the nodes in Slurm.
        nnodes: the number of nodes that train.
        waited_s: the seconds for which nodes have been missing.
    """
    usable = set(allocation) - set(cordoned)
    here = usable & set(connected)
    missing = usable - here
    may_come = {name for name in missing if not (name in states and states[name].is_lost)}
    return len(here) < nnodes and (len(here) + len(may_come) < nnodes or waited_s >= PATIENCE_S)


def in_vain(requeues: Collection[Mapping[str, Any]], reached: int | None) -> int:
    """Return how many of the newest requeues in a row gained nothing.

    Args:
        requeues: the data of the events `QUEUED_AGAIN`, the oldest first. Each has `reached`, the
            step that the run had reached before.
        reached: the step that the run has reached now.
    """
    count = 0
    for one in reversed(list(requeues)):
        before = one.get("reached")
        if reached is not None and (before is None or before < reached):
            break
        count += 1
    return count


class Requeue:
    """Queue the next job of a run, from the supervisor in the present job."""

    def __init__(
        self,
        paths: RunPaths,
        cwd: str,
        records: RequeueRecords,
        observe: Callable[[str, Mapping[str, Any]], None],
        clock: Clock,
        *,
        nnodes: int,
        limit: int,
        environment: Mapping[str, str] = os.environ,
        jobs: Callable[[], SlurmJobs] = SlurmJobs,
    ) -> None:
        """Store what `look` needs.

        Args:
            paths: the paths of the run.
            cwd: the working folder of the run.
            records: the recorder of the run.
            observe: a function that receives the events of the run.
            clock: the clock of this host.
            nnodes: the number of nodes that train.
            limit: the largest number of consecutive requeues that may gain nothing.
            environment: the environment variables of this process.
            jobs: a function that returns the interface to Slurm's jobs.
        """
        self._paths = paths
        self._cwd = cwd
        self._records = records
        self._observe = observe
        self._clock = clock
        self._nnodes = nnodes
        self._limit = limit
        self._environment = environment
        self._jobs = jobs
        self._since_s: float | None = None
        self._complaint = ""
        self._try_at_s = 0.0
        self.queued: str | None = None
        """A sentence about the next job; None if there is no next job yet."""

    def enough(self) -> None:
        """Record that no node is missing."""
        self._since_s = None

    async def look(
        self, connected: Collection[str], cordoned: Collection[str], given_up: asyncio.Event
    ) -> bool:
        """Queue the run again if this is due; return True if the run is queued.

        If Slurm refuses or does not answer, this is reported once, and tried again after `RETRY_S`.

        Args:
            connected: the names of the nodes whose agents are connected.
            cordoned: the names of the nodes on which nothing is launched.
            given_up: an event that is set when the run must stop, in which case the next job is
                cancelled.
        """
        now_s = self._clock.monotonic_s()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s < self._try_at_s:
            return False
        try:
            submission = Submission.read(self._paths)
            if submission is None or not submission.is_own(self._environment):
                return False
            waited_s = now_s - self._since_s
            excluded = await asyncio.to_thread(self._excluded, connected, cordoned, waited_s)
            if excluded is None:
                return False
            reached = self._records.reached
            past = [data for _, _, data in self._records.events(QUEUED_AGAIN)]
            if in_vain(past, reached) >= self._limit:
                raise BadUse(
                    f"The run is not queued again: {self._limit} times in a row that gained nothing. The run waits "
                    "for nodes here."
                )
            try:
                job_id = await asyncio.to_thread(self._next, submission, excluded)
            finally:
                if given_up.is_set():
                    await asyncio.to_thread(self._withdraw)
        # RuntimeError: no thread can be started.
        except (HoldfastError, OSError, RuntimeError) as error:
            self._try_at_s = now_s + RETRY_S
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._observe("trouble", {"text": str(error)})
            return False
        if given_up.is_set():
            return False
        own = self._environment[ENV_JOB]
        details = {"job": own, "next": job_id, "excluded": sorted(excluded), "reached": reached}
        self._records.event(QUEUED_AGAIN, details)
        without = f" without {', '.join(sorted(excluded))}" if excluded else ""
        self.queued = (
            f"Nodes are missing. Slurm is to start job {own} again. If the cluster's Epilog does not have it do so, "
            f"the run goes on as Slurm job {job_id}{without} once job {own} has ended."
            if submission.is_expedited(self._environment)
            else f"Nodes are missing. The run is queued again as Slurm job {job_id}{without}."
        )
        return True

    def _withdraw(self) -> None:
        """Cancel the next job, since the run was stopped while the job was being submitted."""
        submission = Submission.read(self._paths)
        assert submission is not None
        jobs = self._jobs()
        later = submission.jobs[submission.jobs.index(self._environment[ENV_JOB]) + 1 :]
        try:
            # The answer to a submission, which has the job's id, may be lost.
            for job_id in (*later, *submission.lost_jobs(self._paths.run_id, jobs)):
                jobs.end(job_id)
        except HoldfastError as error:
            name = submission.job_name(self._paths.run_id)
            text = f"{error} A next job of the stopped run may wait: scancel --state=PENDING --name={name}"
            self._observe("trouble", {"text": text})

    def _excluded(
        self, connected: Collection[str], cordoned: Collection[str], waited_s: float
    ) -> set[str] | None:
        """Return the nodes that the next job must not use; None if no next job is due."""
        jobs = self._jobs()
        allocation = jobs.host_names(self._environment.get("SLURM_JOB_NODELIST", ""))
        # All nodes are checked, and not only `allocation`, because a cordoned node outside of the
        # allocation must not be used, either.
        states = read_slurm_nodes(command=jobs.command)
        due = is_due(
            allocation, connected, cordoned, states, nnodes=self._nnodes, waited_s=waited_s
        )
        gone = set(allocation) - set(connected)
        return (gone | set(cordoned)) & set(states) if due else None

    def _next(self, submission: Submission, excluded: Collection[str]) -> str:
        """Submit the next job unless an earlier supervisor has done so; return the id of the job."""
        own, jobs = self._environment[ENV_JOB], self._jobs()
        newest = submission.jobs[-1]
        if newest != own and not jobs.state(newest).is_over:
            return newest
        return submit(submission, self._paths, self._cwd, jobs, after=own, exclude=excluded).jobs[
            -1
        ]
