"""Count the failures of a run so far, for the ranks.

The supervisor reads the count from the ledger, and passes it to the ranks in an environment
variable.
"""

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:  # ranks need no database
    from collections.abc import Iterable

    from holdfast.core.ledger.records import Attempt, Incident

ENV_FAILURES: Final = "HOLDFAST_FAILURES"


@dataclass(frozen=True, kw_only=True)
class FailureHistory:
    """The number of failures of a run after a first step, and the seconds of training meanwhile."""

    failures: int = 0
    trained_s: float = 0.0

    @classmethod
    def of_run(cls, attempts: "Iterable[Attempt]", incidents: "Iterable[Incident]") -> Self:
        """Count the failures and the seconds of training in the ledger's records.

        An attempt that completed no step does not count, because the attempt lost no work.
        """
        trained_s = {
            one.number: one.ended_at_s - one.first_step_at_s
            for one in attempts
            if one.first_step_at_s is not None and one.ended_at_s is not None
        }
        return cls(
            failures=sum(incident.attempt in trained_s for incident in incidents),
            trained_s=sum(max(0.0, seconds) for seconds in trained_s.values()),
        )

    @classmethod
    def of_environment(cls) -> Self:
        """Read the history from the environment; without a supervisor, return an empty history."""
        value = os.environ.get(ENV_FAILURES)
        return cls() if value is None else cls(**json.loads(value))

    def as_environment(self) -> dict[str, str]:
        """Return the environment variable that passes this history to the ranks."""
        return {ENV_FAILURES: json.dumps(asdict(self))}
