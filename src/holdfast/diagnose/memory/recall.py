"""Find past incidents that are similar to a new one, and decide an open case by one of them.

Two rankings are combined, one by full-text search and one by vectors. An incident scores 1 / (60 +
place) in each ranking (reciprocal rank fusion: Cormack, Clarke and Büttcher 2009). The similarity
is the cosine of the vectors. It is returned with the words that both incidents have in common, the
longest first.
"""

import functools
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

from holdfast.diagnose.explain.compress import Kept
from holdfast.diagnose.explain.diagnosis import Alternative, Diagnosis, LogLine
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.memory.embeddings import Embedder, EmbeddingsFailed, cosine
from holdfast.diagnose.memory.profile import profile_of
from holdfast.diagnose.memory.topics import sounds_bad
from holdfast.diagnose.memory.words import COMMON, is_trouble, words_of
from holdfast.diagnose.rules.packaged import packaged_topics
from holdfast.diagnose.rules.taxonomy import CATEGORIES, Category

_GRAM: Final = 4
_GRAM_WEIGHT: Final = 0.5
"""The weight of groups of letters relative to whole words, which are more informative. Groups of
letters make `timeout` similar to `timed out`, and `NodeNotReady` to `not ready`."""
_BUCKETS: Final = 1 << 20

Vector = dict[int, float]


class Frequencies(NamedTuple):
    """Count in how many of some texts each feature appears."""

    texts: int
    seen_in: Counter[int]

    @classmethod
    def of(cls, texts: Sequence[str]) -> Self:
        """Count the features of `texts`."""
        seen_in: Counter[int] = Counter()
        for text in texts:
            seen_in.update(_features(text).keys())
        return cls(len(texts), seen_in)


class Vectors:
    """The vectors of texts, to find the texts that are most similar to another one."""

    def __init__(self, texts: Sequence[str], background: Frequencies | None = None) -> None:
        """Index `texts`. Words of `background` count as common, and so have little weight."""
        counted = [_features(text) for text in texts]
        common = Frequencies.of(()) if background is None else background
        self._documents = common.texts + len(counted)
        self._seen_in = common.seen_in.copy()
        for features in counted:
            self._seen_in.update(features.keys())
        self._postings: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for index, features in enumerate(counted):
            for feature, weight in self._weighted(features).items():
                self._postings[feature].append((index, weight))

    def nearest(self, text: str, limit: int) -> list[tuple[int, float]]:
        """Return the index and the cosine of the most similar texts, the most similar first.

        Texts that have no word or group of letters in common with `text` are left out.
        """
        sums: dict[int, float] = defaultdict(float)
        for feature, weight in self._weighted(_features(text)).items():
            for index, other in self._postings.get(feature, ()):
                sums[index] += weight * other
        ranked = sorted(sums.items(), key=lambda one: (-one[1], -one[0]))
        return [(index, min(cosine, 1.0)) for index, cosine in ranked[:limit]]

    def _weighted(self, features: Counter[int]) -> Vector:
        made = {}
        for feature, count in features.items():
            rarity = math.log((1 + self._documents) / (1 + self._seen_in[feature])) + 1.0
            made[feature] = (
                (1.0 + math.log(count)) * rarity * (_GRAM_WEIGHT if feature & 1 else 1.0)
            )
        length = math.sqrt(sum(weight * weight for weight in made.values()))
        return {feature: weight / length for feature, weight in made.items()} if length else {}


def _features(text: str) -> Counter[int]:
    found: Counter[int] = Counter()
    for word in words_of(text):
        found[_bucket(word)] += 1
        padded = f" {word} "
        for at in range(len(padded) - _GRAM + 1):
            found[_bucket(padded[at : at + _GRAM]) | 1] += 1
    return found


def _bucket(feature: str) -> int:
    """Return an even index for a word; the odd index after it is for groups of letters."""
    return (zlib.crc32(feature.encode()) % _BUCKETS) << 1


