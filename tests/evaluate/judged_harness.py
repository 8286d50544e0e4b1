"""Provide a harness without lm-eval whose metric asks a judge, as tasks with an LLM judge do."""

from collections.abc import Sequence
from pathlib import Path

import openai

from holdfast.evaluate.types.harness import EngineClient, ModelFacts, TaskResult
from holdfast.evaluate.types.requests import Answer
from holdfast.evaluate.types.suite import TaskEntry
from holdfast.testing.harness import SyntheticHarness, synthetic_samples

NAME = "judged_harness:JudgedHarness"


class JudgedHarness(SyntheticHarness):
    """Score the samples of `synthetic_entry` by the share of samples that the judge calls good."""

    name = NAME

    def run(self, entry: TaskEntry, client: EngineClient, folder: Path) -> TaskResult:
        answered = client.ask(synthetic_samples(entry))
        verdicts = [
            # As in lm-eval: a metric that failed elsewhere is computed here.
            sample.measured or self.measure(entry, sample.sample, sample.answers, client.facts)
            for sample in answered
        ]
        good = verdicts.count(b"yes") / len(verdicts)
        name = entry.name
        return TaskResult(
            results={
                "results": {name: {"alias": name, "good,none": good}},
                "group_subtasks": {name: []},
                "configs": {name: {}},
                "versions": {name: 1},
                "n-shot": {name: 0},
                "higher_is_better": {name: {"good": True}},
                "n-samples": {name: {"original": len(answered), "effective": len(answered)}},
            }
        )

    def measure(
        self,
        entry: TaskEntry,
        sample: int,
        answers: Sequence[Answer],
        facts: ModelFacts,
    ) -> bytes:
        text = f"Good? {'cat' if sample % 2 else 'dog'} {sample}"
        said = openai.OpenAI(max_retries=8).chat.completions.create(
            model="judge",
            messages=[{"role": "user", "content": text}],
            max_tokens=3,
            temperature=0,
        )
        return (said.choices[0].message.content or "").encode()
