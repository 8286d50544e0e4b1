"""Wrap a data loader so that its position is saved: `run.batches(loader)` yields its batches.

The position is the number of batches that the training loop has received, not the number that
workers have loaded in advance. Batches that are left out are counted, too, so that a number always
refers to the same batch. There is one exception. If the script ends epochs early, after a fixed
number of steps, an epoch reaches further into the data when batches are left out, and later numbers
refer to other batches.
"""

import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.checkpoint.batches.loaders import StatefulLoader, loader_of
from holdfast.checkpoint.batches.order import Order
from holdfast.core.errors import BadUse
from holdfast.core.left_out import MAX_NUMBER, SKIPPED, LeftOut
from holdfast.core.link import job_link, note_batch
from holdfast.core.whole import whole_number

_logger = logging.getLogger(__name__)
_newest: "weakref.ref[Batches] | None" = None


class Batches:
    """Iterate over the batches of a loader, and save and restore the position.

    Each `for` loop is an epoch, or the rest of an epoch. Save the object with the training's state,
    as `{"batches": batches}`. Put it under `per_rank` if there are several ranks, else under
    `state`. After a restore, the first `for` loop continues after the last batch that was received
    before the save.
    """

    def __init__(self, loader: Any, *, left_out: LeftOut | None = None) -> None:
        """Wrap a loader.

        Args:
            loader: a DataLoader, a StatefulDataLoader, a batch sampler or anything else to iterate
                over.
            left_out: the batches to leave out; None for those that the supervisor of this process
                has set.

        Raises:
            BadUse: the loader cannot be iterated, its order cannot be restored, or the supervisor's
                setting is malformed.
        """
        global _newest  # noqa: PLW0603 - one process is one rank with one training
        self._source = loader
        self._loader = loader_of(loader)
        self._left_out = LeftOut.of_environment() if left_out is None else left_out
        self._epoch = 0
        self._before = 0
        """The number of batches in earlier epochs."""
        self._taken = 0
        """The number of batches of this epoch up to the last one that the training has received."""
        self._order = Order()
        """The recorded order of this epoch, if `_taken` is above 0."""
        self._restored: Mapping[str, Any] | None = None
        """A restored state with which the next loop begins."""
        self._loop: object = None
        """The current loop; iterating over a former loop no longer changes the position."""
        self._has_begun = self._is_saved = self._was_restored = False
        _newest = weakref.ref(self)

    @property
    def epoch(self) -> int:
        """Return the number of the current epoch (between epochs: the next one), from 0 on."""
        return self._epoch

    @property
    def number(self) -> int:
        """Return the number of the last batch received, counted from 1 over all epochs, or 0."""
        return self._before + self._taken

    @property
    def position(self) -> int:
        """Return the number of batches of the present epoch that the training has received.

        Before a `for` loop, this is the index within the epoch of the loop's first batch.
        """
        return self._taken

    @property
    def has_begun(self) -> bool:
        """Return True if the training has received a batch in this process."""
        return self._has_begun

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch, including those that are left out."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch. If the loop ends early, the epoch ends, too.

        Raises:
            BadUse: another loader was wrapped later, and only the newest one may be iterated.
        """
        restored, self._restored = self._restored, None
        self._loop = loop = object()
        self._warn_unless_placed()
        before = self._before
        if restored is not None and self._taken:
            batches = self._loader.go_on(
                lambda number: before + number in self._left_out,
                taken=self._taken,
                before=before,
                order=self._order,
                state=restored["loader"],
            )
        else:
            if self._taken:  # the last loop ended within its epoch
                self._end_epoch(self._taken)
                before = self._before
            if restored is not None:
                self._order.put_back_counts(self._source)
                self._order.put_back_own(self._source)
            self._order = Order.of(self._source)
            batches = self._loader.begin(
                lambda number: before + number in self._left_out, is_first=not self._epoch
            )
        for number, batch in batches:
            self._took(number)
            try:
                yield batch
            except GeneratorExit:
                if self._loop is loop:
                    self._end_epoch(self._taken)
                raise
        if self._loop is loop:
            self._report(self._before + self._loader.count + 1)
            self._end_epoch(self._loader.count)

    def end_epoch(self) -> None:
        """End the epoch after the last batch received, as if the loop had ended early.

        This method is for a trainer that ends an epoch early but keeps the iterator.
        """
        self._loop = None
        if self._taken and self._restored is None:
            self._end_epoch(self._taken)

    def _took(self, number: int) -> None:
        if _newest is None or _newest() is not self:
            raise BadUse(
                "Another loader was given to run.batches() meanwhile. Give it only the training's loader."
            )
        if number > self._taken + 1:
            self._report(self._before + number)
        self._taken, self._has_begun = number, True
        if self._is_saved:  # otherwise, the number may mean another batch in a later attempt
            note_batch(self._before + number)

    def _warn_unless_placed(self) -> None:
        if self._left_out.ranges and not (self._was_restored or self._has_begun):
            _logger.warning(
                "Batches %s are left out, counted from the start of the data, since no position was restored. Where "
                "the training goes on from a checkpoint, give the batches to save() and restore().",
                self._left_out.as_text(),
            )

    def _report(self, before: int) -> None:
        for first, last in self._left_out.between(self._before + self._taken, before):
            job_link().emit(SKIPPED, {"first": first, "last": last, "epoch": self._epoch})

    def _end_epoch(self, count: int) -> None:
        self._epoch += 1
        self._before += count
        self._taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch received, as plain values and tensors.

        If the loader has its own `state_dict`, its state is included.
        """
        self._is_saved = True
        if self._restored is not None:
            return dict(self._restored)
        order = self._order if self._taken else Order.of_next(self._source)
        return {
            "epoch": self._epoch,
            "before": self._before,
            "taken": self._taken,
            "order": order.to_plain(),
            "loader": self._loader.state() if self._taken else None,
            **self._form(),
        }

    def _form(self) -> dict[str, Any]:
        """Return the properties of the loader that must be the same at the save and at the restore.

        If they differ, the number of a batch would refer to other data.
        """
        source = self._source
        try:  # the number of samples, since the number of batches may differ between epochs
            length = len(getattr(source, "dataset", source))
        except (TypeError, NotImplementedError):  # a stream has no length
            length = None
        size = getattr(source, "batch_size", None)
        if size is None:
            size = getattr(getattr(source, "batch_sampler", None), "batch_size", None)
        return {"kind": self._loader.kind, "length": length, "batch_size": whole_number(size)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop continue at a saved position.

        Raises:
            BadUse: `state` was not made by `state_dict`, or the loader differs from the saved one.
        """
        try:
            numbers = [whole_number(state[name]) for name in ("epoch", "before", "taken")]
            epoch, before, taken = (one for one in numbers if one is not None and one >= 0)
            order = Order.of_plain(state["order"])
            form = {name: state[name] for name in self._form()}
            restored = {**state, "loader": state["loader"]}
            if taken and form["kind"] == StatefulLoader.kind:
                restored["loader"]["loader"], restored["loader"]["drawn"]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise BadUse(
                f"This is not a position in the data that run.batches() has saved ({error!r}). Restore it from "
                "the entry under which the batches were saved."
            ) from error
        if taken or self._left_out.between(before, MAX_NUMBER + 1):
            self._check(form)
        self._epoch, self._before, self._taken = epoch, before, taken
        self._order, self._restored = order, restored
        self._loop, self._is_saved, self._was_restored = None, True, True

    def _check(self, saved: Mapping[str, Any]) -> None:
        for name, now in self._form().items():
            if saved[name] != now:
                what = _NAMES[name]
                raise BadUse(
                    f"The {what} was {saved[name]} when the position in the data was saved, and is {now}, so that the "
                    "same position would be other data. Give run.batches() the loader as it was, or restore "
                    "without the batches to begin an epoch anew."
                )


_NAMES = {"kind": "kind of loader", "length": "length of the data", "batch_size": "batch size"}