NEAR: Final = 0.5
"""A confirmed incident decides a case only with at least this similarity, which means that the two
root lines share half of their information. This number was chosen, not fitted."""
VERY_NEAR: Final = 0.75
"""A confirmed incident overrules an answer of the rules with little confidence only with at least
this similarity.
"""
SHOWN: Final = 0.2
"""A past incident is shown only with at least this similarity."""
OPEN_BELOW: Final = 0.4
"""A case is open if the rules have less than this confidence."""
_MAX_CONFIDENCE: Final = 0.6
"""The upper limit of the confidence in an answer from a past incident. It is lower than the
confidence in a rule.
"""
_FUSION: Final = 60
_NEIGHBOURS: Final = 50
_SHARED_WORDS: Final = 8
_LINES_LIMIT: Final = 40


@dataclass(frozen=True, kw_only=True)
class Past:
    """A past incident, with the fields that are needed to compare it."""

    key: str
    reason: str
    """The reason that a person gave, or else the reason of the diagnosis."""
    roots: tuple[str, ...]
    confirmed: bool
    """True if a person confirmed or corrected the reason."""
    done: str = ""
    """The action that was taken."""
    action: str = ""
    when_s: float | None = None
    category: Category = "Unknown"
    fingerprint: str = ""
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recall:
    """The past incidents, and the search among them."""

    past: tuple[Past, ...] = ()
    search: Callable[[Sequence[str], int], Sequence[str]] | None = field(default=None, repr=False)
    """The full-text search, from words to keys of incidents, the best first."""
    embedder: Embedder | None = field(default=None, repr=False)

    def prepare(self) -> None:
        """Index the past incidents now, rather than at the first search."""
        if self.past:
            self._vectors  # noqa: B018

    def similar(self, text: str, reason: str = "", limit: int = 3) -> list[dict[str, Any]]:
        """Return the past incidents whose roots are most similar to `text`, the most similar first.

        Args:
            text: the text of a root.
            reason: of equally similar incidents, those with this reason come first.
            limit: the largest number of incidents to return.

        Returns:
            Mappings with `id`, `reason`, `similarity` (0 to 1), `done`, `confirmed`, `when_s`,
                `root` and
            `shared` (words).
        """
        likeness = self._likeness(text)
        points: dict[str, float] = defaultdict(float)
        for place, key in enumerate(sorted(likeness, key=lambda one: -likeness[one])):
            points[key] += 1 / (_FUSION + place)
        if self.search is not None:
            for place, key in enumerate(self.search(_query_words(text), _NEIGHBOURS)):
                points[key] += 1 / (_FUSION + place)
        by_key = {one.key: one for one in self.past}
        known = [by_key[key] for key in points if key in by_key and likeness.get(key, 0.0) >= SHOWN]
        known.sort(
            key=lambda one: (-points[one.key], one.reason != reason, not one.confirmed, one.key)
        )
        return [self._shown(one, text, likeness[one.key]) for one in known[:limit]]

    def decide(
        self,
        diagnosis: Diagnosis,
        kept: Callable[[], Iterable[Kept]] = tuple,
        follows: Callable[[str], bool] = lambda _: False,
    ) -> Diagnosis:
        """Add similar incidents to `diagnosis`; a very similar confirmed one decides an open case.

        Args:
            diagnosis: the rules' answer.
            kept: a function that returns the compressed log; called only if the case is open.
            follows: a function that returns True for a line that only follows from failures. Such
                lines are ignored, since they are similar in all failures.
        """
        if not self.past or diagnosis.ended_well:
            return diagnosis
        notes = diagnosis.notes
        lines: list[tuple[str, LogLine | None]] = []
        if diagnosis.root_text:
            lines.append((diagnosis.root_text, diagnosis.root_line))
        if is_open(diagnosis) and diagnosis.reason == "Unknown":
            lines += [
                (text, line) for text, line in _strange(kept()) if text != diagnosis.root_text
            ]
        least = NEAR if diagnosis.reason == "Unknown" else VERY_NEAR
        best: tuple[float, Past, str, LogLine | None] | None = None
        for text, line in lines:
            if follows(text):
                continue
            likeness = self._likeness(text, only_confirmed=True)
            for one in self.past:
                near = likeness.get(one.key, 0.0)
                if one.confirmed and near >= least and (best is None or near > best[0]):
                    best = (near, one, text, line)
        decided = diagnosis
        if best is not None and is_open(diagnosis):
            decided = _decided_by(diagnosis, *best)
        try:
            similar = tuple(self.similar(lines[0][0], decided.reason)) if lines else ()
        except EmbeddingsFailed as error:
            similar = tuple(replace(self, embedder=None).similar(lines[0][0], decided.reason))
            notes = (*notes, str(error))
        return replace(decided, similar=similar, notes=notes)

    def _likeness(self, text: str, *, only_confirmed: bool = False) -> dict[str, float]:
        """Return, by key of the incident, the cosine of its most similar root line."""
        if self.embedder is not None and not only_confirmed:
            vector = self.embedder.embed([text])[0]
            return {one.key: cosine(vector, one.embedding) for one in self.past if one.embedding}
        found: dict[str, float] = {}
        for index, near in self._vectors[0].nearest(text, _NEIGHBOURS):
            key = self._vectors[1][index]
            found[key] = max(near, found.get(key, 0.0))
        return found

    @functools.cached_property
    def _vectors(self) -> tuple[Vectors, list[str]]:
        lines = [(one.key, root) for one in self.past for root in one.roots]
        return Vectors([root for _, root in lines], _background()), [key for key, _ in lines]

    def _shown(self, one: Past, text: str, near: float) -> dict[str, Any]:
        own_words = set(words_of(" ".join(one.roots)))
        shared = [
            word
            for word in dict.fromkeys(words_of(text))
            if word in own_words and word not in COMMON
        ]
        return {
            "id": one.key,
            "reason": one.reason,
            "similarity": round(near, 3),
            "done": one.done,
            "confirmed": one.confirmed,
            "when_s": one.when_s,
            "root": one.roots[0] if one.roots else "",
            "shared": sorted(shared, key=lambda word: -len(word))[:_SHARED_WORDS],
        }


