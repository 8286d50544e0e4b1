"""What a suite would ask of a model: its requests are built by the harness, and nothing is asked."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.evaluate.harness.choose import harness
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.harness import AnsweredSample, ModelFacts, SampleRequests
from holdfast.evaluate.types.suite import Suite


class _Counted(EvaluationError):
    """All requests of an entry are known."""


class CountingClient:
    """An `EngineClient` that keeps what it is asked and answers nothing."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.samples: list[SampleRequests] = []

    def ask(self, samples: Sequence[SampleRequests]) -> Sequence[AnsweredSample]:
        """See `EngineClient.ask`."""
        self.samples += samples
        raise _Counted("nothing is asked when requests are counted")

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        """See `EngineClient.ask_one`: of a conversation only the first turn is known."""
        self.samples.append(sample)
        raise _Counted("nothing is asked when requests are counted")


def count_requests(suite: Suite, facts: ModelFacts) -> list[list[SampleRequests]]:
    """The samples of each entry, in the suite's order, as an evaluation would submit them first.

    Raises:
        BadUse: a task is not there, or needs what Holdfast does not give.
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
                if not client.samples:  # else it is what the harness made of our refusal
                    raise
            found.append(client.samples)
    return found
