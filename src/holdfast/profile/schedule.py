"""Compute when each pipeline stage runs each forward and backward pass of a 1F1B step."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Pass:
    """Hold one pass of a microbatch through a stage; times are seconds from the step's start."""

    stage: int
    microbatch: int
    kind: Literal["forward", "backward"]
    start_s: float
    end_s: float


def one_f_one_b(
    stages: int, microbatches: int, *, forward_s: float, backward_s: float, send_s: float = 0.0
) -> list[Pass]:
    """Return all passes of one training step under the 1F1B schedule, ordered by their ends.

    The schedule is from Narayanan et al., arXiv:2104.04473, section 2.2. Stage i of p runs, in this
    order:

    1. the forward passes that fill the stages after it, at most p - i - 1
    2. one forward and one backward pass in turn, as long as forward passes remain
    3. the remaining backward passes

    A pass starts as soon as its stage is free and its input has arrived.

    Args:
        stages: p, the number of pipeline stages.
        microbatches: m, the number of microbatches per step.
        forward_s: seconds of a forward pass on one stage.
        backward_s: seconds of a backward pass on one stage.
        send_s: seconds from the end of a pass until its output has arrived at the next stage.
    """
    orders = [_order(stage, stages, microbatches) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}
    free_s = [0.0] * stages
    at = [0] * stages
    passes: list[Pass] = []
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                kind, microbatch = orders[stage][at[stage]]
                ready_s = _ready(done, kind, stage, microbatch, stages, send_s)
                if ready_s is None:
                    break
                start_s = max(free_s[stage], ready_s)
                end_s = start_s + (forward_s if kind == "forward" else backward_s)
                free_s[stage] = done[kind, stage, microbatch] = end_s
                passes.append(Pass(stage, microbatch, kind, start_s, end_s))
                at[stage] += 1
    return sorted(passes, key=lambda one: (one.end_s, one.stage))


def _order(
    stage: int, stages: int, microbatches: int
) -> list[tuple[Literal["forward", "backward"], int]]:
    warm = min(stages - stage - 1, microbatches)
    order: list[tuple[Literal["forward", "backward"], int]] = [("forward", k) for k in range(warm)]
    for k in range(microbatches - warm):
        order += [("forward", warm + k), ("backward", k)]
    return order + [("backward", k) for k in range(microbatches - warm, microbatches)]


def _ready(
    done: dict[tuple[str, int, int], float],
    kind: str,
    stage: int,
    microbatch: int,
    stages: int,
    send_s: float,
) -> float | None:
    """Return the second at which the input of a pass arrives.

    Return None if the pass that produces the input has not been scheduled yet.
    """
    if kind == "forward":
        if stage == 0:
            return 0.0
        end_s = done.get(("forward", stage - 1, microbatch))
    elif stage == stages - 1:
        return done.get(("forward", stage, microbatch))
    else:
        end_s = done.get(("backward", stage + 1, microbatch))
    return None if end_s is None else end_s + send_s
