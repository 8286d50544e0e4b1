"""The newest step that a log reports, as an event: by it an end is told from a job that still runs."""

from typing import Final

import re2

from holdfast.diagnose.rules.rules import ENDING, Rule
from holdfast.diagnose.rules.taxonomy import Ending

_OF_ALL = re2.compile(r"([0-9][0-9,]*) */ *([0-9][0-9,]*)")


def _rule(id: str, ending: Ending, mitigation: str) -> Rule:
    return Rule(
        id=id, pattern="", kind=ENDING, ending=ending, reason="Unknown", action="restart", restart_helps=True,
        mitigation=mitigation, confidence=0.5, alone=9.0, source="progress.yaml", match=(), no_match=(),
    )  # fmt: skip


NEWEST_STEP: Final = _rule("newest-step", "step", "The newest step that the log reports.")
LAST_STEP: Final = _rule("last-step", "work_done", "The log reports the last step of all.")


def step_rule(text: str, step: int) -> Rule:
    """Return the rule for a line that reports `step`: `LAST_STEP` where the line has it of as many ("48/48")."""
    for number, total in _OF_ALL.findall(text):
        if number == total and step > 1 and int(number.replace(",", "")) == step:
            return LAST_STEP
    return NEWEST_STEP
