"""Cause faults inside a training script: deadlocks, slow steps, NaN gradients, bad batches.

The script lets the faults happen by two calls:

    faults = RankFaults()
    for inputs, targets in batches:
        inputs = faults.batch(batches.number, inputs)
        loss = ...
        faults.before_backward(model.parameters())
        loss.backward()

Both calls do nothing unless an `Injector` has requested a fault. The injector sets
`$HOLDFAST_TEST_FAULTS` to a folder, and writes a request file for each rank there. A bad batch
stays bad, as damaged data would: its number is stored in the folder, and each attempt that reads
the batch gets the damaged one.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

ENV_FOLDER = "HOLDFAST_TEST_FAULTS"
"""The environment variable with the folder of the requests; the injector sets it for the job."""
BAD_FACTOR = 1000.0
"""The factor by which all values of a bad batch are multiplied."""


class Parameter(Protocol):
    """A tensor with hooks that can change its gradient."""

    requires_grad: bool

    def register_hook(self, hook: Any) -> Any:
        """Let `hook` replace the gradient before gradients are reduced over the ranks."""
        ...


T = TypeVar("T")


class RankFaults:
    """Cause the faults that are requested for one rank."""

    def __init__(self, folder: Path | None = None, rank: int | None = None) -> None:
        """Store the folder of the requests and the rank.

        Args:
            folder: the folder of the requests; None for `$HOLDFAST_TEST_FAULTS`.
            rank: the rank of this process; None for `$RANK`.
        """
        set_folder = os.environ.get(ENV_FOLDER)
        self._folder = folder or (Path(set_folder) if set_folder else None)
        self._rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._bad = set() if self._folder is None else bad_batches(self._folder, self._rank)
        self._slow_until_s = 0.0
        self._slow_by_s = 0.0

    def batch(self, number: int, inputs: T) -> T:
        """Return the inputs of a batch; if the batch is bad, return damaged inputs.

        Args:
            number: the number of the batch, counted over all epochs.
            inputs: a tensor of floats, or any value that can be multiplied.
        """
        if self._folder is None:
            return inputs
        order = self._take("bad-batch")
        if order is not None:
            numbers = range(number, number + int(order["batches"]))
            self._bad |= set(numbers)
            for one in numbers:
                (self._folder / f"bad-{self._rank}-{one}").touch()
            self._took_effect(order, batches=[numbers[0], numbers[-1]])
        return cast("T", inputs * BAD_FACTOR) if number in self._bad else inputs  # type: ignore[operator]

    def before_backward(self, parameters: Iterable[Parameter]) -> None:
        """Carry out a requested fault: block forever, wait for some time, or set a NaN gradient.

        Args:
            parameters: the parameters of the model; the first trainable one gets the NaN gradient.
        """
        if self._folder is None:
            return
        order = self._take("in-step")
        if order is not None:
            self._took_effect(order)
            match order["kind"]:
                case "deadlock":
                    lock = threading.Lock()
                    while True:  # the other ranks wait in the collectives of the backward pass
                        lock.acquire()
                case "slow":
                    self._slow_until_s = time.monotonic() + float(order["for_s"])
                    self._slow_by_s = float(order["by_s"])
                case "nan":
                    first = next(one for one in parameters if one.requires_grad)
                    _spoil_next_gradient(first)
        if time.monotonic() < self._slow_until_s:
            time.sleep(self._slow_by_s)

    def _take(self, name: str) -> dict[str, Any] | None:
        assert self._folder is not None
        path = self._folder / f"{name}-{self._rank}.json"
        taken = path.with_suffix(".taken")
        with contextlib.suppress(FileNotFoundError):
            path.rename(taken)
            return cast("dict[str, Any]", json.loads(taken.read_text()))
        return None

    def _took_effect(self, order: dict[str, Any], **more: object) -> None:
        assert self._folder is not None
        effect = {
            "at_s": time.time(),
            "monotonic_s": time.monotonic(),
            "pid": os.getpid(),
            **more,
        }
        path = self._folder / f"effect-{order['number']}.json"
        path.with_suffix(".new").write_text(json.dumps(effect))
        path.with_suffix(".new").rename(path)


def _spoil_next_gradient(parameter: Parameter) -> None:
    hooks: list[Any] = []

    def spoil(gradient: Any) -> Any:
        hooks.pop().remove()
        return gradient * float("nan")

    hooks.append(parameter.register_hook(spoil))


def bad_batches(folder: Path, rank: int) -> set[int]:
    """Return the numbers of the bad batches of a rank."""
    return {int(path.name.rpartition("-")[2]) for path in folder.glob(f"bad-{rank}-*")}


def order(folder: Path, rank: int, number: int, kind: str, **parameters: object) -> None:
    """Request a fault inside the training script of one rank.

    Args:
        folder: the folder of the requests.
        rank: the rank to strike.
        number: the number of the fault; the rank confirms the effect in `effect-NUMBER.json`.
        kind: `deadlock`, `slow`, `nan` or `bad batch`.
        parameters: `for_s` and `by_s` of a slow rank, `batches` of a bad batch.
    """
    name = "bad-batch" if kind == "bad batch" else "in-step"
    path = folder / f"{name}-{rank}.json"
    path.with_suffix(f".{number}").write_text(
        json.dumps({"number": number, "kind": kind, **parameters})
    )
    path.with_suffix(f".{number}").rename(path)


def withdraw(folder: Path, rank: int, kind: str) -> None:
    """Withdraw a request that the rank has not carried out yet."""
    name = "bad-batch" if kind == "bad batch" else "in-step"
    (folder / f"{name}-{rank}.json").unlink(missing_ok=True)


def effect_of(folder: Path, number: int) -> dict[str, Any] | None:
    """Return the time and the process of a fault's effect; None if there was no effect so far."""
    path = folder / f"effect-{number}.json"
    with contextlib.suppress(FileNotFoundError):
        return cast("dict[str, Any]", json.loads(path.read_text()))
    return None
