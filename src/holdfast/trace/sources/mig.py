"""Compute which share of a GPU a MIG slice (multi-instance GPU) holds."""

import re
from typing import Final

_PROFILE = re.compile(r"(\d+)g\.(\d+)gb")
_WHOLE: Final = 7
"""Number of compute slices of an A100, H100, H200 or B200.

Source: NVIDIA Multi-Instance GPU User Guide, supported profiles.
"""
_OF_FOUR: Final = frozenset({"1g.6gb", "2g.12gb", "4g.24gb", "2g.48gb", "4g.96gb"})
"""Profiles of GPUs that have four compute slices: the A30 and the RTX PRO 6000.

The profile 1g.24gb of the RTX PRO 6000 is missing, because the H100 has a profile of that name.
"""


def is_slice(name: str) -> bool:
    """Return True if a name contains a MIG profile, such as `mig-1g.5gb` or `a100_3g.20gb`."""
    return _PROFILE.search(name) is not None


def mig_share(name: str) -> float:
    """Return a profile's share of a GPU's compute slices: 1/7 for `1g.5gb`, 3/7 for `3g.20gb`.

    Raises:
        ValueError: the name contains no MIG profile.
    """
    profile = _PROFILE.search(name)
    if profile is None:
        raise ValueError(f"expected a MIG profile such as 1g.5gb where there is {name!r}")
    return int(profile[1]) / (4 if profile[0] in _OF_FOUR else _WHOLE)
