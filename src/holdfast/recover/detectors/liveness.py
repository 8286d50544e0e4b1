"""Report detectors that have had no data for a while, since their silence is no sign of health."""

from collections.abc import Mapping
from dataclasses import dataclass, field

BLIND_S = 600.0
"""A detector is blind after this number of seconds in an attempt without data from the ranks."""


@dataclass(frozen=True, kw_only=True)
class Looks:
    """The times at which each detector last had data, in monotonic seconds.

    None means that the detector has had no data in this attempt.
    """

    launched_s: float
    steps_s: float | None = None
    losses_s: float | None = None
    collectives_s: float | None = None
    watches_losses: bool = True
    """False if losses are not watched."""
    several_ranks: bool = True
    in_section: bool = False
    """True while a rank is in a section, in which no steps are expected."""


def blind(looks: Looks, now_s: float) -> dict[str, str]:
    """Return the blind detectors, each with the reason."""

    def is_old(at_s: float | None) -> bool:
        return now_s - max(looks.launched_s, at_s or 0.0) > BLIND_S

    if looks.in_section:
        return {}
    if is_old(looks.steps_s):
        return {"hangs": "no rank reports steps"}
    found = {}
    if looks.watches_losses and is_old(looks.losses_s):
        found["losses"] = "no rank reports a loss"
    if looks.several_ranks and is_old(looks.collectives_s):
        found["slow ranks"] = "the ranks do not report their collectives"
    return found


@dataclass
class Liveness:
    """The detectors and sources that are blind now, to find changes."""

    hidden: dict[str, str] = field(default_factory=dict)

    def changes(self, hidden: Mapping[str, str]) -> dict[str, str]:
        """Return the newly blind detectors with reasons, and those that are no longer blind.

        The reason for the latter is an empty text.
        """
        changed = {name: why for name, why in hidden.items() if name not in self.hidden}
        changed |= {name: "" for name in self.hidden if name not in hidden}
        self.hidden = dict(hidden)
        return changed
