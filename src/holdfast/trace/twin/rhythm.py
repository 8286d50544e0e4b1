"""Define the parameters for the order of jobs in time, for the two published clusters.

These parameters are known from published data:

- the order of the 319 completed Kalos jobs of pretraining, fine-tuning and others, whose times are
  published
- two autocorrelations of the completed jobs of Kalos
- the types of the first tenth of Seren's GPU jobs
- the median pause of eleven minutes before a retry (504 B200, arXiv 2605.09370)

All other parameters are chosen by us.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.trace.twin.model import CPU, Rhythm

KALOS_PRETRAIN: Final = (0.791, 0.823, 0.413, 6.54)
"""`sessions.order_statistics` of the 183 completed pretraining jobs of Kalos."""

_FIRST_TENTH: Final = {"SFT": 25_781 / 66_971, "Evaluation": 2_965 / 292_212}
_FIRST_TENTH_OTHERS: Final = (45_059 - 25_781 - 2_965) / (450_590 - 66_971 - 292_212)
"""For each type, the share of Seren's jobs that are in the first tenth of its GPU jobs.

This is the share for all types that `_FIRST_TENTH` does not list.
"""
_FIRST_TENTH_ENDS: Final = 1 / 6
"""Share of the time in which the first tenth of Seren's jobs arrives.

It is about the first of six months (chosen).
"""
_KALOS_DRIFT: Final = {"Pretrain": 1.03, "Other": 0.71, "SFT": 0.71}
"""Drift exponents that reproduce the mean arrival time of the 319 jobs."""

_SAME_SIZE: Final = {"Pretrain": 0.95, "Evaluation": 0.7}
_NEAR_DURATION: Final = {"Pretrain": 0.84, "Evaluation": 0.6}
_GAP_CV2: Final = {"Pretrain": 30.0, "SFT": 6.5, "Other": 6.5}
RETRY_SHARE: Final = 0.5
RETRY_MEDIAN_S: Final = 660.0


def published_rhythm(types: tuple[str, ...], cluster: str) -> Rhythm:
    """Return the rhythm of a published cluster, `seren` or `kalos`.

    For Seren, the drift of each type is such that the published share of its jobs is among the
    first tenth of all GPU jobs.
    """
    drift, first = np.ones(len(types)), np.zeros(len(types))
    for number, name in enumerate(types):
        if cluster == "kalos":
            drift[number] = _KALOS_DRIFT.get(name, 1.0)
        elif name != CPU:
            first[number] = _FIRST_TENTH.get(name, _FIRST_TENTH_OTHERS)
            drift[number] = np.log(first[number]) / np.log(_FIRST_TENTH_ENDS)
    known = {types.index("Pretrain"): KALOS_PRETRAIN} if cluster == "kalos" else {}
    return usual_rhythm(types, drift=drift, first_parts=first, known=known)


def usual_rhythm(
    types: tuple[str, ...],
    *,
    drift: npt.NDArray[np.float64],
    first_parts: npt.NDArray[np.float64] | None = None,
    known: dict[int, tuple[float, float, float, float]] | None = None,
) -> Rhythm:
    """Return a `Rhythm` whose fields are this module's constants, unless an argument gives them.

    A rhythm describes how the submissions of each job type follow each other in time.

    Args:
        types: the names of the job types. A type's number is its index here.
        drift: an exponent for each type; see `Rhythm.drift`.
        first_parts: a share for each type; see `Rhythm.first_parts`. None stands for zeros.
        known: published statistics of some types, by type number; see `Rhythm.known`.
    """
    return Rhythm(
        same_size=np.array([_SAME_SIZE.get(name, 0.7) for name in types]),
        near_size=0.3,
        near_duration=np.array([_NEAR_DURATION.get(name, 0.5) for name in types]),
        alike=0.9,
        gap_cv2=np.array([_GAP_CV2.get(name, 3.0) for name in types]),
        retry_share=RETRY_SHARE,
        retry_median_s=RETRY_MEDIAN_S,
        drift=drift,
        first_parts=np.zeros(len(types)) if first_parts is None else first_parts,
        known=known or {},
    )
