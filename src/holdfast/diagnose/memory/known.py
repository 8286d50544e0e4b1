"""Combine all learned knowledge for a diagnosis: learned rules, filters and past incidents."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from holdfast.core.ledger import Ledger
from holdfast.diagnose.explain.compress import Kept
from holdfast.diagnose.explain.diagnosis import Diagnosis
from holdfast.diagnose.logs.filters import Filter
from holdfast.diagnose.memory.case import Case
from holdfast.diagnose.memory.embeddings import Embedder
from holdfast.diagnose.memory.own_rules import own_topics
from holdfast.diagnose.memory.recall import Past, Recall
from holdfast.diagnose.memory.store import adopt_incidents, filter_of, key_of, learned_of, past_of
from holdfast.diagnose.memory.topics import Learned, learned_topics
from holdfast.diagnose.rules.packaged import packaged_topics
from holdfast.diagnose.rules.rules import ENDING, ROUTINE, RuleSet, Topic

_EFFECTS = (
    ROUTINE,
    ENDING,
    "exit",
    "teardown",
    "death",
    "peer_lost",
    "store_lost",
    "collective_timeout",
)
"""Kinds of events that mostly follow from other events. If such lines are similar in two incidents,
this is no evidence of the same cause."""
PAST_LIMIT = 5000
"""A new incident is compared with all judged incidents, and with this number of the newest others.
"""


@dataclass(frozen=True, kw_only=True)
class Known:
    """The knowledge that a diagnosis can use in addition to the packaged rules."""

    topics: tuple[Topic, ...] = ()
    """Topics with the user's own rules and with learned rules."""
    filters: tuple[Filter, ...] = ()
    """Filters for `compress` that were learned from good runs."""
    memory: Recall = field(default_factory=Recall)
    base: tuple[Topic, ...] | None = None
    """Topics to use instead of the packaged topics; None to use the packaged ones."""

    @functools.cached_property
    def rules(self) -> RuleSet:
        """All rules together.

        Raises:
            BadUse: two rules have the same id.
        """
        return RuleSet((*(packaged_topics() if self.base is None else self.base), *self.topics))

    @classmethod
    def load(cls, ledger_url: str, home: Path | None = None) -> Self:
        """Load the ledger at `ledger_url` and the rules folder of `home`.

        Incidents of runs that are not in the memory yet are added. Each search opens the ledger
        anew.

        Raises:
            LedgerError: the ledger cannot be opened, read or written.
            BadUse: a rule file of the user is broken, or the configured endpoint cannot be used.
        """
        with Ledger.open(ledger_url) as ledger:
            return cls.of_ledger(ledger, home, ledger_url=ledger_url)

    @classmethod
    def of_ledger(cls, ledger: Ledger, home: Path | None = None, *, ledger_url: str = "") -> Self:
        """Load an open ledger.

        If `ledger_url` is not given, the ledger must stay open while the result is used.
        """
        embedder = Embedder.from_environment()
        adopt_incidents(ledger)
        judged = ledger.memories(judged=True)
        memories = {one.memory_id: one for one in (*judged, *ledger.memories(newest=PAST_LIMIT))}
        learned = [learned_of(one) for one in ledger.learned_rules("rule")]
        keys = {memory_id: key_of(one) for memory_id, one in memories.items()}

        def search(words: Sequence[str], limit: int) -> list[str]:
            if not ledger_url:
                return [keys[one] for one in ledger.search_memories(words, limit) if one in keys]
            with Ledger.open(ledger_url) as again:
                return [keys[one] for one in again.search_memories(words, limit) if one in keys]

        model = "" if embedder is None else embedder.model
        past = tuple(past_of(one, model) for one in memories.values())
        return cls(
            topics=(*own_topics(home), *learned_topics(learned)),
            filters=tuple(filter_of(one) for one in ledger.learned_rules("filter")),
            memory=Recall(
                past=past,
                search=search,
                embedder=embedder if any(one.embedding for one in past) else None,
            ),
        )

    @classmethod
    def of(
        cls,
        learned: Iterable[Learned],
        cases: Iterable[Case] = (),
        *,
        base: Sequence[Topic] | None = None,
    ) -> Self:
        """Combine learned rules with confirmed incidents, without a ledger."""
        past = tuple(
            Past(
                key=case.key,
                reason=case.reason,
                roots=case.roots,
                confirmed=True,
                action=case.action,
            )
            for case in cases
        )
        return cls(
            topics=learned_topics(learned),
            memory=Recall(past=past),
            base=None if base is None else tuple(base),
        )

    def without_memory(self) -> Self:
        """Return the same rules and filters, but without past incidents."""
        return replace(self, memory=Recall())

    def similar(self, text: str, reason: str = "", limit: int = 3) -> list[dict[str, Any]]:
        """Return the past incidents whose roots are most similar to `text`; see `Recall.similar`."""
        return self.memory.similar(text, reason, limit)

    def recall(self, diagnosis: Diagnosis, kept: Callable[[], Iterable[Kept]] = tuple) -> Diagnosis:
        """Add similar incidents to `diagnosis`; one of them may decide an open case."""
        return self.memory.decide(diagnosis, kept, self._follows)

    def _follows(self, text: str) -> bool:
        found = self.rules.find(text, "library_exception")
        return found is not None and found[0].kind in _EFFECTS
