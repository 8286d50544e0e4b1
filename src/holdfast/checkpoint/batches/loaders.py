"""Move each kind of loader to a place within an epoch, and leave out batches.

| kind | moves to a place by | leaves a batch out |
|---|---|---|
| `OrderedLoader`: a DataLoader of indexed data | its sampler's order | before it is loaded |
| `StatefulLoader`: has `state_dict` and `load_state_dict` | its own state | after it was loaded |
| `AnyIterable` | iterating from the start | after it was loaded |
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
    """One kind of loader. A place is the count of an epoch's batches, left-out ones included."""

    kind: ClassVar[str]
    """The name of the kind in the saved state."""
    count: int
    """The number of batches in the last epoch that was iterated to its end."""

    def begin(
        self, is_left_out: Callable[[int], bool], *, is_first: bool
    ) -> Iterator[tuple[int, Any]]:
        """Begin an epoch.

        Args:
            is_left_out: returns True if a batch is left out, given the batch's number within the
                epoch, from 1 on.
            is_first: True if this is the first epoch of the training, also of a training that a
                former process began.

        Returns:
            The batches that are not left out, each with its number.
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
        """Go on with an epoch after `taken` batches.

        Args:
            is_left_out: as for `begin`.
            taken: the number of batches taken in the epoch.
            before: the number of batches taken in earlier epochs.
            order: the state on which the order of the epoch depends.
            state: the value that `state` returned at that place.
        """
        ...

    def state(self) -> Any:
        """Return the loader's own state within an epoch; None for a loader without one."""
        ...


def loader_of(loader: Any) -> Loader:
    """Return a loader wrapped as its kind.

    Raises:
        BadUse: the loader cannot be iterated, or returns its batches in no certain order.
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
    """Return True if a loader goes on exactly at the place in its state.

    Accelerate's loaders always have the methods of a state, but have a state only with
    `use_stateful_dataloader`. torchdata has two faults. It counts the skipped items of a dataset
    without a state twice. It begins the iteration of a sampler without a state twice, so that a
    sampler that draws its order then has another order.
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
    """A DataLoader whose sampler determines the samples of each batch."""

    kind: ClassVar[str] = "ordered"

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Wrap a loader without changing the loader."""
        self.count = 0
        self._original = loader
        # A DataLoader refuses a new sampler after its construction, so a copy receives the sampler.
        self._loader = copy.copy(loader)
        self._loader._iterator = None
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._walks = _Walks(getattr(loader, name))
        vars(self._loader)[name] = self._walks

    def begin(
        self, is_left_out: Callable[[int], bool], *, is_first: bool
    ) -> Iterator[tuple[int, Any]]:
        """See `Loader.begin`."""
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
        """See `Loader.go_on`."""
        del state
        if before:
            self._start_workers()
        self._walks.prepare(taken, is_left_out)
        with order.put_back(self._original):
            batches = iter(self._loader)
            self._walks.pass_over()
        return self._numbered(batches, taken, is_left_out)

    def state(self) -> None:
        """See `Loader.state`."""

    def _start_workers(self) -> None:
        """Start missing persistent workers: a loader draws their seed in its first epoch only."""
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
    """A sampler that follows another sampler's order without left-out items, one walk an epoch."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._items: Iterator[Any] = iter(())
        self._first = 0
        self._is_left_out: Callable[[int], bool] = lambda _number: False
        self.taken = 0
        """The number of items of the order taken in the present walk."""

    def __len__(self) -> int:
        return len(self._source)

    def prepare(self, first: int, is_left_out: Callable[[int], bool]) -> None:
        """Have the next walk begin after `first` items."""
        self._first, self._is_left_out = first, is_left_out

    def __iter__(self) -> Iterator[Any]:
        # At once, for a sampler that draws its order here: the loader draws from the same
        # generators next.
        self._items, self.taken = iter(self._source), 0
        return self._walk()

    @contextmanager
    def empty(self) -> Iterator[None]:
        """Make walks within the block empty."""
        source, self._source = self._source, _NOTHING
        try:
            yield
        finally:
            self._source = source

    def pass_over(self) -> None:
        """Draw the items before the first item of the walk, if they are not drawn yet."""
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
    """A loader whose state is its place, such as torchdata's StatefulDataLoader."""

    kind: ClassVar[str] = "stateful"

    def __init__(self, loader: Any) -> None:
        """Wrap a loader."""
        self.count = 0
        self._loader = loader
        self._drawn: dict[str, Any] | None = None
        """The generators of the loader after the order of the epoch was drawn."""

    def begin(
        self, is_left_out: Callable[[int], bool], *, is_first: bool
    ) -> Iterator[tuple[int, Any]]:
        """See `Loader.begin`."""
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
        """See `Loader.go_on`."""
        del before
        with order.put_back(self._loader):
            self._loader.load_state_dict(state["loader"])
            batches = iter(self._loader)
        return self._noted(_kept(self, batches, taken, is_left_out), state["drawn"])

    def state(self) -> dict[str, Any]:
        """See `Loader.state`."""
        return {"loader": self._loader.state_dict(), "drawn": self._drawn}

    def _noted(
        self, batches: Iterator[tuple[int, Any]], drawn: dict[str, Any] | None
    ) -> Iterator[tuple[int, Any]]:
        """Record the generators at the first batch, or restore them if an epoch goes on.

        torchdata restores the generator to its state before the order was drawn, and draws the
        order again. The values that the loader drew after the order are then missing, and the next
        epoch would have another order.
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
            return  # the sampler draws throughout the epoch
        if self._drawn is None:
            self._drawn = Order.of_next(self._loader).to_plain()
        else:
            Order.of_plain(self._drawn).put_back_own(self._loader)


class AnyIterable:
    """Any other iterable, which moves to a place by iterating from the start."""

    kind: ClassVar[str] = "any"

    def __init__(self, loader: Iterable[Any]) -> None:
        """Wrap an iterable."""
        self.count = 0
        self._loader = loader

    def begin(
        self, is_left_out: Callable[[int], bool], *, is_first: bool
    ) -> Iterator[tuple[int, Any]]:
        """See `Loader.begin`."""
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
        """See `Loader.go_on`."""
        del state
        with order.put_back(self._loader):
            batches = iter(self._loader)
            # An iterator does not start again with a new epoch.
            gone = taken + before if batches is self._loader else taken
            for _ in itertools.islice(batches, gone):
                pass
        return _kept(self, batches, taken, is_left_out)

    def state(self) -> None:
        """See `Loader.state`."""


def _kept(
    loader: Loader, batches: Iterator[Any], taken: int, is_left_out: Callable[[int], bool]
) -> Iterator[tuple[int, Any]]:
    """Yield the batches that are not left out, numbered; set the loader's count at the end."""
    number = taken
    for batch in batches:
        number += 1
        if not is_left_out(number):
            yield number, batch
    loader.count = number
