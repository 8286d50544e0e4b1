"""Handle incidents one after another, from the failure to the first step after the restart."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core.clock import Clock
from holdfast.core.errors import HoldfastError
from holdfast.core.explanation import CLASSES
from holdfast.core.ledger import Incident
from holdfast.core.telemetry import StepRecord
from holdfast.diagnose import Diagnosis, diagnose
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.detectors.anomaly import Anomaly
from holdfast.recover.follower import LogFollower
from holdfast.recover.gate import NOT_HEALTHY
from holdfast.recover.losses import Losses
from holdfast.recover.recorder import Recorder
from holdfast.recover.replay.classes import Finding
from holdfast.recover.replay.replays import without_an_older_file


class Casework:
    """The incident that is being handled, if there is one."""

    def __init__(
        self,
        run_id: str,
        recorder: Recorder,
        losses: Losses,
        clock: Clock,
        observe: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._run_id = run_id
        self._recorder = recorder
        self._losses = losses
        self._anomaly: Anomaly | None = None
        """The broken loss of the incident."""
        self._clock = clock
        self._observe = observe
        self._detected = (0.0, 0.0)
        """The times when the fault happened and when the fault was seen, in Unix seconds."""
        self._failed_after: int | None = None
        """The steps completed by then; ranks that do not wait for each other may report more steps
        before they are ended."""
        self._incident: Incident | None = None
        """None after the job trains again."""
        self._summary = ""

    def take_up(self) -> None:
        """Go on with an earlier supervisor's incident, if no step was completed since."""
        self._incident = self._recorder.open_incident()

    def begin(self, view: AttemptView) -> None:
        """Record that an attempt has failed, as its view shows."""
        if view.frozen is not None or view.anomaly is not None:
            self._recorder.ends(view.frozen, view.anomaly)
        now_s = self._clock.now_s()
        fault_at_s = now_s
        if view.frozen is not None:
            fault_at_s = now_s - view.frozen.waited_s
        elif view.culprit is not None:
            fault_at_s = now_s - self._clock.monotonic_s() + view.culprit.at_monotonic_s
        self._detected = (fault_at_s, now_s)
        # The ranks go on until they are killed, so that only the step of the anomaly is the same
        # each time.
        self._failed_after = view.steps_completed if view.anomaly is None else view.anomaly.step
        data = {
            "kind": view.kind_of_failure,
            "rank": None if view.in_doubt else view.blamed_rank,
        }
        self._observe("incident", data)

    async def diagnose(self, view: AttemptView, logs: LogFollower) -> policy.Diagnosed:
        """Find the cause of the failure, abandon broken state, and record the incident."""
        context = view.context()
        try:
            diagnosis = await asyncio.to_thread(logs.diagnosis, context)
        except Exception as error:
            # Logs are untrusted: a run does not end because they could not be read.
            self._observe(
                "trouble", {"text": f"The diagnosis failed: {type(error).__name__}: {error}."}
            )
            diagnosis = diagnose([], context)
        checkpoint_step, mitigation = self._recorder.checkpoint_step, diagnosis.mitigation
        self._anomaly, finding = view.anomaly, None
        if view.anomaly is not None:
            finding = await self._losses.replays.failed(view.number)
            checkpoint_step = await self._roll_back(view.anomaly, finding)
            finding = without_an_older_file(finding, checkpoint_step)
            if checkpoint_step is None:
                mitigation = f"{NOT_HEALTHY} {mitigation}"
        fault_at_s, detected_at_s = self._detected
        incident = Incident(
            run_id=self._run_id,
            attempt=view.number,
            kind=view.kind_of_failure,
            rank=_rank_at_fault(view, diagnosis),
            step=self._failed_after,
            fault_at_s=fault_at_s,
            detected_at_s=detected_at_s,
            diagnosis=diagnosis.to_json(),
        )
        self._incident = replace(incident, incident_id=self._recorder.incident(incident))
        self._summary = diagnosis.summary
        if view.frozen is not None and view.frozen.only_silence:  # the job may have been at work
            self._summary += f" {diagnosis.mitigation}"
        if finding is not None and finding.kind is not None:
            self._losses.replays.found(finding, self._incident.incident_id, view.number)
        failure = view.failure(
            diagnosis,
            step=self._failed_after,
            checkpoint_step=checkpoint_step,
            mitigation=mitigation,
        )
        return failure if finding is None else _with_finding(failure, finding)

    def suspects(self) -> Sequence[str]:
        """Return the nodes whose hardware may have broken a loss, once."""
        return self._losses.replays.take_suspects()

    def replay(self) -> None:
        """Begin a replay: the next attempt runs the steps of the incident's broken loss again."""
        if self._incident is not None and self._anomaly is not None:
            self._losses.replays.begin(self._incident.incident_id, self._anomaly)

    async def _roll_back(self, anomaly: Anomaly, finding: Finding) -> int | None:
        """Abandon state that may be broken.

        Return the healthy checkpoint's step, None without one.
        """
        try:
            step = await self._losses.go_back(anomaly, finding)
        except (HoldfastError, OSError) as error:
            self._observe("trouble", {"text": f"The job cannot go back to a checkpoint: {error}."})
            return None
        self._recorder.rolled_back(anomaly.to_json(), step)
        return step

    @property
    def incident(self) -> Incident | None:
        """Return the incident that is being handled."""
        return self._incident

    def add(self, sentences: Sequence[str]) -> None:
        """Add the findings of node tests to the explanation of the incident."""
        incident = self._incident
        if incident is None or not sentences:
            return
        explanation = " ".join((incident.explanation, *sentences)).strip()
        self._incident = replace(incident, explanation=explanation)
        resolve = policy.Resolve(action=incident.action, explanation=explanation)
        self._recorder.resolved(incident.incident_id, resolve)

    def resolve(self, resolve: policy.Resolve) -> None:
        """Record the action taken on the incident."""
        assert self._incident is not None
        self._incident = replace(
            self._incident, action=resolve.action, explanation=resolve.explanation
        )
        incident_id = self._incident.incident_id
        self._recorder.resolved(incident_id, resolve)
        data = {"incident_id": incident_id, "summary": self._summary}
        self._observe(
            "resolved", {**data, "action": resolve.action, "explanation": resolve.explanation}
        )

    def stepped(self, record: StepRecord, start_step: int) -> None:
        """Record the first step of an attempt, which ends the incident before that attempt."""
        incident, self._incident = self._incident, None
        if incident is None:
            return
        self._recorder.resumed(incident.incident_id, record.at_s, start_step)
        seconds = record.at_s - incident.detected_at_s
        data = {"step": record.step, "restored_step": start_step, "seconds_to_restart": seconds}
        self._observe("resumed", data)


def _with_finding(failure: policy.Diagnosed, finding: Finding) -> policy.Diagnosed:
    cause = "" if finding.kind is None else f"{CLASSES[finding.kind]} {finding.evidence}"
    return replace(
        failure,
        replays=finding.replays,
        is_hardware=finding.kind == "hardware",
        is_checkpoint=finding.kind == "checkpoint",
        because=cause,
    )


def _rank_at_fault(view: AttemptView, diagnosis: Diagnosis) -> int | None:
    """Return the rank at fault.

    Only logs show if a rank that ended with code 0 ended the others.
    """
    rank = diagnosis.scope.get("rank")
    left = diagnosis.decided_by[:1] == ("observer-left",) and isinstance(rank, int)
    return rank if left else view.blamed_rank
