"""The page of a run and the page of an incident, as plain values: the same for HTML and JSON."""

import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from holdfast.core.accounting import RunSummary
from holdfast.core.errors import HoldfastError, NotFound
from holdfast.core.explanation import IncidentStory
from holdfast.core.ledger import Checkpoint, Run
from holdfast.ui.console import drawing
from holdfast.ui.console.backend import Backend
from holdfast.ui.console.journal import Journals, Series
from holdfast.ui.console.logs import surroundings
from holdfast.ui.console.queries.paging import LIMIT_S
from holdfast.ui.console.queries.run import RunRecords, run_of_incident, seen_of_verdict
from holdfast.ui.console.usage import Usage

CHAIN_LIMIT = 100
EVIDENCE_LIMIT = 25
CHECKPOINTS_SHOWN = 50


class RunPages:
    """Builds the pages of runs and incidents from bounded reads."""

    def __init__(self, backend: Backend, journals: Journals) -> None:
        self._backend = backend
        self._journals = journals
        self._usage = Usage(backend.profile_of)

    def records(self, run_id: str) -> RunRecords:
        """Return the newest records of a run.

        Raises:
            NotFound: the ledger has no such run.
            TooSlow: the ledger did not answer in time.
        """
        with self._backend.ledger.bounded_reading(LIMIT_S) as connection:
            return RunRecords(connection, run_id)

    def run(self, run_id: str) -> dict[str, Any]:
        """Return the page of a run."""
        found, series = self.records(run_id), self._journals.of(run_id)
        summary = found.summary(series.steps)
        story = found.story(summary)
        has_every_step = not (series.left_out or series.unread_bytes or series.damaged_lines)
        is_whole = found.is_whole and has_every_step
        chain = [
            {"kind": "incident", **_incident(one, found)} if isinstance(one, IncidentStory)
            else {"kind": "note", **asdict(one)}
            for one in story.chain[-CHAIN_LIMIT:]
        ]  # fmt: skip
        run, state = (
            found.run,
            self._backend.state_of(found.run.run_id, found.run.state, found.run.host),
        )
        last = series.steps[-1] if series.steps else None
        return {
            "run": {
                "run_id": run.run_id, "state": state, "command": shlex.join(run.command), "host": run.host,
                "cwd": run.cwd, "started_at_s": run.started_at_s, "ended_at_s": run.ended_at_s,
                "exit_code": run.exit_code, "outcome": run.outcome, "mode": run.options.get("mode", "act"),
            },
            "seen": found.seen,
            "is_whole": is_whole,
            "unread_bytes": series.unread_bytes,
            "damaged_lines": series.damaged_lines,
            "figures": _figures(summary, is_whole=is_whole),
            "newest_step": None if last is None else
                {"step": last.step, "at_s": last.at_s, "loss": last.loss, "metrics": dict(last.metrics)},
            "proposal": found.proposal,
            "actions": possible(state, found),
            "chain": chain,
            "chain_left_out": max(0, len(story.chain) - CHAIN_LIMIT),
            "attempts": [asdict(one) for one in found.attempts],
            "checkpoints": [_checkpoint(one, run) for one in reversed(found.checkpoints[-CHECKPOINTS_SHOWN:])],
            "marks": marks(summary, series),
        }  # fmt: skip

    def loss(self, run_id: str) -> dict[str, Any]:
        """Return a run's loss: `lines` per attempt, `marks`, and `width`, the steps per point."""
        found, series = self.records(run_id), self._journals.of(run_id)
        return {
            "lines": series.lines(),
            "marks": marks(found.summary(series.steps), series),
            "width": series.width,
            "unread_bytes": series.unread_bytes,
        }

    def profile(self, run_id: str) -> dict[str, Any]:
        """Return the `curves` of a run's profile.

        Raises:
            NotFound: the ledger has no such run.
        """
        self.records(run_id)
        return {"curves": list(self._usage.of(run_id))}

    def incident(self, incident_id: int) -> dict[str, Any]:
        """Return the page of an incident.

        Raises:
            NotFound: the ledger has no such incident, or the run has too many newer incidents.
        """
        with self._backend.ledger.bounded_reading(LIMIT_S) as connection:
            run_id = run_of_incident(connection, incident_id)
            found = RunRecords(connection, run_id)
        story = found.story(found.summary(self._journals.of(run_id).steps))
        for one in story.incidents:
            if one.incident_id == incident_id:
                shown = _incident(one, found)
                for line in shown["evidence"][:3]:
                    line["around"] = surroundings(self._backend.home, run_id, line["place"])
                return {
                    "run_id": run_id,
                    "incident": shown,
                    "seen": seen_of_verdict(found.verdicts.get(incident_id)),
                    "reasons": list(self._backend.reasons()),
                }
        raise NotFound(
            f"Incident {incident_id} is not among the newest of run {run_id}: holdfast incidents show {incident_id}"
        )

    def drawings(self, page: dict[str, Any]) -> dict[str, Any]:
        """Return the drawings of the page of a run, for a browser without scripts."""
        run_id, run = page["run"]["run_id"], page["run"]
        series = self._journals.of(run_id)
        found = self.records(run_id)
        end_s = run["ended_at_s"] or time.time()
        happened = [
            {
                "at_s": one["at_s"],
                "attempt": one["attempt"],
                "number": one["number"],
                "label": one["what"],
            }
            for one in page["chain"]
            if one["kind"] == "incident"
        ]
        line = drawing.time_line(found.attempts, happened, start_s=run["started_at_s"], end_s=end_s)
        usage: list[dict[str, Any]] = []
        trouble = ""
        try:
            usage = [_total(one) for one in self._usage.of(run_id)]
        except HoldfastError as error:
            trouble = str(error)
        return {
            "loss": drawing.loss_chart(series.lines(), page["marks"]),
            "time": line,
            "usage": usage,
            "usage_trouble": trouble,
        }


