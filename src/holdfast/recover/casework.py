"""Handle incidents one after another, each from the failure to the first step after the restart."""

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
    """Handle the incidents of a run, one at a time."""

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
        """The broken loss of the incident, if there is one."""
        self._clock = clock
        self._observe = observe
        self._detected = (0.0, 0.0)
        """The times at which the fault happened and was detected, in Unix seconds."""
        self._failed_after: int | None = None
        """The number of steps completed at that time. Ranks that do not wait for each other may
        report more steps before they are ended."""
        self._incident: Incident | None = None
        """The open incident; None once the job trains again."""
        self._summary = ""

    def take_up(self) -> None:
        """Continue with the incident of an earlier supervisor, if no step was completed since then."""
        self._incident = self._recorder.open_incident()

    def begin(self, view: AttemptView) -> None:
        """Begin an incident, since the attempt of `view` has failed."""
        if view.frozen is not None or view.anomaly is not None:
            self._recorder.ends(view.frozen, view.anomaly)
        now_s = self._clock.now_s()
        fault_at_s = now_s
        if view.frozen is not None:
            fault_at_s = now_s - view.frozen.waited_s
        elif view.culprit is not None:
            fault_at_s = now_s - self._clock.monotonic_s() + view.culprit.at_monotonic_s
        self._detected = (fault_at_s, now_s)
        # Use the step of the anomaly: the ranks continue after the anomaly until they are killed,
        # and the step at which they are killed varies.
        self._failed_after = view.steps_completed if view.anomaly is None else view.anomaly.step
        data = {
            "kind": view.kind_of_failure,
            "rank": None if view.in_doubt else view.blamed_rank,
        }
        self._observe("incident", data)

    async def diagnose(self, view: AttemptView, logs: LogFollower) -> policy.Diagnosed:
        """Find the cause of the failure, abandon broken checkpoints, and record the incident."""
        context = view.context()
        try:
            diagnosis = await asyncio.to_thread(logs.diagnosis, context)
        except Exception as error:
            # A run must not end because its logs, which may contain anything, could not be read.
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
        if view.frozen is not None and view.frozen.only_silence:  # the job may have been working
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
        """Return the nodes whose hardware may have broken a loss, and forget them."""
        return self._losses.replays.take_suspects()

    def replay(self) -> None:
        """Begin a replay, in which the next attempt repeats the steps of the incident's broken loss."""
        if self._incident is not None and self._anomaly is not None:
            self._losses.replays.begin(self._incident.incident_id, self._anomaly)

    async def _roll_back(self, anomaly: Anomaly, finding: Finding) -> int | None:
        """Abandon checkpoints that may contain a broken state.

        Return the step of the newest healthy checkpoint; None if there is none.
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
        """The incident that is being handled; None if there is none."""
        return self._incident

    @property
    def evidence(self) -> list[str]:
        """The lines that prove the cause of the incident that is being handled."""
        found = [] if self._incident is None else self._incident.diagnosis.get("evidence") or []
        return [str(one.get("text", "")) for one in found]

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
        """Record the action that was taken on the incident."""
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
        """Record the first step of an attempt, which ends the incident before the attempt."""
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
    """Return the rank at which the failure began.

    If a rank ended with code 0, only logs show if it caused the failures of the others.
    """
    rank = diagnosis.scope.get("rank")
    left = diagnosis.decided_by[:1] == ("observer-left",) and isinstance(rank, int)
    return rank if left else view.blamed_rank
