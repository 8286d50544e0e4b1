"""Collect the requests that a suite would send to a model, without sending any."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.evaluate.harness.choose import harness
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import AnsweredSample, ModelFacts, SampleRequests
from holdfast.evaluate.types.suite import Suite


class _Counted(EvaluationError):
    """Raised to end the harness's run, since all requests of the entry have been counted."""


class CountingClient:
    """An `EngineClient` that records samples and answers none of them."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.samples: list[SampleRequests] = []

    def ask(self, samples: Sequence[SampleRequests]) -> Sequence[AnsweredSample]:
        """Record the samples, and end the harness's run by an exception; see `EngineClient.ask`."""
        self.samples += samples
        raise _Counted("nothing is asked when requests are counted")

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        """Record a sample; only the first turn of a conversation is counted."""
        self.samples.append(sample)
        raise _Counted("nothing is asked when requests are counted")


def count_requests(suite: Suite, facts: ModelFacts) -> list[list[SampleRequests]]:
    """Return each entry's samples, as an evaluation would first submit them.

    Raises:
        BadUse: a task does not exist, or needs a feature that Holdfast lacks.
    """
    found: list[list[SampleRequests]] = []
    harnesses = {
        name: harness(
            name, include_paths=suite.include_paths, confirm_unsafe_code=suite.confirm_unsafe_code
        )
        for name in dict.fromkeys(entry.harness for entry in suite.entries)
    }
    for name, chosen in harnesses.items():
        chosen.prepare([entry for entry in suite.entries if entry.harness == name])
    with TemporaryDirectory(prefix="holdfast-plan-") as folder:
        for entry in suite.entries:
            client = CountingClient(facts)
            try:
                harnesses[entry.harness].run(entry, client, Path(folder))
            except _Counted:
                pass
            except Exception:
                if not client.samples:  # otherwise, `_Counted` is the cause of the error
                    raise
            found.append(client.samples)
    return found
