"""How often a job has failed so far: the supervisor knows it from the ledger, and tells the ranks as they start."""

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
    """Failures of a run after its first step, in so many seconds of training."""

    failures: int = 0
    trained_s: float = 0.0

    @classmethod
    def of_run(cls, attempts: "Iterable[Attempt]", incidents: "Iterable[Incident]") -> Self:
        """What the ledger says. A start that made no step had nothing to lose, and does not count."""
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
        """What the supervisor told this rank; nothing where there is none."""
        told = os.environ.get(ENV_FAILURES)
        return cls() if told is None else cls(**json.loads(told))

    def as_environment(self) -> dict[str, str]:
        """For the ranks."""
        return {ENV_FAILURES: json.dumps(asdict(self))}
