"""Define the names of the folders and files in a folder of checkpoints."""

import re
from pathlib import Path
from typing import Final


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step` in `folder`."""
    return folder / f"step-{step:010d}"


def parse_name(name: str) -> tuple[int, bool] | None:
    """Parse the name of a checkpoint's folder.

    Returns:
        The step, and True if a newer save of the step has replaced the checkpoint; None for any
        other name.
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2] is not None)


def replaced_path(path: Path) -> Path:
    """Return the path to which the checkpoint at `path` is moved while its step is saved again."""
    return path.with_name(path.name + ".replaced")


def staging_path(folder: Path, step: int, save: str) -> Path:
    """Return the folder into which the save with the id `save` writes before its commit."""
    return folder / f".{step_path(folder, step).name}.{save}.tmp"


def failure_path(folder: Path, step: int, save: str) -> Path:
    """Return the path of the file that records why the save with the id `save` has failed."""
    return folder / f".{step_path(folder, step).name}.{save}.failed"


_NAME = re.compile(r"step-(\d{10,})(\.replaced)?")


METADATA_NAME: Final = ".metadata"
