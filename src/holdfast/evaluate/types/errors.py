"""Errors of an evaluation."""

from holdfast.core.errors import HoldfastError


class EvaluationError(HoldfastError):
    """An evaluation, or a part of it, could not be done; what was finished is kept."""
