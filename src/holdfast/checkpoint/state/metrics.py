"""Check and read the metrics of a checkpoint, which come from `save` or from `run.step`."""

import contextlib
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from holdfast.core.errors import BadUse

_MOST: Final = 100
_LONGEST: Final = 100
"""The limit on the length of a name, since all metrics are sent in one message."""
_logger = logging.getLogger("holdfast")


def check_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Check the metrics that the user passed to `save`.

    The values of tensors are not read: reading a tensor on a GPU would wait for the GPU.

    Raises:
        BadUse: a name or a value is not allowed; the message names it.
    """
    if not isinstance(metrics, Mapping) or len(metrics) > _MOST:
        raise BadUse(
            f"metrics is {type(metrics).__name__}; allowed is a dict of at most {_MOST} names and "
            "numbers."
        )
    checked: dict[str, Any] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST:
            raise BadUse(
                f"metrics has a name {name!r}. Give text of up to {_LONGEST} characters, such as "
                "'val_loss'."
            )
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.is_complex():
                raise BadUse(
                    f"metrics has a {tuple(value.shape)} tensor as {name!r}. Give one number."
                )
            checked[name] = value.detach()
            continue
        number = math.nan
        if not isinstance(value, str | bytes):
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                number = float(value)
        if not math.isfinite(number):
            raise BadUse(f"metrics has {value!r} as {name!r}; allowed is a finite number.")
        checked[name] = number
    return checked


def read_metrics(
    metrics: Mapping[str, Any], boundaries: Iterable[torch.cuda.Event]
) -> dict[str, float]:
    """Convert the metrics to numbers, and leave out values that are not finite.

    Call this function in a background thread, since it waits for GPUs.

    Args:
        metrics: numbers, or values that can be converted to a number, such as a tensor with one
            element, by name.
        boundaries: CUDA events after which the tensors hold their final values.
    """
    found = {}
    for name, value in list(metrics.items())[:_MOST]:
        try:
            number = _number(value, boundaries)
        except Exception as error:  # a user's value may raise any error; the save must go on
            _logger.debug("metric %r is left out: %s", name, error)
            continue
        if math.isfinite(number) and 0 < len(name) <= _LONGEST:
            found[name] = number
        else:
            _logger.debug("metric %r is left out: it is %s", name, number)
    return found


def _number(value: Any, boundaries: Iterable[torch.cuda.Event]) -> float:
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return float(value)
    # Read on a separate stream. On the training's stream, the read would wait for all work that is
    # queued by then.
    stream: torch.cuda.Stream = torch.cuda.Stream(value.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for boundary in boundaries:
            stream.wait_event(boundary)
        return float(value)
