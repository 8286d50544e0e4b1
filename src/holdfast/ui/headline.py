"""Compute the top of a run's report: one sentence, one line of context, the key figures."""

import statistics

from holdfast.core import words
from holdfast.core.accounting import RunSummary
from holdfast.core.page import KeyFigure


def headline(summary: RunSummary) -> str:
    """Return a run's result in one sentence.

    An example is `Survived 3 faults, nobody stepped in, weights identical`.
    """
    return _sentence(summary).replace(words.NBSP, " ")


def _sentence(summary: RunSummary) -> str:
    incidents = (
        words.count(len(summary.incidents), "incident") if summary.incidents else "No incidents"
    )
    people = words.count(summary.interventions, "person", "people")
    numbers = f"step {summary.final_step}, ETTR {words.percent(summary.ettr)}"
    match summary.run.state:
        case "running":
            return f"Still running, {incidents[0].lower()}{incidents[1:]} so far: {numbers}"
        case "queued":
            return f"Waits in the queue, {incidents[0].lower()}{incidents[1:]} so far: {numbers}"
        case "completed":
            if not summary.incidents:
                return f"Completed without an incident{_weights(summary)}: {numbers}"
            faults = words.count(len(summary.incidents), _incident(summary))
            people = "nobody" if not summary.interventions else people
            return f"Survived {faults}, {people} stepped in{_weights(summary)}"
        case "stopped":
            return f"Stopped on request, {incidents[0].lower()}{incidents[1:]}: state kept at {numbers}"
        case _:
            return f"Stopped after {incidents[0].lower()}{incidents[1:]}: state kept at {numbers}"


def _incident(summary: RunSummary) -> str:
    """Return the noun for the run's incidents: `fault` if faults were injected before all of them.

    Otherwise return `incident`.
    """
    injected = all(cost.injected for cost in summary.incidents)
    return "fault" if injected else "incident"


def _weights(summary: RunSummary) -> str:
    if summary.proof is None:
        return ""
    identical = summary.proof.get("identical") is True
    return ", weights identical" if identical else ", final weights DIFFER"


def context(summary: RunSummary) -> str:
    """Return a line with the run's name, ranks, wall time, number of attempts and start time."""
    ranks = f" on {words.count(summary.world_size, 'rank')}" if summary.world_size else ""
    attempts = words.count(len(summary.attempts), "attempt")
    return (
        f"Run {summary.run.run_id}{ranks}: {words.duration(summary.wall_s)} of wall time, {attempts}, "
        f"started {words.moment(summary.run.started_at_s)}."
    )


def key_figures(summary: RunSummary) -> list[KeyFigure]:
    """Return the key figures, which an engineer looks for first."""
    stalls = summary.checkpoints
    figures = [
        KeyFigure(
            name="Incidents",
            value=str(len(summary.incidents)),
            note=f"{words.count(summary.interventions, 'person', 'people')} stepped in",
        ),
        KeyFigure(
            name="ETTR",
            value=words.percent(summary.ettr),
            note=f"{words.duration(summary.breakdown.productive_s)} of {words.duration(summary.wall_s)}",
        ),
        KeyFigure(
            name="Steps lost",
            value=str(summary.steps_lost),
            note=f"of {words.count(summary.steps_executed, 'step')} executed",
        ),
        KeyFigure(
            name="Checkpoint stalls",
            value=words.percent(stalls.share_of_wall),
            note=f"{words.count(stalls.count, 'checkpoint')}, {words.duration(stalls.total_stall_s)} in all",
        ),
    ]
    if summary.incidents:
        restart_s = [
            cost.seconds_to_restart
            for cost in summary.incidents
            if cost.seconds_to_restart is not None
        ]
        detect = _spread("To detect", [cost.seconds_to_detect for cost in summary.incidents])
        figures[2:2] = [detect, _spread("To restart", restart_s)] if restart_s else [detect]
    return figures


def _spread(name: str, seconds: list[float]) -> KeyFigure:
    note = "the one incident"
    if len(seconds) > 1:
        note = f"median; longest {words.duration(max(seconds))}"
    return KeyFigure(name=name, value=words.duration(statistics.median(seconds)), note=note)
