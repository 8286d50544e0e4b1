"""Run Holdfast on an emulated cluster, with its real coordinator, agents, hosts and workers.

A node is a process group: one agent with its own part of the stores, its own quota and its own NIC.
Engines are `engines/simulated.py`, which sleep by their curve. Storage is one shared server. Time
counts from the announcement of a checkpoint to a coordinator whose nodes are up, whose engine
processes wait and whose hosts are prepared. So the start of processes by a scheduler, or by this
machine's two cores, does not count.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from common.jobs import DoesNotWork
from evaluation.emulated_engine import ENV_BEGAN
from evaluation.miniature import Miniature
from evaluation.storage import make_weights, serving
from holdfast.core.atomic import write_atomic
from holdfast.core.processes import kill_descendants
from holdfast.evaluate.coordinator.config import CoordinatorConfig, CoordinatorFiles, task_names
from holdfast.evaluate.engines.simulated import simulated_answer
from holdfast.evaluate.policy.priors import TaskHistory, encode_history
from holdfast.evaluate.run.session import NodesNeeded, Session
from holdfast.evaluate.types.engine import Curve, EngineSpec
from holdfast.evaluate.types.harness import AnsweredSample, ModelFacts, SampleRequests
from holdfast.evaluate.types.suite import Suite, TaskEntry
from holdfast.evaluate.types.timeline import Timeline, read_timeline
from holdfast.evaluate.weights.describe import describe
from holdfast.evaluate.wire.messages import AddModel, Message, ModelOutcome, Status, TaskOutcome
from holdfast.simulate.workload import SimCluster, Workload
from holdfast.testing.harness import SyntheticHarness, synthetic_entry

MIB = 1024 * 1024
_BENCHMARKS = Path(__file__).parents[1]
START_TIMEOUT_S = 180.0
SETTLE_S = 1.0
"""The time after all connections in which the processes become idle."""
END_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """The result of one emulation, in seconds from the announcement of the first checkpoint."""

    makespan_s: float
    model_end_s: tuple[float, ...]
    timeline: Timeline
    zero_s: float
    """The zero of these times in the timeline."""
    coordinator_share: float
    """CPU time of the coordinator while it worked, as a share of one core."""
    busy_share: float
    """CPU time of all processes in that time, as a share of this machine's cores."""
    remote_bytes: int
    scores: dict[str, float]
    """The scores of the first checkpoint."""


