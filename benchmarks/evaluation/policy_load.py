"""Measure the answers per second that the policy processes, and the memory of its state."""

import resource
import time
from collections import deque
from dataclasses import dataclass

from holdfast.evaluate.policy.decisions import decide
from holdfast.evaluate.policy.events import (
    Answered,
    EngineReady,
    NodeJoined,
    Recall,
    Recalled,
    RequestSpec,
    SamplesAdded,
    SampleSpec,
    SendRequests,
)
from holdfast.evaluate.policy.priors import Priors
from holdfast.evaluate.policy.state import PolicyConfig, State
from holdfast.evaluate.types.engine import Curve

_CHUNK = 4096
_TASKS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoad:
    """The result: the rate counts CPU time inside `decide` alone, memory the whole process."""

    samples: int
    engines: int
    answers_per_s: float
    add_s: float
    peak_rss_bytes: int


def policy_load(
    *, samples: int = 1_000_000, engines: int = 2048, engines_per_node: int = 8
) -> PolicyLoad:
    """Give `samples` generations to `engines` engines that answer in turn, and time the policy.

    Raises:
        RuntimeError: not all were answered.
    """
    curve = Curve(
        prefill_tokens_per_s=40_000.0,
        request_s=0.001,
        step_base_s=0.018,
        step_sequence_s=0.0002,
        max_batch=64,
    )
    state = State(
        Priors([f"task {number}" for number in range(_TASKS)]), PolicyConfig(engines=engines)
    )
    for node in range(engines // engines_per_node):
        decide(state, NodeJoined(now_s=0.0, node=node, metric_slots=16))
    began_s = time.process_time()
    for first in range(0, samples, _CHUNK):
        decide(state, _chunk(first, min(first + _CHUNK, samples)))
    held: list[deque[int]] = [deque() for _ in range(engines)]
    ready = [
        EngineReady(now_s=1.0, engine=engine, node=engine // engines_per_node, model=0, curve=curve)
        for engine in range(engines)
    ]
    for joined in ready:
        for action in decide(state, joined):
            if isinstance(action, SendRequests):
                held[action.engine].extend(action.requests)
    add_s = time.process_time() - began_s
    busy_s = 0.0
    answered = 0
    now_s = 1.0
    turn: deque[int] = deque(range(engines))
    while answered < samples and turn:
        engine = turn.popleft()
        mine = held[engine]
        if not mine:
            if any(held):
                turn.append(engine)
            continue
        turn.append(engine)
        request = mine.popleft()
        now_s += 0.00002
        event = Answered(
            now_s=now_s, engine=engine, request=request, new_tokens=1 + request % 97, engine_s=2.0
        )
        began_s = time.process_time()
        actions = decide(state, event)
        busy_s += time.process_time() - began_s
        answered += 1
        for action in actions:
            if isinstance(action, SendRequests):
                held[action.engine].extend(action.requests)
            elif isinstance(action, Recall):
                decide(state, Recalled(now_s=now_s, engine=action.engine, requests=()))
    if state.samples_done != samples:
        raise RuntimeError(
            f"{samples - state.samples_done} of {samples} samples were not answered."
        )
    return PolicyLoad(
        samples=samples,
        engines=engines,
        answers_per_s=answered / busy_s,
        add_s=add_s,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _chunk(first: int, end: int) -> SamplesAdded:
    return SamplesAdded(
        now_s=0.0,
        samples=tuple(
            SampleSpec(
                sample=number,
                model=0,
                task=number % _TASKS,
                number=number // _TASKS,
                requests=(
                    RequestSpec(
                        request=number, prompt_tokens=200, max_new_tokens=64 << number % _TASKS % 4
                    ),
                ),
            )
            for number in range(first, end)
        ),
    )
