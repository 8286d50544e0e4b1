"""Run one evaluation task from its requests to its scores, or compute metrics, in a forked process.

The process receives its jobs over a socket from the host, and uses the harnesses that its parent,
the zygote, imported. The process ends when the host ends.
"""

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.core.phases import note_phase, phase
from holdfast.core.processes import die_with_parent
from holdfast.evaluate.harness.client import WireClient
from holdfast.evaluate.harness.failure import sentence
from holdfast.evaluate.harness.jobs import AllSent, Job, frame, receive
from holdfast.evaluate.types.harness import Harness
from holdfast.evaluate.types.reads import ReadRecorder
from holdfast.evaluate.types.requests import decode_answer
from holdfast.evaluate.wire import messages
from holdfast.profile import start_evaluation, stop_phases


def work(
    channel: socket.socket,
    harnesses: Mapping[str, Harness],
    *,
    node: int,
    logs: Path,
    zygote_pid: int,
) -> None:
    """Do the jobs that arrive on the channel until the channel closes."""
    die_with_parent(zygote_pid)
    # Join all processes that this one forks (lm-eval computes bootstraps in a pool) in one group,
    # so that all of them end together.
    os.setpgid(0, 0)
    os.register_at_fork(after_in_child=die_with_parent)
    start_evaluation(node)
    try:
        _work(channel, harnesses, node, logs)
    finally:
        stop_phases()


def _work(channel: socket.socket, harnesses: Mapping[str, Harness], node: int, logs: Path) -> None:
    recorder: ReadRecorder | None = None
    while True:
        try:
            job = receive(channel)
        except EOFError:
            return
        _log_to(logs / _log_name(job, node))
        match job:
            case messages.RunTask():
                channel.sendall(frame(_run(job, harnesses[job.entry.harness], node, channel)))
            case messages.MeasureSample():
                recorder = recorder or ReadRecorder()  # before the first metric job loads its task
                channel.sendall(frame(_measure(job, harnesses[job.entry.harness], recorder)))
            case _:
                raise AssertionError(f"{type(job).__name__} is no job of a child's")


def log_name(model: int, task: int) -> str:
    """Name the file, below the evaluation's folder of logs, for the output of a task's client."""
    return f"task-{model}-{task}.log"


def _log_name(job: Job, node: int) -> str:
    return (
        log_name(job.facts.model, job.task)
        if isinstance(job, messages.RunTask)
        else f"metrics-{node}.log"
    )


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _run(
    job: messages.RunTask, harness: Harness, node: int, channel: socket.socket
) -> messages.TaskEnded:
    client = WireClient(
        os.environ[messages.ENV_ADDRESS],
        os.environ[messages.ENV_TOKEN],
        node=node,
        task=job.task,
        facts=job.facts,
        asked=_sayer(channel, time.monotonic_ns()),
    )
    try:
        result = harness.run(job.entry, client, Path(job.folder))
        ended = messages.TaskEnded(model=job.facts.model, task=job.task, result=result)
        messages.encode(ended)  # raises if the values are not plain or too long
    except BaseException as error:
        traceback.print_exc()
        return messages.TaskEnded(model=job.facts.model, task=job.task, error=sentence(error))
    return ended


def _sayer(channel: socket.socket, began_ns: int) -> Callable[[], None]:
    def say() -> None:
        note_phase("preprocess", began_ns)
        channel.sendall(frame(AllSent()))

    return say


def _measure(
    job: messages.MeasureSample, harness: Harness, recorder: ReadRecorder
) -> messages.SampleMeasured:
    started_s = time.monotonic()
    measured, error = b"", ""
    try:
        answers = [decode_answer(body) for body in job.answers]
        with phase("metric"):
            measured = harness.measure(job.entry, job.sample, answers, job.facts)
    except BaseException as raised:
        traceback.print_exc()
        error = sentence(raised)
    seconds = time.monotonic() - started_s
    # Report all files that this process has read so far, since this metric may use a table that an
    # earlier sample's metric loaded. Leave out the tokenizer's folder, which differs in each
    # evaluation; the harness's key covers its content.
    return messages.SampleMeasured(
        metric_key=job.metric_key,
        measured=measured,
        read=recorder.files(apart_from=[job.facts.tokenizer]) if measured else None,
        seconds=seconds,
        error=error,
    )
