"""Start each kind of loader at a position within an epoch, and leave out batches.

| kind | reaches a position by | leaves a batch out |
|---|---|---|
| `OrderedLoader`: a DataLoader of indexed data | skipping items of its sampler | before it is loaded |
| `StatefulLoader`: a loader with `state_dict` and `load_state_dict` | loading its state | after it was loaded |
| `AnyIterable`: any other iterable | iterating from the start | after it was loaded |
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from torch.utils.data import DataLoader, IterableDataset

from holdfast.checkpoint.batches.order import Order
from holdfast.core.errors import BadUse


class Loader(Protocol):
    """Iterate over one kind of loader.

    The position within an epoch is the number of its batches so far, including those left out.
    """

    kind: ClassVar[str]
    """The name of the kind, as stored in the saved state."""
    count: int
    """The number of batches in the last epoch that was iterated to its end."""

    def begin(
        self, is_left_out: Callable[[int], bool], *, is_first: bool
    ) -> Iterator[tuple[int, Any]]:
        """Begin an epoch.

        Args:
            is_left_out: called with the number of a batch within the epoch, from 1 on; returns True
                if the batch is left out.
            is_first: whether this is the first epoch of the training. The first epoch stays the
                first when a restarted process continues it.

        Returns:
            The batches that are not left out, each with its number within the epoch.
        """
        ...

    def go_on(
        self,
        is_left_out: Callable[[int], bool],
        *,
        taken: int,
        before: int,
        order: Order,
        state: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Continue an epoch after its first `taken` batches.

        Args:
            is_left_out: as for `begin`.
            taken: the number of batches of the epoch that the training has received, including
                those left out.
            before: the number of batches in earlier epochs.
            order: the recorded state on which the order of the epoch depends.
            state: the value that the method `state` returned at that position.
        """
        ...

    def state(self) -> Any:
        """Return the state of the wrapped loader itself; None if it has none."""
        ...


