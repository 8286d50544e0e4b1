"""Whether an engine may answer as a model: by its numerics, and after a swap by what it says to fixed prompts."""

import math

from holdfast.evaluate.coordinator.models import Model
from holdfast.evaluate.wire.messages import Serving

_TOLERANCE = (
    1e-4  # of a log-probability, where batches make floats differ; exact engines are allowed none
)


def unfit(model: Model, said: Serving, *, is_exact: bool) -> str:
    """Why an engine must not answer as this model; empty if it may."""
    if is_exact and model.numerics and said.numerics != model.numerics:
        return f"its numerics are {said.numerics}, the others' {model.numerics}"
    if said.how != "load" and model.canary is not None:
        allowed = 0.0 if is_exact else _TOLERANCE
        if not _agree(said.canary, model.canary, allowed):
            return "after the swap its canaries differ from a fresh load's"
    return ""


def _agree(canary: list[float], reference: list[float], allowed: float) -> bool:
    if len(canary) != len(reference):
        return False
    return all(
        (math.isnan(one) and math.isnan(other)) or one == other or abs(one - other) <= allowed
        for one, other in zip(canary, reference, strict=True)
    )
