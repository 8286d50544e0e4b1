"""Name the folders and files of a checkpoint folder."""

import re
from pathlib import Path
from typing import Final


def step_path(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of `step`."""
    return folder / f"step-{step:010d}"


def parse_name(name: str) -> tuple[int, bool] | None:
    """Parse a folder name into its step and whether the checkpoint was replaced.

    Returns:
        None for any other name.
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2] is not None)


def replaced_path(path: Path) -> Path:
    """Return the folder that keeps the checkpoint at `path` while its step is saved again."""
    return path.with_name(path.name + ".replaced")


def staging_path(folder: Path, step: int, save: str) -> Path:
    """Return the staging folder of the save with the id `save`."""
    return folder / f".{step_path(folder, step).name}.{save}.tmp"


def failure_path(folder: Path, step: int, save: str) -> Path:
    """Return the file that records why the save with the id `save` failed."""
    return folder / f".{step_path(folder, step).name}.{save}.failed"


_NAME = re.compile(r"step-(\d{10,})(\.replaced)?")


METADATA_NAME: Final = ".metadata"
