"""Explain a run in order and in plain words.

`story` builds a `RunStory` from the ledger's rows, and `telling` prints the story as text.

| module | one idea |
|---|---|
| `plain_words` | one incident, one event or one decision in a sentence |
| `training_words` | a slow training, a broken loss or data left out, in a sentence |
| `story` | the incidents of a run, each with signals, evidence, decisions, effect and cost |
| `recent` | the same story from the last part of the journal of steps, if time is limited |
| `narration` | each event of a run as it happens, in a line |
| `telling` | a story as lines, for a terminal or a message |
"""

from holdfast.core.explanation.plain_words import NO_REASON, OBSERVED, observed_failure
from holdfast.core.explanation.recent import explain_recent
from holdfast.core.explanation.story import (
    Decision,
    IncidentStory,
    Note,
    RunStory,
    Signals,
    explain,
    story_of,
    within_run,
)
from holdfast.core.explanation.telling import account_lines, incident_lines, story_lines
from holdfast.core.explanation.training_words import CLASSES

__all__ = [
    "CLASSES",
    "NO_REASON",
    "OBSERVED",
    "Decision",
    "IncidentStory",
    "Note",
    "RunStory",
    "Signals",
    "account_lines",
    "explain",
    "explain_recent",
    "incident_lines",
    "observed_failure",
    "story_lines",
    "story_of",
    "within_run",
]
