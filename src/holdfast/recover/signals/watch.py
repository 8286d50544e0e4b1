"""Read the sources of one node, each in its own thread, so that a hanging one blocks no other."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.core.clock import Clock
from holdfast.recover.signals.cloud import Cloud
from holdfast.recover.signals.disks import Disks
from holdfast.recover.signals.facts import CannotSee, Fact, NodeSignal, Source
from holdfast.recover.signals.gpu.gpus import Gpus
from holdfast.recover.signals.host import Clocks, FileSystems, Memory, Shutdown
from holdfast.recover.signals.kernel import KernelLog
from holdfast.recover.signals.links import Links

STUCK_S = 60.0
"""If a read takes more than this number of seconds, its source counts as unreadable."""
REFRESH_S = 120.0
"""The seconds after which a state that still holds is sent again, since only recent signals count.
"""
STATES = frozenset(
    {
        "disk-failing",
        "disk-read-only",
        "gpu-lost",
        "gpu-needs-reset",
        "gpu-slowed",
        "link-down",
        "nvlink-down",
        "row-remap-failure",
        "row-remap-pending",
    }
)
"""The kinds of signals that are states. Lines of the kernel's log and counts are not, but are
events at one moment.
"""
MAX_FACTS = 256
"""The largest number of facts from one source; further facts are left out."""


def sources_of_this_host(*, since_s: float) -> list[Source]:
    """Return all sources of facts about this host.

    Args:
        since_s: a time in monotonic seconds; earlier lines of the kernel's log are left out.
    """
    pod: list[Source] = []
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        from holdfast.recover.signals.kubernetes import Kubernetes

        pod = [Kubernetes()]
    return [
        *pod,
        KernelLog(since_s=since_s),
        Gpus(),
        Links(),
        FileSystems(),
        Disks(),
        Memory(),
        Clocks(),
        Shutdown(),
        Cloud(),
    ]


class SignalWatch:
    """Read the sources of one node for its agent. Call all methods from one event loop."""

    def __init__(
        self, sources: Sequence[Source], send: Callable[[dict[str, Any]], None], clock: Clock
    ) -> None:
        """Store the sources; `start` begins to read them.

        Args:
            sources: the sources to read.
            send: a function that sends a message to the supervisor (see `nodes`); not called before
                `start`.
            clock: the clock of this host.
        """
        self._sources = sources
        self._send = send
        self._clock = clock
        self._closed = threading.Event()
        self._reading_since_s: dict[str, float] = {}
        self._hidden: dict[str, str] = {}
        """For each source that was read, why it cannot be read; empty if it can."""
        self._facts: dict[str, dict[tuple[str, str, str], tuple[Fact, float]]] = {}
        """For each source, the facts that hold, and when each was read."""

    def start(self) -> None:
        """Start reading. The threads end only with the process, since some may hang."""
        loop = asyncio.get_running_loop()
        for source in self._sources:
            work = threading.Thread(
                target=self._read, args=(source, loop), name=f"reads {source.name}", daemon=True
            )
            work.start()

    def close(self) -> None:
        """Start no further reads."""
        self._closed.set()

    def messages(self) -> list[dict[str, Any]]:
        """Return messages with all present facts, for a supervisor that has received none yet."""
        facts = [self._message(*one) for known in self._facts.values() for one in known.values()]
        return [*facts, {"kind": "cannot_see", "sources": dict(self._hidden)}]

    def look(self) -> None:
        """Report the sources whose reads take too long."""
        now_s = self._clock.monotonic_s()
        for name, since_s in self._reading_since_s.items():
            if now_s - since_s > STUCK_S:
                self._see(name, f"its read has not ended for {STUCK_S:.0f} s")

    def _read(self, source: Source, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closed.is_set():
            facts: tuple[Fact, ...] = ()
            why = ""
            try:
                loop.call_soon_threadsafe(self._begins, source.name)
                began_s = time.thread_time()
                try:
                    facts = tuple(source.read())[:MAX_FACTS]
                except CannotSee as error:
                    why = str(error) or "no reason is given"
                except Exception as error:  # a failing source says nothing about the node
                    why = f"{type(error).__name__}: {error}"
                loop.call_soon_threadsafe(self._took, source.name, facts, why)
            except RuntimeError:  # the loop is closed
                return
            used_s = time.thread_time() - began_s
            self._closed.wait(max(source.period_s, used_s * 1000))

    def _begins(self, name: str) -> None:
        self._reading_since_s[name] = self._clock.monotonic_s()

    def _took(self, name: str, facts: Sequence[Fact], why: str) -> None:
        self._reading_since_s.pop(name, None)
        if not why:  # facts that cannot be read now still hold
            known = self._facts.setdefault(name, {})
            present = {fact.key: fact for fact in facts}
            for key, fact in present.items():
                before = known.get(key)
                if before is None or before[0] != fact or self._is_due(name, *before):
                    known[key] = fact, self._clock.monotonic_s()
                    self._send(self._message(*known[key]))
            for key in [key for key in known if key not in present]:
                fact, at_s = known.pop(key)
                self._send({**self._message(fact, at_s), "is_over": True})
        self._see(name, why)

    def _is_due(self, source: str, fact: Fact, at_s: float) -> bool:
        """Return True if a fact is a state that must be sent again."""
        is_state = isinstance(fact, NodeSignal) and fact.name in STATES and source != KernelLog.name
        return is_state and self._clock.monotonic_s() - at_s >= REFRESH_S

    def _see(self, name: str, why: str) -> None:
        if self._hidden.get(name) != why:
            self._hidden[name] = why
            self._send({"kind": "cannot_see", "sources": {name: why}})

    def _message(self, fact: Fact, at_s: float) -> dict[str, Any]:
        age_s = self._clock.monotonic_s() - at_s
        fields: Mapping[str, Any]
        if isinstance(fact, NodeSignal):
            kind, fields = "node_signal", fact.to_json()
        else:
            kind, fields = "notice", fact.to_json(self._clock.now_s())
        return {"kind": kind, "fact": fields, "age_s": age_s, "is_over": False}
