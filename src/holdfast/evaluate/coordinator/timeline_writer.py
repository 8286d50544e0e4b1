"""Write the activities that the coordinator observes into the timeline."""

from holdfast.core.clock import Clock
from holdfast.evaluate.coordinator.open_requests import OpenRequest, OpenSample
from holdfast.evaluate.types.timeline import (
    Begin,
    End,
    EngineSpan,
    MetricSpan,
    ModelSpan,
    NodeSpan,
    RequestSpan,
    TaskSpan,
    TimelineFile,
)
from holdfast.evaluate.wire import messages


class TimelineWriter:
    """Append spans, with times in seconds since the evaluation's first start.

    Args:
        timeline: the timeline's file.
        clock: the clock of the monotonic times that the methods receive.
        started_at_s: the wall time of the first start, to which the clocks of restarted
            coordinators are aligned.
    """

    def __init__(self, timeline: TimelineFile, clock: Clock, started_at_s: float) -> None:
        self._timeline, self._clock = timeline, clock
        self._zero_s = clock.monotonic_s() - max(0.0, clock.now_s() - started_at_s)

    def since_start_s(self, monotonic_s: float) -> float:
        """Convert a time of the monotonic clock to seconds since the first start."""
        return max(0.0, monotonic_s - self._zero_s)

    def begin(self, started_at_s: float, suite: str, tasks: list[str], restarts: int) -> None:
        """Record that the coordinator started."""
        self._timeline.append(
            Begin(started_at_s=started_at_s, suite=suite, tasks=tasks, restarts=restarts)
        )

    def engine(self, what: str, *, engine: int, node: int, model: int, since_s: float) -> None:
        """Record an activity of an engine that lasted from `since_s` until now."""
        t0, t1 = self._until_now(since_s)
        self._timeline.append(
            EngineSpan(
                what=what,  # type: ignore[arg-type]
                engine=engine,
                node=node,
                model=model,
                t0=t0,
                t1=t1,
            )
        )

    def node(
        self,
        what: str,
        *,
        node: int,
        since_s: float,
        host: str = "",
        fetched: messages.ModelFetched | None = None,
    ) -> None:
        """Record an activity of a node that lasted from `since_s` until now."""
        t0, t1 = self._until_now(since_s)
        line = NodeSpan(what=what, node=node, host=host, t0=t0, t1=t1)  # type: ignore[arg-type]
        if fetched is not None:
            line = NodeSpan(
                what="fetch",
                node=node,
                host=host,
                model=fetched.model,
                remote_bytes=fetched.remote_bytes,
                peer_bytes=fetched.peer_bytes,
                t0=t0,
                t1=t1,
            )
        self._timeline.append(line)

    def request(
        self, engine: int, request: OpenRequest, done: messages.DoneRequest, written_s: float
    ) -> None:
        """Record an engine's work on a request.

        `done` has times of the engine's clock, and `written_s` is the time of that clock when the
        engine sent the message.
        """
        ahead_s = self._clock.monotonic_s() - written_s
        sample = request.samples[0] if request.samples else None
        self._timeline.append(
            RequestSpan(
                engine=engine,
                model=request.model,
                task=sample.task if sample else 0,
                sample=sample.place if sample else 0,
                prompt_tokens=request.prompt_tokens,
                new_tokens=done.new_tokens,
                error=done.error,
                t0=self.since_start_s(done.started_s + ahead_s),
                t1=self.since_start_s(done.finished_s + ahead_s),
            )
        )

    def metric(self, node: int, sample: OpenSample, seconds: float, error: str) -> None:
        """Record a metric whose computation took `seconds` and ends now."""
        t0, t1 = self._until_now(self._clock.monotonic_s() - seconds)
        self._timeline.append(
            MetricSpan(
                node=node,
                model=sample.model,
                task=sample.task,
                sample=sample.place,
                error=error,
                t0=t0,
                t1=t1,
            )
        )

    def task(
        self, outcome: messages.TaskOutcome, *, since_s: float, samples: int, reused: int
    ) -> None:
        """Record a task that ran from `since_s` until now."""
        t0, t1 = self._until_now(since_s)
        self._timeline.append(
            TaskSpan(
                model=outcome.model,
                task=outcome.task,
                samples=samples,
                reused=reused,
                error=outcome.error,
                t0=t0,
                t1=t1,
            )
        )

    def model(self, name: str, outcome: messages.ModelOutcome, since_s: float) -> None:
        """Record a model whose evaluation lasted from `since_s` until now."""
        t0, t1 = self._until_now(since_s)
        self._timeline.append(
            ModelSpan(
                model=outcome.model,
                name=name,
                digest=outcome.digest,
                error=outcome.error,
                t0=t0,
                t1=t1,
            )
        )

    def end(self, state: str) -> None:
        """Record that the evaluation ended, and how: `state` is "done", "failed" or "stopped"."""
        now_s = self.since_start_s(self._clock.monotonic_s())
        self._timeline.append(End(state=state, t1=now_s))  # type: ignore[arg-type]

    def flush(self) -> None:
        """Write the buffered lines."""
        self._timeline.flush()

    def close(self) -> None:
        """Close the file."""
        self._timeline.close()

    def _until_now(self, since_s: float) -> tuple[float, float]:
        now_s = self._clock.monotonic_s()
        return self.since_start_s(min(since_s, now_s)), self.since_start_s(now_s)
