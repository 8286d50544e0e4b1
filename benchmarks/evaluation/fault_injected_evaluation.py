"""Run an evaluation whose processes are killed, started as a person would start it.

Its engines are simulated and keep a record (`holdfast.testing.engine`). Its tasks are synthetic,
and its model has a few bytes.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.engines.simulated import simulated_answer
from holdfast.evaluate.types.harness import AnsweredSample, ModelFacts, SampleRequests
from holdfast.evaluate.types.requests import Answer, Request
from holdfast.evaluate.types.suite import TaskEntry
from holdfast.evaluate.wire.answer_journal import keys_of
from holdfast.evaluate.wire.messages import ENV_TOKEN
from holdfast.testing.engine import NAME, Recorded, read_record
from holdfast.testing.harness import SyntheticHarness, measured_of, synthetic_entry

Role = Literal["command", "coordinator", "node", "engine", "host", "zygote", "client", "metric"]
ROLES: tuple[Role, ...] = (
    "command",
    "coordinator",
    "node",
    "engine",
    "host",
    "zygote",
    "client",
    "metric",
)
_ID = "fault-injected"
_POLL_S = 0.01


def synthetic_tasks(
    random_source: random.Random, samples: Sequence[int], metric_s: float = 0.05
) -> list[TaskEntry]:
    """Return tasks of so many samples each; every second task has a metric of `metric_s`."""
    return [
        synthetic_entry(
            f"task_{number}",
            prompt_tokens=[50] * count,
            new_tokens=[random_source.randrange(5, 100) for _ in range(count)],
            metric_s=[metric_s] * count if number % 2 else (),
        )
        for number, count in enumerate(samples)
    ]


def expected_results(tasks: Sequence[TaskEntry]) -> dict[str, Any]:
    """Return the scores of these tasks, computed by one process without kills."""
    results: dict[str, Any] = {}
    for task in tasks:
        results |= SyntheticHarness().run(task, _AtOnce(), Path()).results["results"]
    return results


class _AtOnce:
    """An `EngineClient` that is also its engine."""

    facts = ModelFacts(model=0, name="", tokenizer="", max_length=0)

    def ask(self, samples: Sequence[SampleRequests]) -> list[AnsweredSample]:
        return [self._answered(sample) for sample in samples]

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        return self._answered(sample)

    def _answered(self, sample: SampleRequests) -> AnsweredSample:
        answers = [_answer(request) for request in sample.requests]
        return AnsweredSample(
            sample=sample.sample,
            answers=answers,
            measured=measured_of(answers) if sample.metric_key else b"",
        )


def _answer(request: Request) -> Answer:
    wanted = int(request.sampling.extra["new_tokens"] or 0) if request.sampling else 0
    return simulated_answer(request, wanted)


def write_model(folder: Path, size_bytes: int = 1 << 16) -> Path:
    """Write a folder that looks like a model's: zeros below a header of safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1})
    )
    tensor = {"dtype": "F32", "shape": [size_bytes // 4], "data_offsets": [0, size_bytes]}
    header = json.dumps({"model.weight": tensor}).encode()
    header += b" " * (-len(header) % 8)
    weights = folder / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(weights, weights.stat().st_size + size_bytes)
    return folder


@dataclass(kw_only=True)
class FaultInjectedEvaluation:
    """One evaluation, with all its files in `folder`.

    Attributes:
        tasks: the evaluated tasks.
        nodes, engines_per_node: the nodes of this machine.
        model_bytes: the size of the model's weights.
        flags: further options of `holdfast eval run`.
        engine_options: options of the simulated engine.
        home: the Holdfast home; None for one in `folder`.
        environment: variables added to the command's environment.
    """

    folder: Path
    tasks: Sequence[TaskEntry]
    nodes: int = 1
    engines_per_node: int = 2
    model_bytes: int = 1 << 16
    flags: Sequence[str] = ()
    engine_options: Mapping[str, float] = field(default_factory=dict)
    home: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home = self.home or self.folder / "home"
        self.paths = EvaluationPaths(self.home, _ID)
        self.record_file = self.folder / "record"
        self._tokens: set[str] = set()
        self._commands: list[subprocess.Popen[bytes]] = []

    # The command

    def start(self) -> subprocess.Popen[bytes]:
        """Start `holdfast eval run`; the output goes to `folder/output.txt`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        suite = self.folder / "suite.toml"
        suite.write_text("".join(map(_toml, self.tasks)))
        model = write_model(self.folder / "model", self.model_bytes)
        engine = {"step_base_s": 0.005, **self.engine_options, "record": self.record_file}
        options = [
            word
            for name, value in engine.items()
            for word in ("--engine-option", f"{name}={value}")
        ]
        where = ["--nodes", str(self.nodes), "--engines-per-node", str(self.engines_per_node)]
        what = ["--suite", str(suite), "--model", str(model), "--id", _ID]
        return self._command(["run", *what, "--engine", NAME, *options, *where, *self.flags])

    def resume(self) -> subprocess.Popen[bytes]:
        """Start `holdfast eval resume`."""
        return self._command(["resume", _ID])

    def _command(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "output.txt").open("ab") as output:
            command = subprocess.Popen(
                [sys.executable, "-m", "holdfast.cli.main", "eval", *arguments, "--no-progress"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "HOLDFAST_HOME": str(self.home), **self.environment},
                start_new_session=True,
            )
        self._commands.append(command)
        return command

    def output(self) -> str:
        """Return the output of the commands so far."""
        return (self.folder / "output.txt").read_text(errors="replace")

    def results(self) -> dict[str, Any]:
        """Return the scores of the harness, by task."""
        results: dict[str, Any] = json.loads(self.paths.results.read_bytes())["results"]["results"]
        return results

    # Its processes

    def processes(self) -> dict[Role, list[int]]:
        """Return the living processes of this evaluation by role, without leashes."""
        found: dict[Role, list[int]] = {role: [] for role in ROLES}
        for process in self._all():
            with contextlib.suppress(psutil.Error, OSError):
                if role := self._role(process):
                    found[role].append(process.pid)
        return found

    def engines_by_agent(self) -> dict[int, list[int]]:
        """Return the engines that each node's agent started."""
        by_agent: dict[int, list[int]] = {}
        for pid in self.processes()["engine"]:
            with contextlib.suppress(psutil.Error):
                by_agent.setdefault(psutil.Process(pid).ppid(), []).append(pid)
        return by_agent

    def leftovers(self) -> list[str]:
        """Return the command lines of processes of this evaluation that still run."""
        left = []
        for process in self._all():
            with contextlib.suppress(psutil.Error):
                left.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        return left

    def shared_memory(self) -> list[str]:
        """Return the sessions in shared memory whose maker is one of this evaluation's agents."""
        own = Path("/dev/shm") / f"holdfast-{os.getuid()}"
        pids = {line.split("-")[0] for line in self._agents_seen}
        return (
            [path.name for path in own.iterdir() if path.name.split("-")[0] in pids]
            if own.exists()
            else []
        )

    _agents_seen: set[str] = field(default_factory=set, init=False)

    def _all(self) -> Iterator[psutil.Process]:
        with contextlib.suppress(OSError):
            self._tokens.add((self.paths.state / "token").read_text())
        folder = str(self.folder)
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                named = any(folder in word for word in process.cmdline())
                if named or process.environ().get(ENV_TOKEN, "") in self._tokens - {""}:
                    yield process
            except (psutil.Error, OSError):
                continue

    def _role(self, process: psutil.Process) -> Role | None:
        words = process.cmdline()
        module = words[words.index("-m") + 1] if "-m" in words else ""
        match module:
            case "holdfast.cli.main":
                return "command"
            case "holdfast.evaluate.coordinator.server":
                return "coordinator"
            case "holdfast.evaluate.run.node_agent":
                self._agents_seen.add(str(process.pid))
                return "node"
            case "holdfast.evaluate.engines.worker":
                return "engine"
            case "holdfast.evaluate.harness.host":
                return "host"
            case "holdfast.evaluate.harness.zygote":
                # A child of the zygote prints into a log of its own.
                name = Path(f"/proc/{process.pid}/fd/1").readlink().name
                if name.startswith("task-"):
                    return "client"
                return "metric" if name.startswith("metrics-") else "zygote"
            case _:
                return None

    def kill(self, role: Role, random_source: random.Random) -> int | None:
        """Kill one process of a role; return its pid, None if there is none now."""
        return self.strike(role, random_source, signal.SIGKILL)

    def strike(
        self, role: Role, random_source: random.Random, number: signal.Signals
    ) -> int | None:
        """Send a signal to one process of a role; return its pid, None if there is none now."""
        pids = self.processes()[role]
        if not pids:
            return None
        pid = random_source.choice(sorted(pids))
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return None
        return pid

    # Its work

    def record(self) -> list[Recorded]:
        """Return the engines' record so far."""
        return read_record(self.record_file)

    def finished(self) -> int:
        """Return the number of different requests that the engines finished."""
        return len({line.key for line in self.record() if line.what == "finished"})

    def committed(self) -> set[str]:
        """Return the keys in the journals now."""
        segments = self.paths.answers.glob("*/*.journal")
        return {key.hex() for segment in segments for key in keys_of(segment)}

    def wait_until_finished(self, count: int, timeout_s: float) -> bool:
        """Return True once `count` requests are finished; False after `timeout_s` or the end."""
        deadline_s = time.monotonic() + timeout_s
        while self.finished() < count:
            if time.monotonic() > deadline_s or self._commands[-1].poll() is not None:
                return False
            time.sleep(_POLL_S)
        return True

    def end(self) -> None:
        """Kill all remaining processes of this evaluation."""
        for _ in range(100):
            left = list(self._all())
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not left:
                break
            time.sleep(0.05)
        for command in self._commands:
            command.wait()


def redone(
    record: Sequence[Recorded],
    killed_s: Mapping[int, float],
    kept: Sequence[tuple[float, set[str]]],
) -> list[str]:
    """Return the keys that were done again although they were finished and not lost.

    A request counts as done again if an engine received it after it stood in a journal. It also
    counts if an engine received it over half a second after another, living engine had finished it;
    before that, the answer may be on its way.

    Args:
        record: the engines' record.
        killed_s: the time at which each engine's process was killed, with its unsent answers.
        kept: the content of the journals at several times.
    """
    again = []
    finished: dict[str, list[Recorded]] = {}
    for line in record:
        if line.what == "finished":
            finished.setdefault(line.key, []).append(line)
    for line in record:
        if line.what != "asked":
            continue
        in_journal = any(at_s < line.at_s and line.key in keys for at_s, keys in kept)
        by_living = any(
            done.at_s + 0.5 < line.at_s and killed_s.get(done.pid, float("inf")) > line.at_s + 0.5
            for done in finished.get(line.key, ())
        )
        if in_journal or by_living:
            again.append(line.key)
    return again


def _toml(task: TaskEntry) -> str:
    lines = [
        "[[tasks]]",
        f"name = {json.dumps(task.name)}",
        f"harness = {json.dumps(task.harness)}",
        "[tasks.options]",
    ]
    lines += [f"{key} = {json.dumps(value)}" for key, value in task.options.items()]
    return "\n".join(lines) + "\n"
