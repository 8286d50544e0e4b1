"""Which checkpoints go once a new one is durable."""

from collections.abc import Collection, Sequence
from pathlib import Path

from holdfast.checkpoint.catalog import CheckpointInfo
from holdfast.checkpoint.folders import parse_name


def superfluous(
    checkpoints: Sequence[CheckpointInfo], *, committed: Path, damaged: Collection[Path], keep: int | None
) -> list[Path]:
    """Choose what to delete: whole checkpoints beyond the newest `keep`, replaced ones whose step is whole.

    `committed`, the one just verified, always stays. Those in `damaged` and those that look damaged neither
    count nor go: they are evidence, and are replaced when their step is saved again.
    """
    whole = [info for info in checkpoints if info.state == "written" and info.path not in damaged]
    # `checkpoints` is newest first and has the proper name of a step before its replaced one.
    first_of_step: dict[int, CheckpointInfo] = {}
    for info in whole:
        first_of_step.setdefault(info.step, info)
    counted = [info.path for info in first_of_step.values()]
    beyond = [] if keep is None else [path for path in counted[keep:] if path != committed]
    doubles = [info.path for info in whole if _is_replaced(info.path) and info.path not in counted]
    return [*doubles, *beyond]


def _is_replaced(path: Path) -> bool:
    name = parse_name(path.name)
    return name is not None and name[1]
