"""Write a story as lines of text, for a terminal or a message."""

from collections.abc import Iterator, Mapping

from holdfast.core import words
from holdfast.core.accounting import LOST_CAUSES, LostCause, gpu_hours
from holdfast.core.explanation.story import Decision, IncidentStory, RunStory

EVIDENCE_SHOWN = 5
"""The number of cited lines shown of an incident; `holdfast incidents show` shows all."""


def story_lines(story: RunStory, state: str | None = None) -> Iterator[str]:
    """Yield the lines of the whole story of a run.

    Args:
        story: the story of the run.
        state: the state of the run to show, such as "lost" if the run's processes have died; None:
            show the state in the ledger.
    """
    summary = story.summary
    run = summary.run
    ranks = words.plainly(summary.world_size or 1, "rank")
    yield f"Run {run.run_id}, {ranks}, started {words.moment(run.started_at_s)}: {_state(story, state)}"
    for one in story.chain:
        yield ""
        if isinstance(one, IncidentStory):
            yield from incident_lines(one)
        else:
            yield f"{words.moment(one.at_s)}  {one.text}"
    yield ""
    if run.outcome:
        yield f"The end: {' '.join(words.clean(run.outcome).split())}"
        yield ""
    yield from account_lines(story)


def _state(story: RunStory, shown: str | None) -> str:
    state, count = shown or story.summary.run.state, len(story.incidents)
    faults = words.plainly(count, "incident") if count else "no incident"
    lasted = _plain(words.duration(story.summary.wall_s))
    step = f"step {story.summary.final_step}"
    if state == "running":
        return f"still going after {lasted}, {faults} so far, {step}."
    return f"{state} after {lasted}, {faults}, {step}."


def incident_lines(story: IncidentStory) -> Iterator[str]:
    """Yield the lines of one incident, from the failure to the lost time."""
    node = "" if story.node is None or story.what.startswith("Node") else f", on node {story.node}"
    number = "" if story.incident_id is None else f" (incident {story.incident_id})"
    yield f"{words.moment(story.at_s)}  {story.what}{node}, {story.place}{number}."
    detected = _plain(words.duration(story.detected_after_s))
    yield f"  seen      {detected} after it happened, in attempt {story.attempt}"
    if story.signals is not None:
        yield f"  looked at {'; '.join(story.signals.looked_at) or 'nothing'}"
        if story.signals.not_seen:
            yield f"  not seen  {'; '.join(story.signals.not_seen)}"
    sure = "" if story.confidence is None else f" (confidence {story.confidence:.2f})"
    yield f"  cause     {story.cause}{sure}"
    for line in story.evidence[:EVIDENCE_SHOWN]:
        yield f"  evidence  {line.role}: {line.place}: {line.text}"
    if len(story.evidence) > EVIDENCE_SHOWN:
        more = words.plainly(len(story.evidence) - EVIDENCE_SHOWN, "more line")
        yield f"            {more}: holdfast incidents show {story.incident_id}"
    for decision in story.decisions:
        yield f"  decided   {_decided(decision)}"
    yield f"  done      {story.done}"
    yield f"  effect    {story.check}"
    yield f"  lost      {lost_line(story)}"


def _decided(decision: Decision) -> str:
    plan = decision.plan
    explanation = " ".join(words.clean(str(plan.get("explanation") or "")).split())
    mode = "" if decision.mode == "act" else f" [mode {decision.mode}]"
    rule = f" Rule: {decision.rule}." if decision.rule else ""
    return f"{plan.get('action', '?')}.{f' {explanation}' if explanation else ''}{rule}{mode}"


def lost_line(story: IncidentStory) -> str:
    """Return the seconds and GPU-hours that an incident cost, in total and by cause."""
    total_s = sum(story.lost.values())
    if total_s <= 0:
        return "nothing"
    ranks = total_s / story.lost_s if story.lost_s > 0 else 1.0
    parts = ", ".join(
        f"{_name(cause)} {_plain(words.duration(value_s / ranks))}"
        for cause, value_s in story.lost.items()
    )
    again = f"; {words.plainly(story.steps_again, 'step')} again" if story.steps_again else ""
    return f"{_plain(words.duration(story.lost_s))}, {story.lost_gpu_hours:.3g} GPU-hours: {parts}{again}"


def account_lines(story: RunStory) -> Iterator[str]:
    """Yield a table of the time of all ranks by cause, one line for each cause."""
    lost = story.summary.lost_time
    if lost.total_s <= 0:
        return
    yield f"Where the time of {words.plainly(lost.ranks, 'rank')} went (mean of the ranks; a rank counts as one GPU):"
    ordered = in_order(lost.by_cause)
    unit, size_s = words.unit_of_time(lost.total_s / lost.ranks)
    for cause, rank_s in ordered.items():
        share = rank_s / lost.total_s
        yield (
            f"  {_name(cause):<14}{rank_s / lost.ranks / size_s:>10.2f} {unit}{share:>8.1%}"
            f"{gpu_hours(rank_s):>12.4g} GPU-hours  {LOST_CAUSES[cause]}"
        )
    total = lost.total_s / lost.ranks / size_s
    yield f"  {'in all':<14}{total:>10.2f} {unit}{1:>8.1%}{gpu_hours(lost.total_s):>12.4g} GPU-hours"


def in_order(seconds: Mapping[LostCause, float]) -> dict[LostCause, float]:
    """Return the seconds by cause, sorted in the order of `LOST_CAUSES`."""
    return {cause: seconds[cause] for cause in LOST_CAUSES if cause in seconds}


def _name(cause: LostCause) -> str:
    return cause.replace("_", " ")


def _plain(text: str) -> str:
    return text.replace(words.NBSP, " ")
