"""Convert the conditions of this pod and its node in Kubernetes to signals and notices."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from holdfast.cluster import Look, read_facts
from holdfast.recover.signals.facts import TEXT_LIMIT, CannotSee, Fact, NodeSignal, Notice

_PRESSURES: Final = frozenset({"MemoryPressure", "DiskPressure", "PIDPressure"})
"""The conditions of a node that lacks resources, which is no sign of broken hardware."""


class Kubernetes:
    """The conditions of this pod and its node."""

    name = "the conditions in Kubernetes"
    period_s = 15.0

    def __init__(self, read: Callable[[], Look] = read_facts) -> None:
        """Store `read`, which requests the conditions from the API server."""
        self._read = read

    def read(self) -> Sequence[Fact]:
        """See `Source.read`."""
        look = self._read()
        if look.unseen and not look.facts:
            raise CannotSee(" ".join(look.unseen))
        return list(self._facts(look))

    def _facts(self, look: Look) -> Iterable[Fact]:
        for one in look.facts:
            if one.is_bad is not True:
                continue
            text = (f"{one.kind}: {one.detail}" if one.detail else one.kind)[:TEXT_LIMIT]
            if one.subject == "pod" and one.kind == "deleted":
                # The time of deletion is the end of the pod's grace period.
                yield Notice(source=self.name, kind="preemption", text=text, until_s=one.since_s)
            elif one.subject == "pod" and one.kind == "DisruptionTarget":
                yield Notice(source=self.name, kind="preemption", text=text)
            elif one.subject == "pod":
                continue  # a pod that is not ready says nothing about its node
            elif one.kind in ("cordoned", "taint"):
                yield Notice(source=self.name, kind="drain", text=text)
            else:
                name = "scheduler-pressure" if one.kind in _PRESSURES else "scheduler-down"
                yield NodeSignal(source=self.name, name=name, where=one.kind, text=text)
