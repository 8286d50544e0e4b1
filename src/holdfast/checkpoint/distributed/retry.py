"""Repeat a failed save in the same call of `save` on all ranks.

Calls of `save` without a failed save before them cost nothing extra.

Each rank finds out by itself that a save has failed, because the writing processes leave notes for
each other (`commit`). So the ranks find the failure during different steps. Each rank then records
the number of its last call of `save` in the store of the process group, from a background thread.
Rank 0 takes the highest recorded number, and decides that all ranks repeat the save in the call
after it. No rank can be past that call, since each rank waits for the decision in its next call.

A rank may find the failure only much later or never, for example if its trainer has died. Such a
rank delays the other ranks by no more than `PATIENCE_S` seconds. A rank that has waited so long
decides for all ranks that the save is not repeated. The next due save is made in any case.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.core.link import job_link

_logger = logging.getLogger("holdfast")
TRIES: Final = 3
"""The number of failed saves in a row that are repeated at once; further ones wait until due."""
PATIENCE_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.005
_LOOK_SELDOM_S: Final = 0.25
_CLOSING_S: Final = 5.0
_NEVER: Final = "never"


class Retry:
    """Repeat failed saves of one Checkpointer. All ranks must call `begin_call` equally often."""

    def __init__(
        self,
        *,
        patience_s: float = PATIENCE_S,
        default_store: Callable[[], Any] | None = None,
    ) -> None:
        """Create the object without any failed save.

        Args:
            patience_s: seconds to wait for other ranks at most.
            default_store: returns a store that all ranks share; None for the store of the default
                group.
        """
        self._patience_s = patience_s
        self._default_store = default_store or _default_store
        self._lock = threading.Lock()
        self._calls = 0
        self._is_due = False
        self._open: list[_Agreement] = []
        self._in_a_row = 0
        self._closed = threading.Event()

    def begin_call(self) -> bool:
        """Count a call of `save`; return True if all ranks repeat a failed save in this call."""
        with self._lock:
            self._calls += 1
            call, agreements = self._calls, tuple(self._open)
            is_due, self._is_due = self._is_due, False
        for agreement in agreements:
            agreed = agreement.result()
            is_due |= agreed == call
            if agreed is None or agreed <= call:
                with self._lock:
                    self._open.remove(agreement)
        return is_due

    def failed(self, save: str, ranks: Ranks) -> int:
        """Record that a save has failed. Any thread may call this method.

        Args:
            save: the name of the save, the same on all ranks; empty if all ranks failed in the same
                call.
            ranks: the ranks that repeat the save.

        Returns:
            The number of saves in a row that have failed.
        """
        with self._lock:
            self._in_a_row += 1
            is_worth_it = self._in_a_row <= TRIES
            if ranks.world_size == 1 or not save:
                self._is_due |= is_worth_it
                return self._in_a_row
            try:
                own = f"holdfast-retry/{save}"
                store = dist.PrefixStore(own, self._default_store())  # type: ignore[attr-defined]
                agreement = _Agreement(store, ranks, self._calls, self._patience_s, self._closed)
                agreement.start(is_worth_it=is_worth_it)
            except (RuntimeError, ValueError) as error:  # the group or the interpreter ends
                _logger.debug("the ranks could not agree on another try: %s", error)
            else:
                self._open.append(agreement)
            return self._in_a_row

    def succeeded(self) -> None:
        """Record that a save has become durable."""
        with self._lock:
            self._in_a_row = 0

    def close(self) -> None:
        """End the threads. Wait for a few seconds at most, since the store may not respond."""
        self._closed.set()
        with self._lock:
            agreements = tuple(self._open)
        for agreement in agreements:
            agreement.finish(_CLOSING_S)


class _Agreement:
    """Agree with all ranks on the call of `save` in which to repeat one failed save."""

    def __init__(
        self, store: Any, ranks: Ranks, call: int, patience_s: float, closed: threading.Event
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._call = call
        self._patience_s = patience_s
        self._closed = closed
        self._agreed: str | None = None
        self._thread: threading.Thread | None = None

    def start(self, *, is_worth_it: bool) -> None:
        """Start a thread that records the number of this rank's last call of `save`.

        On rank 0, the thread also decides once all ranks have recorded theirs.

        Raises:
            RuntimeError: the thread cannot be started.
        """
        run = functools.partial(self._run, is_worth_it=is_worth_it)
        self._thread = threading.Thread(target=run, name="holdfast-retry", daemon=True)
        self._thread.start()

    def finish(self, limit_s: float) -> None:
        """Wait for the thread to end, for up to `limit_s` seconds."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def result(self) -> int | None:
        """Wait for the decision; return the number of the call that repeats the save, or None."""
        if self._agreed is None:
            with job_link().section("save"):
                self._agreed = self._await()
        return None if self._agreed == _NEVER else int(self._agreed)

    def _run(self, *, is_worth_it: bool) -> None:
        try:
            self._store.set(str(self._ranks.rank), str(self._call))
            if self._ranks.rank == 0:
                self._decide(is_worth_it=is_worth_it)
        except Exception as error:  # the store is gone, and with it the job
            _logger.debug("this rank's call was not recorded: %s", error)

    def _decide(self, *, is_worth_it: bool) -> None:
        keys = [str(rank) for rank in range(self._ranks.world_size)]
        pause_s = _LOOK_EVERY_S
        while is_worth_it and not self._store.check(keys):
            if self._store.check(["agreed"]) or self._closed.wait(pause_s):
                return
            pause_s = min(pause_s * 1.5, _LOOK_SELDOM_S)
        call = str(1 + max(int(self._store.get(key)) for key in keys)) if is_worth_it else _NEVER
        self._store.compare_set("agreed", "", call)

    def _await(self) -> str:
        until_s, pause_s = time.monotonic() + self._patience_s, _LOOK_EVERY_S
        try:
            while not self._store.check(["agreed"]):
                if time.monotonic() > until_s:
                    _logger.warning(
                        "A rank has not yet detected that a save failed; the next due save replaces "
                        "that save."
                    )
                    return str(self._store.compare_set("agreed", "", _NEVER).decode())
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5, _LOOK_SELDOM_S)
            return str(self._store.get("agreed").decode())
        except Exception as error:  # the store is gone, and with it the job
            _logger.debug("the ranks could not agree on another try: %s", error)
            return _NEVER


def _default_store() -> Any:
    with contextlib.suppress(AttributeError):
        return dist.distributed_c10d._get_default_store()
    raise RuntimeError("the process group has no store")