def loader_of(loader: Any) -> Loader:
    """Wrap a loader in the class for its kind.

    Raises:
        BadUse: the loader cannot be iterated, or its order cannot be restored.
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise BadUse(
            f"run.batches() was given {type(loader).__name__}: give what your loop iterates over, such as a DataLoader."
        )
    if getattr(loader, "in_order", True) is False:
        raise BadUse(
            "The loader has in_order=False, so its order cannot be restored. Leave in_order at its default."
        )
    if _has_state(loader) and _finds_its_place(loader):
        return StatefulLoader(loader)
    is_ordered = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if is_ordered and not isinstance(loader.dataset, IterableDataset):
        return OrderedLoader(loader)
    return AnyIterable(loader)


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(
        getattr(part, "load_state_dict", None)
    )


def _finds_its_place(loader: Any) -> bool:
    """Return True if a loader with a `state_dict` restores its position exactly.

    Some loaders do not:

    - Accelerate's loaders always have the method `state_dict`, but they have a state only with
      `use_stateful_dataloader`.
    - torchdata counts the skipped items twice if the dataset has no state.
    - torchdata begins the iteration of a sampler twice if the sampler has no state. A sampler that
      draws a random order at that moment then has another order.
    """
    if getattr(loader, "use_stateful_dataloader", True) is False:
        return False
    if not isinstance(loader, DataLoader):
        return True
    if isinstance(loader.dataset, IterableDataset):
        return _has_state(loader.dataset)
    return all(
        _has_state(part) or type(part).__module__.startswith(("torch.utils.data.", "torchdata."))
        for part in (loader.sampler, loader.batch_sampler)
        if part is not None
    )


class OrderedLoader:
    """Wrap a DataLoader in which a sampler determines the samples of each batch."""

    kind: ClassVar[str] = "ordered"

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Wrap a loader; the loader itself is not changed."""
        self.count = 0
        self._original = loader
        # A DataLoader accepts no new sampler after its construction, so the sampler is replaced in
        # a copy.
        self._loader = copy.copy(loader)
        self._loader._iterator = None
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._walks = _Walks(getattr(loader, name))
        vars(self._loader)[name] = self._walks

    def begin(
        self, is_left_out: Callable[[int], bool], *, is_first: bool
    ) -> Iterator[tuple[int, Any]]:
        """Begin an epoch at its first batch; see `Loader.begin`."""
        if not is_first:
            self._start_workers()
        self._walks.prepare(0, is_left_out)
        return self._numbered(iter(self._loader), 0, is_left_out)

    def go_on(
        self,
        is_left_out: Callable[[int], bool],
        *,
        taken: int,
        before: int,
        order: Order,
        state: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Continue an epoch by skipping items of the sampler; see `Loader.go_on`."""
        del state
        if before:
            self._start_workers()
        self._walks.prepare(taken, is_left_out)
        with order.put_back(self._original):
            batches = iter(self._loader)
            self._walks.pass_over()
        return self._numbered(batches, taken, is_left_out)

    def state(self) -> None:
        """Return None, because the recorded order of the epoch is enough to continue."""

    def _start_workers(self) -> None:
        """Start persistent workers that are missing after a restart.

        A loader draws the seed of its workers only in its first epoch. If they were started in a
        later epoch, that draw would change the order of the epoch.
        """
        if self._loader.persistent_workers and self._loader._iterator is None:
            with Order.of(self._original).kept(self._original), self._walks.empty():
                iter(self._loader)

    def _numbered(
        self, batches: Iterator[Any], taken: int, is_left_out: Callable[[int], bool]
    ) -> Iterator[tuple[int, Any]]:
        numbers = (number for number in itertools.count(taken + 1) if not is_left_out(number))
        for batch in batches:
            yield next(numbers), batch
        self.count = self._walks.taken


_NOTHING: tuple[Any, ...] = ()


class _Walks:
    """Follow another sampler's order, and leave out some of its items; one walk is one epoch."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._items: Iterator[Any] = iter(())
        self._first = 0
        self._is_left_out: Callable[[int], bool] = lambda _number: False
        self.taken = 0
        """The number of items that the present walk has taken from the source."""

    def __len__(self) -> int:
        return len(self._source)

    def prepare(self, first: int, is_left_out: Callable[[int], bool]) -> None:
        """Let the next walk begin after the first `first` items."""
        self._first, self._is_left_out = first, is_left_out

    def __iter__(self) -> Iterator[Any]:
        # Some samplers draw their order in this call of `iter`. The call is made at once, because
        # the loader next draws from the same generators.
        self._items, self.taken = iter(self._source), 0
        return self._walk()

    @contextmanager
    def empty(self) -> Iterator[None]:
        """Make all walks empty inside the `with` block."""
        source, self._source = self._source, _NOTHING
        try:
            yield
        finally:
            self._source = source

    def pass_over(self) -> None:
        """Draw the items before the start of the walk, unless they were drawn already."""
        while self.taken < self._first and self._source is not _NOTHING:
            next(self._items, None)
            self.taken += 1

    def _walk(self) -> Iterator[Any]:
        self.pass_over()
        for item in self._items:
            self.taken += 1
            if not self._is_left_out(self.taken):
                yield item


class StatefulLoader:
    """Wrap a loader whose `state_dict` has its position, as torchdata's StatefulDataLoader."""

    kind: ClassVar[str] = "stateful"

    def __init__(self, loader: Any) -> None:
        """Wrap a loader."""
        self.count = 0
        self._loader = loader
        self._drawn: dict[str, Any] | None = None
        """The states of the loader's generators after it had drawn the order of the epoch."""

    def begin(
        self, is_left_out: Callable[[int], bool], *, is_first: bool
    ) -> Iterator[tuple[int, Any]]:
        """Begin an epoch at its first batch; see `Loader.begin`."""
        del is_first
        return self._noted(_kept(self, iter(self._loader), 0, is_left_out), None)

    def go_on(
        self,
        is_left_out: Callable[[int], bool],
        *,
        taken: int,
        before: int,
        order: Order,
        state: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Continue an epoch by loading the loader's state; see `Loader.go_on`."""
        del before
        with order.put_back(self._loader):
            self._loader.load_state_dict(state["loader"])
            batches = iter(self._loader)
        return self._noted(_kept(self, batches, taken, is_left_out), state["drawn"])

    def state(self) -> dict[str, Any]:
        """Return the state of the wrapped loader and its generators; see `Loader.state`."""
        return {"loader": self._loader.state_dict(), "drawn": self._drawn}

    def _noted(
        self, batches: Iterator[tuple[int, Any]], drawn: dict[str, Any] | None
    ) -> Iterator[tuple[int, Any]]:
        """At the first batch, record the generators of the loader, or restore recorded ones.

        They are restored if an epoch is continued, for this reason: torchdata sets the generator to
        its state before the order was drawn, and draws the order again. It does not repeat the
        values that the loader drew after the order. Without a correction, the next epoch would have
        another order.
        """
        self._drawn, has_begun = drawn, False
        for batch in batches:
            if not has_begun:
                self._settle()
                has_begun = True
            yield batch
        if not has_begun:
            self._settle()

    def _settle(self) -> None:
        if getattr(getattr(self._loader, "sampler", None), "replacement", False):
            return  # such a sampler draws random numbers throughout the epoch
        if self._drawn is None:
            self._drawn = Order.of_next(self._loader).to_plain()
        else:
            Order.of_plain(self._drawn).put_back_own(self._loader)


class AnyIterable:
    """Wrap any other iterable, which reaches a position by iterating from the start."""

    kind: ClassVar[str] = "any"

    def __init__(self, loader: Iterable[Any]) -> None:
        """Wrap an iterable."""
        self.count = 0
        self._loader = loader

    def begin(
        self, is_left_out: Callable[[int], bool], *, is_first: bool
    ) -> Iterator[tuple[int, Any]]:
        """Begin an epoch at its first batch; see `Loader.begin`."""
        del is_first
        return _kept(self, iter(self._loader), 0, is_left_out)

    def go_on(
        self,
        is_left_out: Callable[[int], bool],
        *,
        taken: int,
        before: int,
        order: Order,
        state: Any,
    ) -> Iterator[tuple[int, Any]]:
        """Continue an epoch by iterating over its first batches; see `Loader.go_on`."""
        del state
        with order.put_back(self._loader):
            batches = iter(self._loader)
            # A loader that is an iterator never restarts: skip the batches of earlier epochs, too.
            gone = taken + before if batches is self._loader else taken
            for _ in itertools.islice(batches, gone):
                pass
        return _kept(self, batches, taken, is_left_out)

    def state(self) -> None:
        """Return None, because the position is reached by iterating from the start."""


def _kept(
    loader: Loader, batches: Iterator[Any], taken: int, is_left_out: Callable[[int], bool]
) -> Iterator[tuple[int, Any]]:
    """Yield the batches that are not left out, with their numbers; at the end, set the count."""
    number = taken
    for batch in batches:
        number += 1
        if not is_left_out(number):
            yield number, batch
    loader.count = number
