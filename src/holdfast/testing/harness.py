"""Provide a synthetic harness with tasks of given sizes, to test scheduling and emulate a cluster.

A suite entry names the harness as `holdfast.testing.harness:SyntheticHarness`. The entry's options
state the cost of each sample.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import BadUse
from holdfast.evaluate.testing import (
    Answer,
    EngineClient,
    ModelFacts,
    Request,
    SampleRequests,
    Sampling,
    TaskEntry,
    TaskResult,
    encode_answer,
    pack_tokens,
)

NAME = "holdfast.testing.harness:SyntheticHarness"


def synthetic_entry(
    name: str,
    *,
    prompt_tokens: Sequence[int],
    new_tokens: Sequence[int],
    metric_s: Sequence[float] = (),
    max_new_tokens: int = 0,
) -> TaskEntry:
    """Create the suite entry of a task that has one request for each sample.

    Args:
        name: the name of the task.
        prompt_tokens: the length of each sample's prompt, in tokens.
        new_tokens: the tokens that a simulated engine generates for each sample; 0 requests a
            log-probability instead.
        metric_s: the seconds that each sample's metric takes; empty for no metrics.
        max_new_tokens: the token limit that the scheduler sees; 0 for the maximum of `new_tokens`.
    """
    options: dict[str, Any] = {
        "prompt_tokens": list(prompt_tokens),
        "new_tokens": list(new_tokens),
        "metric_s": list(metric_s),
        "max_new_tokens": max_new_tokens or max(new_tokens, default=0),
    }
    return TaskEntry(name=name, harness=NAME, options=options)


class SyntheticHarness:
    """A `Harness` whose score is a digest of all answers.

    So equal answers give equal scores.
    """

    name = NAME

    def version(self) -> str:
        """See `Harness.version`."""
        return "1"

    def prepare(self, entries: Sequence[TaskEntry]) -> None:
        """See `Harness.prepare`."""
        for entry in entries:
            if entry.options.get("missing"):
                raise BadUse(f"There is no task {entry.name!r}. Near it: synthetic.")

    def run(self, entry: TaskEntry, client: EngineClient, folder: Path) -> TaskResult:  # noqa: ARG002
        """See `Harness.run`."""
        samples = synthetic_samples(entry)
        answered = client.ask(samples)
        if entry.options.get("raises"):
            raise ValueError("this task's metric raises")
        digest = hashlib.blake2b(digest_size=16)
        for sample, answer in zip(samples, answered, strict=True):
            for body in answer.answers:
                digest.update(encode_answer(body))
            if sample.metric_key and answer.measured != measured_of(answer.answers):
                raise AssertionError(f"sample {sample.sample} of {entry.name} has another's metric")
        score = int.from_bytes(digest.digest()[:6], "big") / 2**48
        name = entry.name
        results: dict[str, Any] = {
            "results": {name: {"alias": name, "digest,none": score, "digest_stderr,none": "N/A"}},
            "group_subtasks": {name: []},
            "configs": {name: {}},
            "versions": {name: 1},
            "n-shot": {name: 0},
            "higher_is_better": {name: {"digest": True}},
            "n-samples": {name: {"original": len(samples), "effective": len(samples)}},
        }
        return TaskResult(results=results)

    def measure(
        self,
        entry: TaskEntry,
        sample: int,
        answers: Sequence[Answer],
        facts: ModelFacts,  # noqa: ARG002
    ) -> bytes:
        """Sleep for the time that the entry states; return the metric. See `Harness.measure`."""
        time.sleep(entry.options["metric_s"][sample])
        return measured_of(answers)


def synthetic_samples(entry: TaskEntry) -> list[SampleRequests]:
    """Return the samples of an entry that `synthetic_entry` created."""
    seed = int.from_bytes(hashlib.blake2b(entry.name.encode(), digest_size=3).digest(), "big")
    metric_s = entry.options.get("metric_s") or []
    samples = []
    sizes = zip(entry.options["prompt_tokens"], entry.options["new_tokens"], strict=True)
    for number, (prompt_tokens, new_tokens) in enumerate(sizes):
        prompt = pack_tokens([seed, number] + [7] * (max(2, prompt_tokens) - 2))
        if new_tokens:
            most = entry.options["max_new_tokens"]
            sampling = Sampling(max_new_tokens=most, extra={"new_tokens": new_tokens})
            request = Request(kind="generate", prompt=prompt, sampling=sampling)
        else:
            request = Request(
                kind="loglikelihood", prompt=prompt, continuation=pack_tokens([number])
            )
        key = b""
        if metric_s and metric_s[number] > 0:
            key = hashlib.blake2b(f"{entry.name} {number}".encode(), digest_size=16).digest()
        samples.append(SampleRequests(sample=number, requests=[request], metric_key=key))
    return samples


def measured_of(answers: Sequence[Answer]) -> bytes:
    """Return the metric of a sample's answers, as `SyntheticHarness.measure` computes it."""
    return json.dumps([answer.new_tokens for answer in answers]).encode()
