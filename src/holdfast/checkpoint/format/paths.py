"""Name the folders and files of a checkpoint folder."""

import re
from pathlib import Path
from typing import Final


def step_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return folder / f"step-{step:010d}"


def parse_name(name: str) -> tuple[int, bool] | None:
    """The step of a checkpoint's folder name and whether it is a replaced one; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2] is not None)


def replaced_path(path: Path) -> Path:
    """Where the checkpoint at `path` waits while its step is saved again."""
    return path.with_name(path.name + ".replaced")


def staging_path(folder: Path, step: int, save: str) -> Path:
    """Where the save that is called `save` is prepared."""
    return folder / f".{step_path(folder, step).name}.{save}.tmp"


def failure_path(folder: Path, step: int, save: str) -> Path:
    """Where it is told why that save failed."""
    return folder / f".{step_path(folder, step).name}.{save}.failed"


_NAME = re.compile(r"step-(\d{10,})(\.replaced)?")


METADATA_NAME: Final = ".metadata"
