"""Compute the microbatches in flight and the idle share of 1F1B, plain and interleaved."""


def chunks_in_flight(stage: int, stages: int, microbatches: int, chunks: int = 1) -> int:
    """Return how many forward passes of one model chunk a stage holds at its peak.

    - Plain 1F1B: min(p - i, m). The first stage holds p microbatches, the last one 1.
    - Interleaved 1F1B: 2·(p - i - 1) + (v - 1)·p + 1, at most m·v (Narayanan et al.,
      arXiv:2104.04473, section 2.2). On the first stage these activations equal L·(1 + (p -
      1)/(p·v)) layers (Korthikanti et al., arXiv:2205.05198, section 4.2.3).

    Args:
        stage: i, counted from 0.
        stages: p, the number of pipeline stages.
        microbatches: m, the microbatches of one step.
        chunks: v, the model chunks on one stage.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not below {stages}")
    if chunks == 1:
        return min(stages - stage, microbatches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, microbatches * chunks)


def bubble_over_ideal(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return the ratio of a stage's idle time to its busy time: (p - 1)/(v·m).

    Narayanan et al., arXiv:2104.04473, section 2.2.
    """
    return (stages - 1) / (chunks * microbatches)
