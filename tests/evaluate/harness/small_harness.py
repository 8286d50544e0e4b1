"""A `Harness` that needs no package and gives results of lm-eval's form: for evaluations that take a second or two."""

import json

from holdfast.core.errors import BadUse
from holdfast.evaluate.harness.harness import SampleRequests, TaskResult
from holdfast.evaluate.requests import Request, Sampling, pack_tokens

NAME = "small_harness:SmallHarness"


class SmallHarness:
    """Options: `samples`; `tokens` of each answer; `unknown`, not to be there; `raises`, at its end."""

    name = NAME

    def version(self) -> str:
        return "1"

    def prepare(self, entries) -> None:
        for entry in entries:
            if entry.options.get("unknown"):
                raise BadUse(f"There is no task {entry.name!r}. Known is 'other'.")

    def run(self, entry, client, folder) -> TaskResult:
        options = entry.options
        samples = [
            SampleRequests(
                sample=number,
                requests=[
                    Request(
                        kind="generate",
                        prompt=pack_tokens([*entry.name.encode(), number]),
                        sampling=Sampling(max_new_tokens=options.get("tokens", 4)),
                    )
                ],
            )
            for number in range(options.get("samples", 10))
        ]
        answered = client.ask(samples)
        if options.get("raises"):
            raise KeyError("the metric is broken")
        tokens = [len(sample.answers[0].tokens) // 4 for sample in answered]
        row = {"alias": entry.name, "tokens,none": sum(tokens) / len(tokens), "tokens_stderr,none": 0.0}
        return TaskResult(
            results={
                "results": {entry.name: row},
                "group_subtasks": {entry.name: []},
                "versions": {entry.name: 1},
                "n-shot": {entry.name: 0},
                "higher_is_better": {entry.name: {"tokens": True}},
                "n-samples": {entry.name: {"original": len(tokens), "effective": len(tokens)}},
            }
        )

    def measure(self, entry, sample, answers, facts) -> bytes:
        return json.dumps(None).encode()
