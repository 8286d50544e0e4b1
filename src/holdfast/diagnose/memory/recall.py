"""Past incidents: which are like this one, why, and whether one of them may decide.

Two rankings are fused, by full-text search and by vectors, each place counting 1 / (60 + place) (reciprocal rank
fusion: Cormack, Clarke and Büttcher 2009). The likeness that is shown is the vectors' cosine; with it
stand the words that both share, the longest first.
"""

import functools
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

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
"""Letter groups let `timeout` meet `timed out` and `NodeNotReady` meet `not ready`; whole words tell more."""
_BUCKETS: Final = 1 << 20

Vector = dict[int, float]


class Vectors:
    """The vectors of some texts; asked for the nearest to another."""

    def __init__(self, texts: Sequence[str], background: Iterable[str] = ()) -> None:
        """`background`: lines by which a word is known to be common, which are not looked for."""
        self._documents = 0
        self._seen_in: Counter[int] = Counter()
        counted = [_features(text) for text in texts]
        for features in (*counted, *map(_features, background)):
            self._documents += 1
            self._seen_in.update(features.keys())
        self._postings: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for index, features in enumerate(counted):
            for feature, weight in self._weighted(features).items():
                self._postings[feature].append((index, weight))

    def nearest(self, text: str, limit: int) -> list[tuple[int, float]]:
        """The texts most like `text`: index and cosine, the nearest first; those that share nothing are left out."""
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
    """An even number: the next odd one is for letter groups."""
    return (zlib.crc32(feature.encode()) % _BUCKETS) << 1


NEAR: Final = 0.5
"""From this likeness on a confirmed incident may decide: half of what tells something in the two root lines is the
same, weighed by how seldom it is. A judgement, not a fit."""
VERY_NEAR: Final = 0.75
"""From this likeness on it may decide against rules that are hardly sure."""
SHOWN: Final = 0.2
"""From this likeness on a past incident is shown."""
OPEN_BELOW: Final = 0.4
"""Rules that are less sure than this leave the case open."""
_SURE_MOST: Final = 0.6
"""A memory's confidence stays below that of a rule."""
_FUSION: Final = 60
_NEIGHBOURS: Final = 50
_SHARED_WORDS: Final = 8
_LINES_LIMIT: Final = 40


@dataclass(frozen=True, kw_only=True)
class Past:
    """A past incident, as far as likeness goes."""

    key: str
    reason: str
    """What a person said, else the diagnosis."""
    roots: tuple[str, ...]
    confirmed: bool
    """A person confirmed or corrected it."""
    done: str = ""
    """What was done about it."""
    action: str = ""
    when_s: float | None = None
    category: Category = "Unknown"
    fingerprint: str = ""
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recall:
    """What is remembered."""

    past: tuple[Past, ...] = ()
    search: Callable[[Sequence[str], int], Sequence[str]] | None = field(default=None, repr=False)
    """Full-text search: words to keys, the best first."""
    embedder: Embedder | None = field(default=None, repr=False)

    def similar(self, text: str, reason: str = "", limit: int = 3) -> list[dict[str, Any]]:
        """The past incidents most like one whose root says `text`, the nearest first; of equals those of `reason`.

        Each: `id`, `reason`, `similarity` (0 to 1), `done`, `confirmed`, `when_s`, `root`, `shared` (words).
        """
        likeness = self._likeness(text)
        points: dict[str, float] = defaultdict(float)
        for place, key in enumerate(sorted(likeness, key=lambda one: -likeness[one])):
            points[key] += 1 / (_FUSION + place)
        if self.search is not None:
            for place, key in enumerate(self.search(_asked(text), _NEIGHBOURS)):
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
        """`diagnosis` with what is like it; where rules left it open, decided by a confirmed incident that is near.

        `kept` gives the compressed log; it is called only where the case is open. `follows` says of a line whether it
        tells only what followed from a failure: such lines are alike in all failures.
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
        """By key: the cosine of the nearest of its root lines."""
        if self.embedder is not None and not only_confirmed:
            asked = self.embedder.embed([text])[0]
            return {one.key: cosine(asked, one.embedding) for one in self.past if one.embedding}
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
        said = set(words_of(" ".join(one.roots)))
        shared = [
            word for word in dict.fromkeys(words_of(text)) if word in said and word not in COMMON
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
    """Whether rules left the case open: no reason, or hardly more than a guess."""
    return diagnosis.reason == "Unknown" or diagnosis.confidence < OPEN_BELOW


def _decided_by(
    diagnosis: Diagnosis, near: float, one: Past, text: str, line: LogLine | None
) -> Diagnosis:
    said = profile_of(one.reason, [text], None, (), one.action)
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
    done = f" What was done then: {one.done}" if one.done else ""
    return replace(
        diagnosis,
        outcome="stopped" if diagnosis.outcome == "stopped" else "failed",
        reason=one.reason,
        category=category,
        root_line=diagnosis.root_line if line is None else line,
        root_lines=diagnosis.root_lines if line is None or line == diagnosis.root_line else (line,),
        action=said.action,
        restart_helps=said.restart_helps,
        mitigation=f"It looks like incident {one.key}, which a person confirmed to be {one.reason}.{done}",
        confidence=round(_SURE_MOST * near, 3),
        alternatives=others,
        decided_by=(f"memory:{one.key}", *diagnosis.decided_by),
        root_text=text,
    )


def _asked(text: str) -> list[str]:
    return [word for word in dict.fromkeys(words_of(text)) if word not in COMMON][:64]


def _strange(kept: Iterable[Kept]) -> list[tuple[str, LogLine]]:
    """The kept lines that may state a root: those with a word of trouble, the last ones first."""
    found = []
    for one in kept:
        text = clean_line(one.text.encode("utf-8", "replace"), one.line).text.strip()
        if is_trouble(text) and not sounds_bad(text):
            found.append((text, LogLine(file=one.file, line=one.line, text=one.text)))
    return found[::-1][:_LINES_LIMIT]


@functools.cache
def _background() -> tuple[str, ...]:
    """Lines by which it is known which words are common: an example of each packaged rule."""
    return tuple(rule.match[0] for topic in packaged_topics() for rule in topic.rules if rule.match)
