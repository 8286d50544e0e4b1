"""Describe one failing program."""

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from failure_lab.dialects import DIALECTS
from holdfast.diagnose.rules.taxonomy import CATEGORIES, Category

Launcher = Literal["torchrun", "python", "shell"]
Need = Literal["tmpfs", "read-only", "s3", "owner-only"]

RANKS_LIMIT = 4


@dataclass(frozen=True, kw_only=True)
class Program:
    """A failing script, its launch, and the label of its failure."""

    id: str
    reason: str
    """A key of `CATEGORIES`."""
    cause: str
    """The failure in a sentence, for people."""
    root: str
    """A regular expression that matches only the lines that state the root."""
    script: str
    """The source, with its module's indentation; `dialect` precedes it unless in shell."""
    accept_reasons: tuple[str, ...] = ()
    """Further right reasons; `reason` is always among them."""
    restart_helps: bool = False
    faulty: Mapping[str, Any] | None = None
    """The place of the failure (`{"rank": 1}`), if not everywhere."""
    ranks: int = 1
    launcher: Launcher = "torchrun"
    dialect: str | None = "plain"
    """The dialect of the training loop's progress lines; None: the script is complete."""
    name: str = "train.py"
    arguments: tuple[str, ...] = ()
    launcher_arguments: tuple[str, ...] = ()
    """Further arguments of torchrun."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Files beside the script, by relative path."""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()
    memory_bytes: int = 24 << 30
    """Address space of each process."""
    prefix: str = ""
    """torchrun's prefix of a rank's lines, with `${rank}` and `${local_rank}` filled in."""
    limit_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse what could not be run or labelled.

        Raises:
            ValueError: an unknown reason or dialect, too many ranks, several ranks without
                torchrun.
        """
        for reason in (self.reason, *self.accept_reasons):
            if reason not in CATEGORIES:
                raise ValueError(f"program {self.id}: no reason {reason!r}")
        if self.dialect is not None and self.dialect not in DIALECTS:
            raise ValueError(
                f"program {self.id}: no dialect {self.dialect!r}; there are {', '.join(DIALECTS)}"
            )
        if not 1 <= self.ranks <= (RANKS_LIMIT if self.launcher == "torchrun" else 1):
            raise ValueError(
                f"program {self.id}: {self.ranks} ranks under {self.launcher}; at most {RANKS_LIMIT}"
            )
        re.compile(self.root)

    @property
    def category(self) -> Category:
        """The category of the reason."""
        return CATEGORIES[self.reason]

    @property
    def accepted(self) -> tuple[str, ...]:
        """Every right reason, the best first."""
        return tuple(dict.fromkeys((self.reason, *self.accept_reasons)))

    @property
    def source(self) -> str:
        """The script as it is run."""
        script = textwrap.dedent(self.script).lstrip("\n")
        return script if self.dialect is None else DIALECTS[self.dialect].prelude + script

    def label(self) -> dict[str, Any]:
        """Return the label in the form of a labelled data set, without `id` and `root_lines`."""
        return {
            "program": self.id,
            "category": self.category,
            "reason": self.reason,
            "accept_reasons": list(self.accepted),
            "root_cause": self.cause,
            "recoverable_by_restart": self.restart_helps,
            "faulty": None if self.faulty is None else dict(self.faulty),
        }
