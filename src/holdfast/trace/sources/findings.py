"""Count the problems that an adapter finds while it streams a file."""

from dataclasses import dataclass, field
from typing import Final

from holdfast.trace.notes import Note

MAX_EXAMPLES: Final = 3


@dataclass
class Findings:
    """The number of problems for each check, with a few examples."""

    rows: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, check: str, *examples: str, rows: int = 1) -> None:
        """Count one or several rows that fail a check."""
        self.rows[check] = self.rows.get(check, 0) + rows
        kept = self.examples.setdefault(check, [])
        kept += [example for example in dict.fromkeys(examples) if example not in kept][
            : MAX_EXAMPLES - len(kept)
        ]

    def notes(self, cluster: str, sentences: dict[str, tuple[str, str]]) -> tuple[Note, ...]:
        """Return a note for each check that found a problem.

        Args:
            cluster: name of the cluster.
            sentences: the action taken and the sentence for the report, by check.
        """
        return tuple(
            Note(
                cluster=cluster,
                check=check,
                sentence=sentence,
                rows=self.rows[check],
                action=action,
                examples=tuple(self.examples[check]),
            )
            for check, (action, sentence) in sentences.items()
            if self.rows.get(check)
        )
