"""Errors of an evaluation."""

from holdfast.core.errors import HoldfastError


class EvaluationError(HoldfastError):
    """An evaluation, or a part of one, failed; finished work is kept."""
