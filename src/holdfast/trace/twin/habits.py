"""What is not counted anywhere and has to be chosen: who submits, when, how many at once, with how many CPU cores.

The choices follow what the study says in words (section 2.2 and 3: evaluation in batches of about 60 datasets, reserved
quota for pretraining; section 4: people at work by day) and the released rows' own ratios of CPU cores to GPUs.
"""

from typing import Final

import numpy as np

from holdfast.trace.twin.model import CPU, Floats

DISPERSION: Final = 0.45
"""Of a day's rate of arrivals, around the pattern of the week."""

_BATCHES: Final = {
    "Evaluation": 60.0,
    "SFT": 3.0,
    "MLLM": 2.0,
    "Debug": 1.5,
    "Other": 6.0,
    "Pretrain": 1.0,
    CPU: 40.0,
}
_USERS: Final = {
    "Evaluation": 60,
    "SFT": 70,
    "MLLM": 30,
    "Debug": 50,
    "Other": 120,
    "Pretrain": 14,
    CPU: 110,
}
_ZIPF: Final = 1.15
"""Exponent of the users' rank-frequency: the busiest few submit most."""


def published_batches(types: tuple[str, ...]) -> Floats:
    """(T) mean jobs submitted together."""
    return np.array([_BATCHES[name] for name in types])


def published_users(types: tuple[str, ...]) -> Floats:
    """(T, U) shares: each type has its own busiest users, and most users work on two or three types."""
    everyone = 160
    shares = np.zeros((len(types), everyone))
    rng = np.random.default_rng(2403)
    for number, name in enumerate(types):
        ranks = 1.0 / np.arange(1, _USERS[name] + 1) ** _ZIPF
        # Ranks start at another user for each type, so that the busiest evaluator is no pretrainer.
        who = (7 * number + rng.permutation(everyone)[: _USERS[name]]) % everyone
        shares[number, who] = ranks / ranks.sum()
    return shares


def published_cpus(types: tuple[str, ...], values: Floats, cluster: str) -> Floats:
    """(T, G) CPU cores: as the released rows have them.

    Seren gives 16 a GPU on one node and 10 a GPU over several, an evaluation 2 a GPU; Kalos 120 a node, an
    evaluation 6 a GPU.
    """
    cpus = np.zeros((len(types), len(values)))
    for number, name in enumerate(types):
        if name == CPU:
            cpus[number] = 2.0 if cluster == "seren" else 4.0
        elif cluster == "seren":
            per_gpu = np.where(values > 8, 10.0, 2.0 if name == "Evaluation" else 16.0)
            cpus[number] = values * per_gpu
        else:
            cpus[number] = values * 6.0 if name == "Evaluation" else 120.0 * np.ceil(values / 8)
    return cpus


def published_hours() -> Floats:
    """(168) share of submissions by local hour: low before dawn, two peaks a working day, half of it on weekends."""
    hour = np.arange(24)
    day = 0.35 + np.exp(-(((hour - 11) / 2.6) ** 2)) + 1.05 * np.exp(-(((hour - 16) / 3.0) ** 2))
    day += 0.75 * np.exp(-(((hour - 21.5) / 2.4) ** 2))
    week = np.concatenate([day * (1.0 if weekday < 5 else 0.55) for weekday in range(7)])
    return np.asarray(week / week.sum())
