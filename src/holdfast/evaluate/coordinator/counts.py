"""Count samples and requests: by task for the timeline, and in total for the display."""

from dataclasses import dataclass

from holdfast.evaluate.coordinator.engine_pool import EnginePool
from holdfast.evaluate.policy import outlook
from holdfast.evaluate.policy.state import State
from holdfast.evaluate.wire import messages


@dataclass
class TaskCounts:
    """The counts of one task so far; `since_s` is when its first sample was added."""

    since_s: float
    samples: int = 0
    reused: int = 0


class Counts:
    """Count samples, requests and reused answers."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[int, int], TaskCounts] = {}
        self._samples = self._requests = self._reused = 0
        self.requests_done = 0

    def add(self, model: int, task: int, *, requests: int, reused: int, now_s: float) -> None:
        """Count a new sample of a task; `reused` of its requests have an answer in the journal."""
        counts = self._tasks.setdefault((model, task), TaskCounts(since_s=now_s))
        counts.samples += 1
        counts.reused += reused
        self._samples += 1
        self._requests += requests
        self._reused += reused
        self.requests_done += reused

    def take(self, model: int, task: int, now_s: float) -> TaskCounts:
        """Return the counts of an ended task and forget them."""
        return self._tasks.pop((model, task), TaskCounts(since_s=now_s))

    def status(
        self,
        pool: EnginePool,
        state: State,
        *,
        now_s: float,
        delivered: int,
        answered_s: float,
        draining: bool,
    ) -> messages.Status:
        """Return the progress for the command's display.

        Args:
            pool: the engines and nodes.
            state: the state of the policy.
            now_s: seconds since the evaluation's first start.
            delivered: the number of samples delivered to their clients.
            answered_s: the engine-seconds that all answers so far cost in full batches.
            draining: True if engines get no more requests.
        """
        slots = [slot for slot in pool.slots.values() if not slot.is_spare]
        ready = [slot for slot in slots if slot.number is not None]
        return messages.Status(
            now_s=now_s,
            samples=self._samples,
            samples_done=delivered,
            requests=self._requests,
            requests_done=self.requests_done,
            reused=self._reused,
            engines=len(slots),
            engines_ready=len(ready),
            nodes=len(pool.nodes),
            busy_share=sum(bool(slot.sent) for slot in ready) / len(ready) if ready else 0.0,
            time_left_s=outlook.time_left_s(state),
            bound_s=outlook.bound_s(state, answered_s),
            state="draining" if draining else "running" if ready or pool.is_resting else "starting",
        )
