"""Texts as vectors of words and letter groups, and the nearest of them: offline, without a model.

TF-IDF (Spärck Jones 1972; sublinear term frequency and smooth inverse document frequency as in scikit-learn) over the
words of a line and the groups of four letters within them; what varies from run to run is left out. The likeness is the
cosine: 1 for the same message, 0 for lines that share nothing; words of every log hardly count.
"""

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from holdfast.diagnose.memory.words import words_of

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