def _total(curve: Mapping[str, Any]) -> dict[str, Any]:
    """Return a profile curve as one row of a table."""
    count = len(curve["mean"])
    return {
        **{name: curve[name] for name in ("metric", "unit", "meaning", "series")},
        "low": min(curve["low"]),
        "mean": sum(curve["mean"]) / count,
        "high": max(curve["high"]),
        "from_s": curve["times_s"][0],
        "to_s": curve["times_s"][-1],
    }


def _figures(summary: RunSummary, *, is_whole: bool) -> dict[str, Any]:
    """Return the figures of a run; the accounts only if every record was read."""
    return {
        "attempts": len(summary.attempts),
        "incidents": len(summary.incidents),
        "interventions": summary.interventions if is_whole else None,
        "final_step": summary.final_step,
        "median_step_s": summary.median_step_s,
        "wall_s": summary.wall_s,
        "ettr": summary.ettr if is_whole else None,
        "steps_lost": summary.steps_lost if is_whole else None,
        "ranks": summary.world_size,
    }


def _incident(one: IncidentStory, found: RunRecords) -> dict[str, Any]:
    verdict = found.verdicts.get(one.incident_id or 0)
    stated = None if verdict is None or not verdict.verdict else verdict
    record = next((each for each in found.incidents if each.incident_id == one.incident_id), None)
    return {
        "number": one.number,
        "incident_id": one.incident_id,
        "attempt": one.attempt,
        "what": one.what,
        "at_s": one.at_s,
        "detected_after_s": one.detected_after_s,
        "rank": one.rank,
        "node": one.node,
        "step": one.step,
        "cause": one.cause,
        "confidence": one.confidence,
        "evidence": [asdict(line) for line in one.evidence[:EVIDENCE_LIMIT]],
        "advice": one.advice,
        "looked_at": list(one.signals.looked_at) if one.signals else [],
        "not_seen": list(one.signals.not_seen) if one.signals else [],
        "decisions": [
            {"mode": each.mode, "action": str(each.plan.get("action", "")), "rule": each.rule,
             "why": str(each.plan.get("explanation", ""))}
            for each in one.decisions
        ],
        "done": one.done,
        "check": one.check,
        "is_settled": one.is_settled,
        "lost_gpu_hours": one.lost_gpu_hours,
        "steps_again": one.steps_again,
        "restored_step": None if record is None else record.restored_step,
        "kind_of_failure": "" if record is None else record.kind,
        "verdict": None if stated is None else
            {"verdict": stated.verdict, "true_reason": stated.true_reason, "by": stated.judged_by,
             "at_s": stated.judged_at_s},
    }  # fmt: skip


def _checkpoint(one: Checkpoint, run: Run) -> dict[str, Any]:
    is_stored = "://" in one.path
    path = one.path if is_stored or one.path.startswith("/") else f"{run.cwd}/{one.path}"
    return {
        **asdict(one),
        "tier": "object storage" if is_stored else "file system",
        "verify": f"holdfast checkpoint verify {shlex.quote(path)}",
        "restore": f"holdfast run --resume {run.run_id}",
    }


def possible(state: str, found: RunRecords) -> list[str]:
    """Return the actions that the run's state, `lost` included, allows."""
    possible = []
    if state in ("running", "queued"):
        possible.append("stop")
    if state in ("lost", "failed", "stopped"):
        possible.append("restart")
    if state == "running" and found.checkpoints:
        possible.append("roll-back")
    if found.proposal is not None:
        possible.append("approve")
    return possible


def marks(summary: RunSummary, series: Series) -> list[dict[str, Any]]:
    """Return the marks on the loss curve: `step`, `kind` (spike, rollback, restart), `label`."""
    made = []
    for cost in summary.incidents:
        incident = cost.incident
        if incident.step is None:
            continue
        is_spike = incident.kind == "anomaly"
        made.append(
            {
                "step": incident.step,
                "kind": "spike" if is_spike else "restart",
                "label": f"incident {cost.number}",
            }
        )
        if incident.restored_step is not None and incident.restored_step < incident.step:
            made.append(
                {
                    "step": incident.restored_step,
                    "kind": "rollback",
                    "label": f"back to {incident.restored_step}",
                }
            )
    made += [
        {"step": step, "kind": "spike", "label": f"no finite loss in attempt {attempt}"}
        for attempt, step in series.broken[-10:]
    ]
    return made