def is_open(diagnosis: Diagnosis) -> bool:
    """Return True if the rules found no reason, or one with little confidence."""
    return diagnosis.reason == "Unknown" or diagnosis.confidence < OPEN_BELOW


def _decided_by(
    diagnosis: Diagnosis, near: float, one: Past, text: str, line: LogLine | None
) -> Diagnosis:
    profile = profile_of(one.reason, [text], None, (), one.action)
    category = (
        CATEGORIES[one.reason]
        if one.reason != "Others" or one.category == "Unknown"
        else one.category
    )
    others = diagnosis.alternatives
    if diagnosis.reason not in ("Unknown", one.reason) and diagnosis.decided_by:
        confidence = round(diagnosis.confidence, 3)
        rival = Alternative(
            reason=diagnosis.reason, confidence=confidence, decided_by=diagnosis.decided_by[0]
        )
        others = (rival, *(other for other in others if other.reason != one.reason))[:3]
    done = f" Action taken then: {one.done}" if one.done else ""
    return replace(
        diagnosis,
        outcome="stopped" if diagnosis.outcome == "stopped" else "failed",
        reason=one.reason,
        category=category,
        root_line=diagnosis.root_line if line is None else line,
        root_lines=diagnosis.root_lines if line is None or line == diagnosis.root_line else (line,),
        action=profile.action,
        restart_helps=profile.restart_helps,
        mitigation=f"It looks like incident {one.key}, which a person confirmed to be {one.reason}.{done}",
        confidence=round(_MAX_CONFIDENCE * near, 3),
        alternatives=others,
        decided_by=(f"memory:{one.key}", *diagnosis.decided_by),
        root_text=text,
    )


def _query_words(text: str) -> list[str]:
    return [word for word in dict.fromkeys(words_of(text)) if word not in COMMON][:64]


def _strange(kept: Iterable[Kept]) -> list[tuple[str, LogLine]]:
    """Return the kept lines that report a problem, and so may state the root, the last one first."""
    found = []
    for one in kept:
        text = clean_line(one.text.encode("utf-8", "replace"), one.line).text.strip()
        if is_trouble(text) and not sounds_bad(text):
            found.append((text, LogLine(file=one.file, line=one.line, text=one.text)))
    return found[::-1][:_LINES_LIMIT]


@functools.cache
def _background() -> Frequencies:
    """Count features in one example of each packaged rule, to measure which words are common."""
    rules = (rule for topic in packaged_topics() for rule in topic.rules)
    return Frequencies.of([rule.match[0] for rule in rules if rule.match])
