"""Watch the present replay, and record the class of the broken loss that follows from it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.explanation import CLASSES
from holdfast.recover.detectors.anomaly import Anomaly
from holdfast.recover.recorder import Recorder
from holdfast.recover.replay.classes import Finding, of_failure, of_passed
from holdfast.recover.replay.traces import KINDS, Trace, steps_of, traces_of

REPLAY = "replay"
"""The kind of the event that records the decision for a replay. Its data are `incident_id` and
`anomaly`."""
CLASSIFIED = "anomaly_class"
"""The kind of the event that records the class of a broken loss.

Its data are `incidents`, `attempts`, and the values of `Finding.to_json`.
"""
CLOSE_S = 10.0
"""The longest time, in seconds, for which the end of a run waits for a finding."""
CANNOT_READ = "The records of the steps cannot be read, so the cause cannot be determined."


class Replays:
    """The replays of one run, one at a time."""

    def __init__(
        self,
        recorder: Recorder,
        journal: Path,
        *,
        observe: Callable[[str, Mapping[str, Any]], None] = lambda _kind, _data: None,
    ) -> None:
        """Continue with the replay of an earlier supervisor, if there is one.

        Args:
            recorder: the recorder of the run.
            journal: the journal of the run's steps.
            observe: receives the events of the run.
        """
        self._recorder = recorder
        self._journal = journal
        self._observe = observe
        self._suspects: dict[str, None] = {}
        self._replayed: tuple[int, int | None, Anomaly] | None = None
        """The attempt and incident of the broken loss that the present replay is about, and the
        loss."""
        self._deciding: asyncio.Task[None] | None = None
        for kind, attempt, data in recorder.events(REPLAY, CLASSIFIED, "begun"):
            self._replayed = None
            if kind == REPLAY:
                self._replayed = attempt, data.get("incident_id"), Anomaly.of_json(data["anomaly"])

    def begin(self, incident_id: int | None, anomaly: Anomaly) -> None:
        """Record that the next attempt is a replay of the steps of a broken loss."""
        self._replayed = self._recorder.attempt, incident_id, anomaly
        self._recorder.event(REPLAY, {"incident_id": incident_id, "anomaly": anomaly.to_json()})

    async def failed(self, attempt: int) -> Finding:
        """Return the class of the broken loss that has ended an attempt, or the needed replay."""
        return await asyncio.to_thread(self._of_failure, attempt)

    def passed(self, step: int) -> None:
        """Record that a replay has completed a step, and shows no sign of a broken loss."""
        if self._replayed is None or self._deciding is not None:
            return
        attempt, _, anomaly = self._replayed
        if step <= anomaly.step or attempt == self._recorder.attempt:
            return
        now = self._recorder.attempt
        self._decide(lambda: self._of_passed(attempt, now))

    def accepted(self, anomaly: Anomaly) -> None:
        """Record that a loss has broken in a replay, but training continues from there."""
        if self._replayed is not None and self._deciding is None:
            now = self._recorder.attempt
            self._decide(lambda: self._of_failure(now, anomaly))

    def found(self, finding: Finding, incident_id: int | None, attempt: int) -> None:
        """Record the class of an attempt's broken loss; it also applies to the loss before a replay."""
        attempts, incidents = [attempt], [incident_id]
        if self._replayed is not None:
            attempts.insert(0, self._replayed[0])
            incidents.insert(0, self._replayed[1])
        self._record(finding, attempts, incidents)

    def take_suspects(self) -> list[str]:
        """Return the nodes whose hardware may have broken a loss since the last call."""
        names, self._suspects = list(self._suspects), {}
        return names

    async def close(self, *, leads: bool) -> None:
        """Wait for the present finding, for at most `CLOSE_S`.

        Args:
            leads: False if another supervisor leads now. That supervisor makes the finding.
        """
        if (deciding := self._deciding) is None:
            return
        if leads:
            await asyncio.wait([deciding], timeout=CLOSE_S)
        deciding.cancel()

    def _decide(self, find: Callable[[], Finding]) -> None:
        assert self._replayed is not None
        attempt, incident_id, _ = self._replayed

        async def decide() -> None:
            try:
                finding = await asyncio.to_thread(find)
                if not finding.replays:
                    self._record(finding, [attempt], [incident_id])
            finally:
                self._deciding = None

        self._deciding = asyncio.create_task(decide())

    def _record(
        self, finding: Finding, attempts: Sequence[int], incidents: Sequence[int | None]
    ) -> None:
        assert finding.kind is not None
        self._replayed = None
        ids = [one for one in incidents if one is not None]
        data = {"attempts": list(attempts), "incidents": ids, **finding.to_json()}
        self._recorder.event(CLASSIFIED, data)
        explanation = f"{CLASSES[finding.kind]} {finding.evidence}"
        for one in ids:
            self._recorder.classified(one, finding.to_json(), explanation)
        self._observe("anomaly_class", {"text": explanation, "class": finding.kind})
        if finding.kind == "hardware":
            self._suspects |= dict.fromkeys(finding.suspects)

    def _of_failure(self, attempt: int, anomaly: Anomaly | None = None) -> Finding:
        """Return the finding about an attempt.

        Args:
            attempt: the attempt.
            anomaly: an anomaly that did not end the attempt, if it is not in the trace.
        """
        try:
            traces = {one.attempt: one for one in self._traces()}
            now = traces[attempt]
        except (HoldfastError, OSError, KeyError, TypeError, ValueError) as error:
            self._recorder.complain(f"{CANNOT_READ} {error}")
            return Finding(kind="cannot_tell", evidence=CANNOT_READ)
        now = now if anomaly is None else replace(now, anomaly=anomaly)
        if now.anomaly is None:
            return Finding(kind="cannot_tell", evidence=CANNOT_READ)
        return of_failure(now, [one for one in traces.values() if one.attempt < attempt])

    def _of_passed(self, attempt: int, now: int) -> Finding:
        try:
            traces = {one.attempt: one for one in self._traces()}
            broken, passed = traces[attempt], traces[now]
        except (HoldfastError, OSError, KeyError, TypeError, ValueError) as error:
            self._recorder.complain(f"{CANNOT_READ} {error}")
            return Finding(kind="cannot_tell", evidence=CANNOT_READ)
        earlier = [one for one in traces.values() if one.attempt < now]
        if passed.left_out != broken.left_out or broken.anomaly is None:
            why = "The replay trained on other data, since batches are left out."
            return Finding(kind="cannot_tell", evidence=why)
        return of_passed(broken, passed, earlier)

    def _traces(self) -> list[Trace]:
        events = self._recorder.events(*KINDS)
        return traces_of(self._recorder.attempts(), events, steps_of(self._journal))


def without_an_older_file(finding: Finding, step: int | None) -> Finding:
    """Return the finding for a job that can only go back to `step`.

    If there is no older file, a replay cannot show that a file is damaged.
    """
    file = finding.before_step
    if not finding.replays or file is None or (step is not None and step < file):
        return finding
    why = f"The loss broke again with the same numbers; no healthy checkpoint from before step {file} is there"
    evidence = f"{why} to separate the data from that checkpoint."
    return replace(finding, kind="cannot_tell", evidence=evidence, before_step=None)
