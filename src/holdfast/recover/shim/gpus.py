"""Assign each rank of a node to another GPU than before.

A rank uses the visible GPU whose index is its local rank. So changing the order of the visible GPUs
moves the ranks.
"""

from collections.abc import Mapping
from pathlib import Path

ENV_TURN_GPUS = "HOLDFAST_TURN_GPUS"
"""The environment variable that is set if the ranks must use other GPUs than in the previous
attempt.
"""
ENV_VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")
"""The folder in which NVIDIA's driver lists each GPU as a folder."""


def turned(environment: Mapping[str, str], *, driver: Path = DRIVER) -> dict[str, str]:
    """Return the environment variable that moves each rank of a node to the next GPU.

    The result is empty if the ranks do not have to move, or cannot.

    Args:
        environment: the environment of a rank.
        driver: the folder in which the driver lists the GPUs.
    """
    if not environment.get(ENV_TURN_GPUS):
        return {}
    visible = [one for one in environment.get(ENV_VISIBLE, "").split(",") if one]
    if not visible and ENV_VISIBLE not in environment and driver.is_dir():
        visible = [str(number) for number, _ in enumerate(driver.iterdir())]
    if len(visible) < 2:
        return {}
    return {ENV_VISIBLE: ",".join([*visible[1:], visible[0]])}
