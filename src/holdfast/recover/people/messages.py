"""Find the incidents for which a message is due, and write the message: pure functions.

A single incident has its own message, as soon as the incident is over or after `STUCK_S` without a
step. Incidents within `STORM_S` of a message are a storm. One message summarizes the incidents of a
storm: after `STORM_S` without a new incident, at least every `STORM_MAX_S`, and when the run ends.
A message about a proposal, about a finding that is only observed, or about trouble with the saves of
checkpoints is sent at once. The exception is that a message of the same kind was sent within the
last `STORM_S`, since a job that hangs again and again is also a storm.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from holdfast.core import words
from holdfast.core.explanation import IncidentStory, RunStory
from holdfast.core.explanation.telling import lost_line

STORM_S = 600.0
STORM_MAX_S = 3600.0
STUCK_S = 600.0
"""A message about an incident is due after this number of seconds, even if the job does not train
yet.
"""
COSTS_UNKNOWN = "Lost: not computed here, since the run has too many steps."
EVIDENCE_SENT = 3
INCIDENTS_SENT = 10
"""The message about a storm has a separate line for this number of last incidents."""
BODY_LIMIT = 4000
"""The largest number of characters in a message."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """The facts about one incident that determine messages. Times are in Unix seconds."""

    incident_id: int
    detected_at_s: float
    over_at_s: float | None
    """The time at which the job trained again or failed again, or the run ended; None before that.
    """


def due(
    unsent: Sequence[Known], *, last_sent_s: float | None, now_s: float, is_over: bool
) -> tuple[tuple[int, ...], float | None]:
    """Return the incidents for which a message is due now, or the time at which one will be due.

    Args:
        unsent: the incidents about which no message was sent, in order.
        last_sent_s: the time of the last message.
        now_s: the present time.
        is_over: True if the run has ended.
    """
    if not unsent:
        return (), None
    everything = tuple(one.incident_id for one in unsent)
    if is_over:
        return everything, None
    stuck_s = [one.detected_at_s + STUCK_S for one in unsent if one.over_at_s is None]
    later_s = [at_s for at_s in stuck_s if at_s > now_s]
    ripe = [
        one for one in unsent if one.over_at_s is not None or one.detected_at_s + STUCK_S <= now_s
    ]
    if not ripe:
        return (), min(later_s)
    in_storm = last_sent_s is not None and unsent[0].detected_at_s < last_sent_s + STORM_S
    due_at_s = min(map(_ripe_s, ripe)) + STORM_MAX_S
    if len(ripe) == len(unsent):
        is_calm = ripe[-1].over_at_s is None  # the job has not trained for `STUCK_S`
        last_s = _ripe_s(ripe[-1])
        due_at_s = min(due_at_s, last_s + STORM_S if in_storm and not is_calm else last_s)
    ids = tuple(one.incident_id for one in ripe)
    return (ids, None) if now_s >= due_at_s else ((), min([due_at_s, *later_s]))


def _ripe_s(one: Known) -> float:
    return one.detected_at_s + STUCK_S if one.over_at_s is None else one.over_at_s


def proposal_due_s(kind: str, sent: Sequence[tuple[str, float]]) -> float:
    """Return the earliest Unix time, in seconds, for a message about a finding of `kind`.

    `sent` contains the kind and the time of each earlier message about a finding.
    """
    return max((at_s + STORM_S for before, at_s in sent if before == kind), default=0.0)


def compose(
    story: RunStory,
    incident_ids: Collection[int],
    proposals: Sequence[str],
    *,
    notes: Sequence[str] = (),
    alerts: Sequence[str] = (),
    has_costs: bool = True,
) -> tuple[str, str]:
    """Return the title and the text of one message.

    Args:
        story: the story of the run.
        incident_ids: the ids of the incidents that the message is about.
        proposals: the texts of the proposals that wait for an approval.
        notes: the texts of the findings that are only observed.
        alerts: the texts about trouble with the saves of checkpoints.
        has_costs: True if the costs of the incidents are known.
    """
    run_id = story.summary.run.run_id
    incidents = [one for one in story.incidents if one.incident_id in set(incident_ids)]
    lines = [f"{text} Approve it by: holdfast runs approve {run_id}" for text in proposals]
    lines += [f"{text} Nothing was done, since the mode is observe." for text in notes]
    lines += [f"Checkpoints: {words.sentence(text)}" for text in alerts]
    what = "a checkpoint could not be saved as planned"
    if proposals:
        what = "a decision waits for you"
    elif notes:
        what = "a finding, and nothing was done"
    if len(incidents) == 1:
        what = incidents[0].what
        lines += _one(incidents[0])
    elif incidents:
        what = words.plainly(len(incidents), "incident")
        lines += _several(incidents)
    if incidents:
        lines.append(_lost(incidents) if has_costs else COSTS_UNKNOWN)
    run = story.summary.run
    if run.state != "running":
        end = "waits in the queue" if run.state == "queued" else f"has ended: {run.state}"
        lines.append(f"The run {end}. {' '.join(words.clean(run.outcome).split())}")
    lines.append(f"More: holdfast explain {run_id}")
    body = "\n".join(lines)
    return f"Holdfast: run {run_id}: {what}", words.shorten(body, BODY_LIMIT)


def _one(story: IncidentStory) -> list[str]:
    node = "" if story.node is None else f", node {story.node}"
    lines = [
        f"{story.what}, {story.place}{node}, {words.moment(story.at_s)}.",
        f"Cause: {story.cause}",
    ]
    lines += [f"Evidence: {one.place}: {one.text}" for one in story.evidence[:EVIDENCE_SENT]]
    return [*lines, f"Done: {story.done}", f"Effect: {story.check}"]


def _several(stories: Sequence[IncidentStory]) -> list[str]:
    counts = Counter(story.cause for story in stories)
    lines = [f"{count} times: {cause}" for cause, count in counts.most_common(INCIDENTS_SENT)]
    if len(stories) > INCIDENTS_SENT:
        lines.append(f"The last {INCIDENTS_SENT} of {len(stories)}:")
    lines += [
        f"{words.moment(one.at_s)}  {one.what}. {one.check}" for one in stories[-INCIDENTS_SENT:]
    ]
    return lines


def _lost(stories: Sequence[IncidentStory]) -> str:
    if len(stories) == 1:
        return f"Lost: {lost_line(stories[0])}"
    lost_s = sum(one.lost_s for one in stories)
    hours = sum(one.lost_gpu_hours for one in stories)
    lasted = words.duration(lost_s).replace(words.NBSP, " ")
    return f"Lost in all: {lasted}, {hours:.3g} GPU-hours."
