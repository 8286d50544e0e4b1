"""Decide which incidents a message is due for, and put the message into words. Pure.

The first incident has a message of its own as soon as it is over. What follows within `STORM_S` of a message is a
storm: one message sums up its incidents once none has come for `STORM_S`, each `STORM_MAX_S` at least, and when the run
ends.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.core import words
from holdfast.core.explanation import IncidentStory, RunStory
from holdfast.core.explanation.telling import lost_line

STORM_S = 600.0
STORM_MAX_S = 3600.0
EVIDENCE_SENT = 3
INCIDENTS_SENT = 10
"""So many incidents of a storm have a line of their own, the last ones."""
BODY_LIMIT = 4000
"""Characters of a message."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """One incident, as far as messages are concerned. Unix seconds."""

    incident_id: int
    detected_at_s: float
    over_at_s: float | None
    """When the job trained again, failed again, or the run ended; None before that."""


def due(
    unsent: Sequence[Known], *, last_sent_s: float | None, now_s: float, is_over: bool
) -> tuple[tuple[int, ...], float | None]:
    """Return the incidents that one message is due for now, and otherwise when it will be due.

    Args:
        unsent: the incidents without a message, in order.
        last_sent_s: when the last message was sent.
        now_s: the present time.
        is_over: whether the run has ended.
    """
    if not unsent:
        return (), None
    everything = tuple(one.incident_id for one in unsent)
    if is_over:
        return everything, None
    over = [(one.incident_id, one.over_at_s) for one in unsent if one.over_at_s is not None]
    if not over:
        return (), None
    over_s = [at_s for _, at_s in over]
    ids = tuple(incident_id for incident_id, _ in over)
    in_storm = last_sent_s is not None and unsent[0].detected_at_s < last_sent_s + STORM_S
    due_at_s = over_s[0] + STORM_MAX_S
    if len(over) == len(unsent):
        due_at_s = min(due_at_s, over_s[-1] + STORM_S if in_storm else over_s[-1])
    return (ids, None) if now_s >= due_at_s else ((), due_at_s)


def compose(
    story: RunStory, incident_ids: Collection[int], proposals: Sequence[str]
) -> tuple[str, str]:
    """Return the title and the text of one message.

    Args:
        story: of the run.
        incident_ids: the incidents that the message is about.
        proposals: what waits for an approval, a text each.
    """
    run_id = story.summary.run.run_id
    incidents = [one for one in story.incidents if one.incident_id in set(incident_ids)]
    lines = [f"{text} Approve it by: holdfast runs approve {run_id}" for text in proposals]
    what = "a decision waits for you"
    if len(incidents) == 1:
        what = incidents[0].what
        lines += _one(incidents[0])
    elif incidents:
        what = words.plainly(len(incidents), "incident")
        lines += _several(incidents)
    run = story.summary.run
    if run.state != "running":
        lines.append(
            f"The run has ended: {run.state}. {' '.join(words.clean(run.outcome).split())}"
        )
    lines.append(f"More: holdfast explain {run_id}")
    body = "\n".join(lines)
    return f"Holdfast: run {run_id}: {what}", words.shorten(body, BODY_LIMIT)


def _one(story: IncidentStory) -> list[str]:
    step = "before the first step" if not story.step else f"after step {story.step}"
    node = "" if story.node is None else f", node {story.node}"
    lines = [f"{story.what}, {step}{node}, {words.moment(story.at_s)}.", f"Cause: {story.cause}"]
    lines += [f"Evidence: {one.place}: {one.text}" for one in story.evidence[:EVIDENCE_SENT]]
    return [*lines, f"Done: {story.done}", f"Effect: {story.check}", f"Lost: {lost_line(story)}"]


def _several(stories: Sequence[IncidentStory]) -> list[str]:
    counts = Counter(story.cause for story in stories)
    lines = [f"{count} times: {cause}" for cause, count in counts.most_common(INCIDENTS_SENT)]
    if len(stories) > INCIDENTS_SENT:
        lines.append(f"The last {INCIDENTS_SENT} of {len(stories)}:")
    lines += [
        f"{words.moment(one.at_s)}  {one.what}. {one.check}" for one in stories[-INCIDENTS_SENT:]
    ]
    lost_s = sum(one.lost_s for one in stories)
    hours = sum(one.lost_gpu_hours for one in stories)
    lasted = words.duration(lost_s).replace(words.NBSP, " ")
    return [*lines, f"Lost in all: {lasted}, {hours:.3g} GPU-hours."]
