"""Define the facts about a node, and the sources of these facts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args

TEXT_LIMIT = 300
"""The largest number of characters in the evidence of a fact."""

NoticeKind = Literal["preemption", "maintenance", "drain"]


class CannotSee(Exception):
    """A source cannot be read; the message states why.

    This is neither a sign of good health nor of bad health.
    """


@dataclass(frozen=True, kw_only=True)
class NodeSignal:
    """A fact about a node's hardware or operating system."""

    source: str
    """The name of the source. Signals of different sources are independent of each other."""
    name: str
    """The kind of the fact, such as `xid-79` or `link-down` (see `detectors.node.MEANINGS`)."""
    text: str
    """The evidence: a line of a log, or figures."""
    where: str = ""
    """The device, such as the PCI address of a GPU; empty if the fact is about the whole node."""
    count: int = 1

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of the fact, which is equal for a later count of the same fact."""
        return self.source, self.name, self.where

    def to_json(self) -> dict[str, Any]:
        """Return the signal as JSON, for messages and records."""
        return asdict(self)

    @classmethod
    def of_json(cls, fields: Mapping[str, Any]) -> "NodeSignal":
        """Read a signal from a message.

        Raises:
            KeyError, TypeError, ValueError: the message is malformed.
        """
        return cls(
            source=str(fields["source"])[:TEXT_LIMIT],
            name=str(fields["name"])[:TEXT_LIMIT],
            text=str(fields["text"])[:TEXT_LIMIT],
            where=str(fields["where"])[:TEXT_LIMIT],
            count=int(fields["count"]),
        )


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An announcement that a node is about to be taken away."""

    source: str
    kind: NoticeKind
    text: str
    until_s: float | None = None
    """The time at which the node is taken away, in Unix seconds of the node's clock; None if
    unknown."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of the notice, which is equal if the same notice has a new time."""
        return self.source, self.kind, ""

    def to_json(self, now_s: float) -> dict[str, Any]:
        """Return the notice as JSON for a message.

        Instead of the time, the message has the seconds left at `now_s`, since the clocks of nodes
        differ.
        """
        left_s = None if self.until_s is None else self.until_s - now_s
        return {"source": self.source, "kind": self.kind, "text": self.text, "left_s": left_s}

    @classmethod
    def of_json(cls, fields: Mapping[str, Any], now_s: float) -> "Notice":
        """Read a notice from a message.

        `now_s` is the present time of the receiver, in Unix seconds.

        Raises:
            KeyError, TypeError, ValueError: the message is malformed.
        """
        kind, left_s = fields["kind"], fields["left_s"]
        if kind not in get_args(NoticeKind):
            raise ValueError(f"unknown kind of notice: {kind!r}")
        return cls(
            source=str(fields["source"])[:TEXT_LIMIT],
            kind=kind,
            text=str(fields["text"])[:TEXT_LIMIT],
            until_s=None if left_s is None else now_s + float(left_s),
        )


Fact = NodeSignal | Notice


class Source(Protocol):
    """A source of facts about one node."""

    @property
    def name(self) -> str:
        """The name of the source, such as "the kernel's log"."""
        ...

    @property
    def period_s(self) -> float:
        """The seconds between two reads."""
        ...

    def read(self) -> Sequence[Fact]:
        """Return all facts that hold now.

        Raises:
            CannotSee: the source cannot be read.
        """
        ...
