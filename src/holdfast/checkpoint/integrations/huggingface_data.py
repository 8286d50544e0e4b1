"""Leave batches out of a `transformers.Trainer`'s data, and save its position in the data.

All epochs of a Trainer have the same number of steps. So for each batch that is left out, the
Trainer receives an additional later batch, which at the end of an epoch comes from the data's next
epoch. The number of steps does not change.

Batches are left out before their samples are loaded. A Trainer that resumes within an epoch skips
as many entries of the batch sampler as it has already trained on. This module gives it empty
entries to skip, and after them the batches from the saved position on.

With fewer ranks than usual, a rank trains on several micro-batches in place of one batch. These
micro-batches together have one batch number.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Self

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.errors import BadUse
from holdfast.core.left_out import SKIPPED, LeftOut
from holdfast.core.link import job_link, note_batch
from holdfast.core.whole import whole_number


class TrainerData:
    """Wrap a Trainer's batch sampler, to leave batches out and to count the position."""

    def __init__(self, source: Any, left_out: LeftOut, accumulation: int) -> None:
        """Wrap a batch sampler.

        The sampler must have a length, and it must have the same order whenever the same epoch is
        set.
        """
        self._source = source
        self._left_out = left_out
        self._accumulation = accumulation
        self._length = len(source)
        """The number of micro-batches in an epoch of the data."""
        self._position = 0
        """The number of micro-batches, over all epochs, that were trained on or left out."""
        self._passed = 0
        """The number of empty entries at the start of the Trainer's current epoch."""
        self._count = 0
        """The number of entries of the current epoch that were trained on or skipped."""
        self._given: deque[int] | None = None
        """The numbers of micro-batches that the loader has taken and the Trainer has not used."""

    @classmethod
    def put_into(cls, loader: Any, *, left_out: LeftOut, accumulation: int) -> Self | None:
        """Replace the batch sampler of a loader that Accelerate has prepared.

        Returns:
            The new batch sampler. None if batches cannot be left out, because the data is a stream,
            or because one rank reads the data for all.
        """
        base = getattr(loader, "base_dataloader", None)
        if type(loader) is not DataLoaderShard or type(base) is not DataLoader:
            return None
        if isinstance(base.dataset, IterableDataset) or base.batch_sampler is None:
            return None
        data = cls(base.batch_sampler, left_out, accumulation)
        # A DataLoader forbids the assignment after its construction.
        vars(base)["batch_sampler"] = data
        return data

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped batch sampler, such as the batch size."""
        if name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)

    def __len__(self) -> int:
        """Return the number of entries in one epoch of the Trainer."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Yield the entries of one epoch: empty ones to skip, and then lists of sample indices."""
        given: deque[int] = deque()
        if self._given is None:  # otherwise, other code iterates the data beside the training
            self._given = given
        return self._walk(given, self._position, self._passed)

    def _walk(self, given: deque[int], position: int, passed: int) -> Iterator[Any]:
        yield from ([] for _ in range(passed))
        due = self._length - passed
        while due:
            epoch = position // self._length
            self._set_epoch(epoch)
            number = before = epoch * self._length
            for number, batch in enumerate(self._source, before + 1):
                if number <= position or self._batch_of(number) in self._left_out:
                    continue
                given.append(number)
                yield batch
                due -= 1
                if not due:
                    return
            if number == before:  # the source is empty
                return
            position = before + self._length

    def _set_epoch(self, epoch: int) -> None:
        part = self._source
        while part is not None:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
            part = getattr(part, "batch_sampler", None) or getattr(part, "sampler", None)

    def _batch_of(self, number: int) -> int:
        """Return the number of the batch to which a micro-batch belongs; 0 for micro-batch 0."""
        if not number:
            return 0
        epoch, within = divmod(number - 1, self._length)
        return epoch * self._batches + within // self._accumulation + 1

    @property
    def _batches(self) -> int:
        """Return the number of batches in an epoch of the data."""
        return -(-self._length // self._accumulation)

    def begin_epoch(self, *, passed: int = 0) -> None:
        """Begin an epoch of the Trainer.

        Args:
            passed: the number of entries that the Trainer skips at the start of the epoch.
        """
        if 0 < self._count < self._length:  # the last epoch was ended early
            self._position = -(-self._position // self._length) * self._length
        self._passed = self._count = passed
        self._given = None

    def took(self, count: int) -> None:
        """Record that the Trainer has made a step with the next `count` micro-batches."""
        if self._given is None:
            return
        before = self._position
        for _ in range(min(count, len(self._given))):
            self._position = self._given.popleft()
            note_batch(self._batch_of(self._position))
        self._count += count
        skipped = self._left_out.between(self._batch_of(before), self._batch_of(self._position))
        for first, last in skipped:
            epoch = (first - 1) // self._batches
            job_link().emit(SKIPPED, {"first": first, "last": last, "epoch": epoch})

    def state(self) -> dict[str, int]:
        """Return the position after the last step."""
        epoch, taken = divmod(self._position, self._length)
        return {
            "epoch": epoch,
            "taken": taken,
            "accumulation": self._accumulation,
            "batches": self._batches,
        }

    def go_on(self, state: Mapping[str, Any] | None, *, step: int, accumulation_steps: int) -> int:
        """Set the position in the data to the saved one, so that training continues there.

        Args:
            state: the saved result of the method `state`; None if the checkpoint has none.
            step: the number of optimizer steps before the checkpoint.
            accumulation_steps: the number of micro-batches in one step of the optimizer.

        Returns:
            The number of batches that the Trainer skips at the start of its epoch.

        Raises:
            BadUse: the length of the data has changed since the save, but the run is configured to
                leave out certain batches, whose numbers would now mean other data.
        """
        epoch, steps = divmod(step, -(-self._length // accumulation_steps))
        passed = steps * accumulation_steps
        self._position = epoch * self._length + passed
        if state is None:
            return passed
        try:
            numbers = [whole_number(state[name]) for name in self.state()]
            epoch, taken, accumulation, batches = (one for one in numbers if one is not None)
        except (KeyError, TypeError, ValueError) as error:
            raise BadUse(
                f"The checkpoint has no valid position in the data ({state!r}). Restore an "
                "earlier checkpoint."
            ) from error
        if batches == self._batches:
            if accumulation != self._accumulation:
                taken = taken // accumulation * self._accumulation
            self._position = epoch * self._length + min(taken, self._length)
        elif self._left_out.ranges:
            raise BadUse(
                f"An epoch had {batches} batches a rank when the checkpoint was saved, and has "
                f"{self._batches}, so that the batches to leave out ({self._left_out.as_text()}) "
                "would be other data. Give the Trainer the data and the batch size as they were."
            )
        return passed