@dataclass
class _Heard:
    """The coordinator's messages and their times."""

    models: dict[int, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    all_serve: bool = False

    def __call__(self, message: Message) -> None:
        match message:
            case ModelOutcome(model=model, error=error):
                self.models[model] = time.monotonic()
                self.errors += [error] if error else []
            case Status(engines=engines, engines_ready=ready):
                self.all_serve = self.all_serve or 0 < engines <= ready
            case TaskOutcome(result=result, error=error):
                self.errors += [error] if error else []
                if result is not None and message.model == 0:
                    self.scores |= {
                        task: row["digest,none"] for task, row in result.results["results"].items()
                    }


def emulate(
    mini: Miniature, *, history: bool, folder: Path, timeout_s: float, seed: int = 0
) -> Emulated:
    """Run the miniature's models on its cluster.

    All models but the first are announced once every engine serves the first.

    Args:
        mini: the workload and the cluster.
        history: whether the policy has the samples' costs of an earlier checkpoint, each with
            log-normal noise of a fifth.
        folder: a new folder for all files.
        timeout_s: the limit once the processes are up.
        seed: the seed of the noise.

    Raises:
        DoesNotWork: the emulation did not end in time or without an error.
    """
    folder.mkdir(parents=True)
    cluster, workload = mini.cluster, mini.workload
    remote = folder / "remote"
    for number, model in enumerate(workload.models):
        make_weights(remote / f"step-{number}", round(model.size_bytes), number)
    config = _config(workload, cluster, folder)
    files = CoordinatorFiles(folder)
    files.folder.mkdir(parents=True)
    os.environ[ENV_BEGAN] = str(folder / "began")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(_BENCHMARKS), os.environ.get("PYTHONPATH")))
    )
    known = _history(config.suite, workload.history(0.2, seed)) if history else []
    files.history.write_bytes(encode_history(known))
    with serving(remote, cluster.store_bytes_per_s / MIB) as storage:
        manifests = [
            describe(f"{storage.url}/step-{number}") for number in range(len(workload.models))
        ]
        before_bytes = storage.sent_bytes()
        heard = _Heard()
        store = folder / "stores"
        store.mkdir()
        quota_bytes = 4 * round(max(model.size_bytes for model in workload.models)) + 64 * MIB
        flags: tuple[str, ...] = ("--store-root", str(store), "--store-bytes", str(quota_bytes))
        flags += ("--nic-mib-s", f"{cluster.fabric_bytes_per_s / MIB:.3f}")
        session = Session(config, NodesNeeded(nodes=cluster.nodes, agent_flags=flags), heard)
        models = [
            # As the command has it, tasks' clients need not wait for the weights: a tokenizer is
            # there before.
            AddModel(
                model=number,
                name=f"step-{number}",
                manifest=one,
                tokenizer=str(remote / f"step-{number}"),
            )
            for number, one in enumerate(manifests)
        ]
        try:
            began_s, used = asyncio.run(_run(session, models, cluster, heard, timeout_s))
        except DoesNotWork as error:
            log = folder / "logs" / "coordinator.log"
            said = log.read_text(errors="replace")[-3000:] if log.exists() else "nothing"
            raise DoesNotWork(f"{error}; the coordinator's log ends: {said}") from error
        finally:
            kill_descendants_but(storage.pid)
        remote_bytes = storage.sent_bytes() - before_bytes
    if heard.errors:
        raise DoesNotWork(
            f"{len(heard.errors)} errors, the first: {heard.errors[0]} (logs: {folder}/logs)"
        )
    ends_s = tuple(heard.models[number] - began_s for number in range(len(models)))
    timeline = read_timeline(folder / "timeline.jsonl")
    return Emulated(
        makespan_s=max(ends_s),
        model_end_s=ends_s,
        timeline=timeline,
        zero_s=min(span.t0 for span in timeline.models),
        coordinator_share=used[0],
        busy_share=used[1],
        remote_bytes=remote_bytes,
        scores=heard.scores,
    )


async def _run(
    session: Session,
    models: Sequence[AddModel],
    cluster: SimCluster,
    heard: _Heard,
    timeout_s: float,
) -> tuple[float, tuple[float, float]]:
    running = asyncio.create_task(session.run())
    try:
        coordinator = await _up(running, cluster)
        began_s, before = time.monotonic(), _used(coordinator)
        write_atomic(Path(os.environ[ENV_BEGAN]), str(began_s).encode())
        waiting = list(models)
        session.add(waiting.pop(0))
        after, deadline_s = before, began_s + timeout_s
        while len(heard.models) < len(models):
            if running.done() or heard.errors:
                break
            if time.monotonic() > deadline_s:
                raise DoesNotWork(f"the emulation did not end within {timeout_s:.0f} s")
            if heard.all_serve:  # the next ones are there while the first is evaluated
                while waiting:
                    session.add(waiting.pop(0))
            await asyncio.sleep(0.05)
            with contextlib.suppress(psutil.NoSuchProcess):
                after = _used(coordinator)
        session.finish()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running), END_TIMEOUT_S)
        if running.done() and running.exception():
            raise DoesNotWork(
                f"the session ended: {running.exception()!r}"
            ) from running.exception()
        if len(heard.models) < len(models):
            raise DoesNotWork(f"the session ended early: {heard.errors or 'no error was told'}")
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=END_TIMEOUT_S)
    seconds = max(1e-9, after[2] - before[2])
    share = (after[0] - before[0]) / seconds
    return began_s, (share, (after[1] - before[1]) / seconds / len(os.sched_getaffinity(0)))


async def _up(running: "asyncio.Task[int]", cluster: SimCluster) -> psutil.Process:
    """Wait until the command, agents, hosts and engines have connected; return the coordinator."""
    wanted = 1 + 2 * cluster.nodes + cluster.engines
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if running.done():
            raise DoesNotWork(
                f"the session ended before it began: {running.exception() or running.result()!r}"
            )
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if "holdfast.evaluate.coordinator.server" in child.cmdline():
                    dialled = [
                        one
                        for one in child.net_connections("tcp")
                        if one.status == psutil.CONN_ESTABLISHED
                    ]
                    if len(dialled) >= wanted:
                        await asyncio.sleep(SETTLE_S)
                        return child
        await asyncio.sleep(0.1)
    raise DoesNotWork(f"not all of {wanted} processes were there within {START_TIMEOUT_S:.0f} s")


