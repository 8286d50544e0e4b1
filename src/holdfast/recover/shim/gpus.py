"""Give each rank of a node another GPU than before.

A rank takes the visible GPU whose place is its local rank.
"""

from collections.abc import Mapping
from pathlib import Path

ENV_TURN_GPUS = "HOLDFAST_TURN_GPUS"
"""The variable that is set if the ranks of an attempt use other GPUs than in the attempt before."""
ENV_VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")
"""The folder in which the driver has a folder for each GPU."""


def turned(environment: Mapping[str, str], *, driver: Path = DRIVER) -> dict[str, str]:
    """Return the variable that moves the ranks of a node by one GPU.

    The result is empty if the ranks stay, or cannot move.

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
