"""How much of a GPU a slice is that MIG (multi-instance GPU) cuts."""

import re
from typing import Final

_PROFILE = re.compile(r"(\d+)g\.(\d+)gb")
_WHOLE: Final = 7
"""Compute slices of an A100, H100, H200 or B200 (NVIDIA Multi-Instance GPU User Guide, supported profiles)."""
_OF_FOUR: Final = frozenset({"1g.6gb", "2g.12gb", "4g.24gb", "2g.48gb", "4g.96gb"})
"""Profiles of the GPUs that have four: the A30, and the RTX PRO 6000 except its 1g.24gb, a name that H100s have too."""


def is_slice(name: str) -> bool:
    """Whether a name has a MIG profile in it, such as `mig-1g.5gb` or `a100_3g.20gb`."""
    return _PROFILE.search(name) is not None


def mig_share(name: str) -> float:
    """The share of one GPU's compute slices that a profile holds: 1/7 for `1g.5gb`, 3/7 for `3g.20gb`.

    Raises:
        ValueError: there is no profile in the name.
    """
    profile = _PROFILE.search(name)
    if profile is None:
        raise ValueError(f"expected a MIG profile such as 1g.5gb where there is {name!r}")
    return int(profile[1]) / (4 if profile[0] in _OF_FOUR else _WHOLE)