def _used(coordinator: psutil.Process) -> tuple[float, float, float]:
    """Return the CPU seconds of the coordinator and of the whole machine, and the time."""
    own, everyone = coordinator.cpu_times(), psutil.cpu_times()
    return own.user + own.system, everyone.user + everyone.nice + everyone.system, time.monotonic()


def _config(workload: Workload, cluster: SimCluster, folder: Path) -> CoordinatorConfig:
    return CoordinatorConfig(
        evaluation_id=folder.name,
        suite=Suite(name="emulated", entries=entries_of(workload)),
        spec=engine_spec(cluster, max(model.size_bytes for model in workload.models)),
        engines_per_node=cluster.engines_per_node,
        nodes=cluster.nodes,
        folder=str(folder),
        journals=str(folder / "answers"),
        metric_slots=cluster.metric_slots,
        gather_s=60.0,
    )


def entries_of(workload: Workload) -> tuple[TaskEntry, ...]:
    """Return the workload's tasks as entries of a suite."""
    return tuple(
        synthetic_entry(
            task.name,
            # A request for a log-probability has one token more than its prompt.
            prompt_tokens=[
                tokens - (not new)
                for tokens, new in zip(task.prompt_tokens, task.new_tokens, strict=True)
            ],
            new_tokens=task.new_tokens,
            metric_s=task.metric_s if task.has_metric else (),
            max_new_tokens=task.max_new_tokens,
        )
        for task in workload.tasks
    )


def engine_spec(cluster: SimCluster, model_bytes: float) -> EngineSpec:
    """Return an emulated engine with the cluster's costs."""
    curve, copy_s = cluster.curve, model_bytes / cluster.device_bytes_per_s
    return EngineSpec(
        kind="evaluation.emulated_engine:EmulatedEngine",
        max_batch=curve.max_batch,
        options={**{name: getattr(curve, name) for name in Curve.__struct_fields__ if name != "max_batch"},
                 "start_s": cluster.engine_start_s, "load_s": copy_s, "swap_s": copy_s + cluster.swap_s},
    )  # fmt: skip


def _history(suite: Suite, history: Sequence[TaskHistory]) -> list[TaskHistory]:
    names = dict(zip((entry.name for entry in suite.entries), task_names(suite), strict=True))
    return [msgspec.structs.replace(task, task=names[task.task]) for task in history]


def kill_descendants_but(pid: int) -> None:
    """End all processes of an emulation except the storage."""
    for child in psutil.Process().children():
        if child.pid != pid:
            kill_descendants(child.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


class _Alone:
    """An `EngineClient` that immediately gives the emulated engines' answers."""

    facts = ModelFacts(model=0, name="", tokenizer="", max_length=0)

    def __init__(self, entry: TaskEntry) -> None:
        self._entry, self._harness = entry, SyntheticHarness()

    def ask(self, samples: Sequence[SampleRequests]) -> list[AnsweredSample]:
        answered = []
        for sample in samples:
            answers = []
            for request in sample.requests:
                wanted = request.sampling.extra["new_tokens"] if request.sampling else 0
                new_tokens = min(int(wanted or 0), request.max_new_tokens())
                answers.append(simulated_answer(request, new_tokens))
            measured = b""
            if sample.metric_key:
                entry = msgspec.structs.replace(
                    self._entry, options={"metric_s": [0.0] * len(samples)}
                )
                measured = self._harness.measure(entry, sample.sample, answers, self.facts)
            answered.append(
                AnsweredSample(sample=sample.sample, answers=answers, measured=measured)
            )
        return answered

    async def ask_one(self, sample: SampleRequests) -> AnsweredSample:
        return self.ask([sample])[0]


def scores_alone(workload: Workload) -> dict[str, float]:
    """Return the scores of the workload, computed task by task in this process."""
    scores: dict[str, float] = {}
    for entry in entries_of(workload):
        result = SyntheticHarness().run(entry, _Alone(entry), Path())
        scores |= {task: row["digest,none"] for task, row in result.results["results"].items()}
    return scores
