"""Compute the microbatches in flight and the idle share of 1F1B, plain and interleaved."""


def chunks_in_flight(stage: int, stages: int, microbatches: int, chunks: int = 1) -> int:
    """Return how many forward passes of one model chunk a stage holds at its fullest.

    Plain 1F1B: min(p - i, m), so that the first stage holds p microbatches and the last one 1.
    Interleaved: 2·(p - i - 1) + (v - 1)·p + 1, at most m·v (Narayanan et al., arXiv:2104.04473,
    section 2.2). On the first stage that is L·(1 + (p - 1)/(p·v)) layers' worth (Korthikanti et
    al., arXiv:2205.05198, section 4.2.3).

    Args:
        stage: i, from 0.
        stages: p.
        microbatches: m, a step.
        chunks: v, a stage.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not below {stages}")
    if chunks == 1:
        return min(stages - stage, microbatches)
    return min(2 * (stages - stage - 1) + (chunks - 1) * stages + 1, microbatches * chunks)


def bubble_over_ideal(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return a stage's idle time over its busy time: (p - 1)/(v·m).

    Narayanan et al., arXiv:2104.04473, section 2.2.
    """
    return (stages - 1) / (chunks * microbatches)
