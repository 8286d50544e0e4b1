"""Make an event from the newest step in a log. Only the last step of the training is an end."""

from typing import Final

import re2

from holdfast.diagnose.rules.rules import ENDING, Rule
from holdfast.diagnose.rules.taxonomy import Ending

_EPOCH = re2.compile(r"(?i)\bepoch[ :\[]*([0-9]+)(?: */ *([0-9]+))?")
_OF_ALL = re2.compile(r"([0-9][0-9,]*) */ *([0-9][0-9,]*)")


def _rule(name: str, ending: Ending, mitigation: str) -> Rule:
    return Rule(
        id=name, pattern="", kind=ENDING, ending=ending, reason="Unknown", action="restart", restart_helps=True,
        mitigation=mitigation, confidence=0.5, alone=9.0, source="progress.yaml", match=(), no_match=(),
    )  # fmt: skip


NEWEST_STEP: Final = _rule("newest-step", "step", "The newest step in the log.")
LAST_STEP: Final = _rule("last-step", "work_done", "The log reports the last step of all.")


def step_rule(text: str, step: int) -> Rule:
    """Return `LAST_STEP` if the line shows that `step` is the last ("48/48"), else `NEWEST_STEP`."""
    epoch = _EPOCH.search(text)
    if "/step" in text or (epoch is not None and epoch[1] != epoch[2]):
        return NEWEST_STEP  # the last step of an epoch only
    for number, total in _OF_ALL.findall(text):
        if number == total and step > 1 and int(number.replace(",", "")) == step:
            return LAST_STEP
    return NEWEST_STEP
