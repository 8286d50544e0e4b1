"""Provide a `Harness` without a benchmark, with processes that misbehave by options."""

import hashlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path

from holdfast.core.errors import BadUse
from holdfast.evaluate.types.harness import SampleRequests, TaskResult
from holdfast.evaluate.types.requests import Request, Sampling, encode_answer, pack_tokens

NAME = "toy_harness:ToyHarness"


class ToyHarness:
    name = NAME

    def version(self) -> str:
        return "7"

    def prepare(self, entries) -> None:
        for entry in entries:
            if entry.options.get("unknown"):
                raise BadUse(f"There is no task {entry.name!r}.")

    def run(self, entry, client, folder) -> TaskResult:
        options = entry.options
        samples = [
            SampleRequests(
                sample=number,
                requests=[
                    Request(
                        kind="generate",
                        prompt=pack_tokens([number, part]),
                        sampling=Sampling(max_new_tokens=3),
                        text="x" * options.get("text_bytes", 0),
                    )
                    for part in range(2)
                ],
                metric_key=hashlib.blake2b(
                    f"{entry.name}{number}".encode(), digest_size=16
                ).digest()
                if options.get("metrics")
                else b"",
            )
            for number in range(options.get("samples", 5))
        ]
        if options.get("kills_itself_early"):
            os.kill(os.getpid(), signal.SIGKILL)
        if pid_file := options.get("forks"):
            child = os.fork()
            if child == 0:
                select.select([], [], [])
            Path(pid_file).write_text(str(child))
        if pid_file := options.get("starts"):
            Path(pid_file).write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
        answered = client.ask(samples)
        if options.get("raises"):
            raise KeyError("the harness is broken")
        for sample in answered:
            if sample.error:
                raise RuntimeError(sample.error)
        texts = [[encode_answer(answer).hex() for answer in sample.answers] for sample in answered]
        measured = [sample.measured.decode() for sample in answered]
        return TaskResult(results={"texts": texts, "measured": measured, "pid": os.getpid()})

    def measure(self, entry, sample, answers, facts) -> bytes:
        options = entry.options
        trap = Path(options.get("trap", "/nowhere"))
        if sample == 2 and trap.exists():
            trap.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if sample == options.get("endless"):
            select.select([], [], [])
        if sample == options.get("raises_at"):
            raise ValueError("no such metric")
        return json.dumps([sample, len(answers), os.getpid()]).encode()
