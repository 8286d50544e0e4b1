"""Restore the newest checkpoint that verifies on all ranks, from memory or from disk."""

import functools
import logging
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.checkpoint.catalog.catalog import CheckpointInfo, inspect_checkpoint
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.format.manifest import ManifestError, read_manifest
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.memory.client import PreviousRanks
from holdfast.checkpoint.memory.peer_restore import Move, bring, moves, newest_whole
from holdfast.checkpoint.memory.server import SnapshotInfo
from holdfast.checkpoint.restore.load import Terms, restore_into
from holdfast.checkpoint.restore.open import OPENINGS, OpenCheckpoint, look, open_together
from holdfast.core.errors import NotFound, NoVerifiedCheckpoint, StateMismatch

_logger = logging.getLogger("holdfast")
_NAMED: Final = 5
"""The limit on steps that a message lists."""
_LOOKS: Final = 3
"""The number of times that the folder is listed if checkpoints are deleted during a restore.

A concurrent save deletes old checkpoints. In that case, the folder has a newer one.
"""


class RestoredStep(int):
    """Hold the restored step (0 if there was no checkpoint) and the names that did not match.

    Attributes:
        missing: names that only the state has; their values are unchanged.
        unexpected: names that only the checkpoint has; their values are not restored.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """Name a checkpoint that was skipped, and the reason."""

    step: int
    path: Path
    reason: str


def restore_newest(
    ranks: Ranks,
    folder: Path,
    state: MutableMapping[str, Any],
    per_rank: MutableMapping[str, Any] | None,
    fetch_instead: Callable[[int, int], int | None] | None = None,
    *,
    from_memory: bool = True,
    step: int | None = None,
    terms: Terms | None = None,
) -> tuple[OpenCheckpoint | None, list[PassedOver]]:
    """Restore the newest checkpoint whose parts for these ranks are all intact. Collective.

    The checkpoint is read from memory if every rank's part is in the memory of these nodes,
    including snapshots that they hold for peers. After the restore, memory snapshots are released.

    Args:
        ranks: the ranks that restore.
        folder: the folder of the checkpoints.
        state: see `Checkpointer.restore`.
        per_rank: see `Checkpointer.restore`.
        fetch_instead: called if a step is damaged, with that step and the next older step in the
            folder (-1 if there is none). Fetches from storage into the folder the newest intact
            checkpoint that is newer than the older step, up to the damaged step. Returns its step,
            or None if storage has none. Collective.
        from_memory: whether to read and release the memory snapshots of the ranks that saved,
            because these ranks replace them.
        step: the step to restore; None for the newest that verifies.
        terms: see `restore_into`.

    Returns:
        The restored checkpoint, or None if there is no checkpoint at all; and the skipped
        checkpoints, newest first.

    Raises:
        NotFound: there is no checkpoint of `step`.
        NoVerifiedCheckpoint: there are checkpoints, or checkpoints of `step`, but none verifies.
        BadUse, StateMismatch, CheckpointError: see `restore_into`. If a newer step was damaged,
            tensors may hold parts of that step, and the StateMismatch names the step.
    """
    into = functools.partial(restore_into, state=state, per_rank=per_rank, terms=terms)
    if not from_memory:
        return _restore_newest(ranks, folder, into, None, fetch_instead, step)
    found: list[PreviousRanks] = []

    def ask() -> list[SnapshotInfo]:
        found.append(PreviousRanks(folder, ranks.rank, ranks.world_size))
        return found[0].infos

    results = ranks.together(ask)
    with found[0] as memory:
        in_memory = newest_whole(results, ranks.world_size)
        if in_memory is None and any(results) and ranks.rank == 0:
            _logger.warning(
                "Not all ranks' parts of one step are in memory (%s).",
                _missing(results, ranks.world_size),
            )
        planned = [] if in_memory is None else moves(results, in_memory)
        source = _Memory(memory, -1 if in_memory is None else in_memory[0], planned)
        restored = _restore_newest(ranks, folder, into, source, fetch_instead, step)
        memory.end()
        return restored


class _Memory(NamedTuple):
    """Name the step that memory snapshots can restore (-1 if none), and the transfers it needs."""

    predecessors: PreviousRanks
    step: int
    moves: list[Move]


def _missing(infos: Sequence[Sequence[SnapshotInfo]], world_size: int) -> str:
    newest = max(image.step for each in infos for image in each)
    having = {image.rank for each in infos for image in each if image.step == newest}
    return f"of step {newest}, {world_size - len(having)} of {world_size} are missing"


def _restore_newest(
    ranks: Ranks,
    folder: Path,
    into: Callable[[Ranks, OpenCheckpoint], str],
    memory: _Memory | None,
    fetch_instead: Callable[[int, int], int | None] | None,
    step: int | None,
) -> tuple[OpenCheckpoint | None, list[PassedOver]]:
    partly_read: list[int] = []

    def attempt(
        info: CheckpointInfo, tier: PreviousRanks | None
    ) -> tuple[OpenCheckpoint | None, str]:
        if tier is None and info.state != "written":
            return None, info.reason or info.state
        for _ in range(OPENINGS):
            opened, reason, digest = open_together(ranks, info.path, info.step, tier)
            if opened is not None:
                try:
                    reason = into(ranks, opened)
                except StateMismatch as error:
                    if not partly_read:
                        raise
                    raise StateMismatch(
                        f"{error} Its tensors may hold parts of step {partly_read[-1]}, which is "
                        "damaged."
                    ) from error
                if reason:
                    partly_read.append(info.step)
            if not reason:
                return opened, ""
            if ranks.first(functools.partial(_digest, info)) == digest:
                break
        return None, reason

    passed_over: list[PassedOver] = []
    infos, looks = _candidates(ranks, folder, step, fetch_instead), 1
    while infos:
        info, *infos = infos
        if memory is not None and info.step == memory.step:
            reason = bring(ranks, memory.predecessors, memory.moves)
            opened, reason = (None, reason) if reason else attempt(info, memory.predecessors)
            if opened is not None:
                return opened, passed_over
            if ranks.rank == 0:
                _logger.warning(
                    "Step %d is read from disk and not from memory: %s.", info.step, reason
                )
            memory = None
        opened, reason = attempt(info, None)
        if opened is not None:
            return opened, passed_over
        if looks < _LOOKS and ranks.first(functools.partial(_is_gone, info.path)):
            infos, looks = _candidates(ranks, folder, step, fetch_instead), looks + 1
            passed_over.clear()
            if infos:
                continue
        passed_over.append(PassedOver(step=info.step, path=info.path, reason=reason))
        if ranks.rank == 0:
            _logger.warning(
                "Passed over the checkpoint of step %d (%s): %s.", info.step, info.path, reason
            )
        if fetch_instead is None:
            continue
        fetched = fetch_instead(info.step, _next_below(infos, step))
        if fetched is not None:
            instead = ranks.first(functools.partial(inspect_checkpoint, step_path(folder, fetched)))
            opened, reason = attempt(instead, None)
            if opened is not None:
                # The fetched checkpoint replaced the damaged one of its step.
                return opened, [item for item in passed_over if item.step != fetched]
            passed_over.append(PassedOver(step=fetched, path=instead.path, reason=reason))
    if not passed_over:
        return None, []
    raise _none_verifies(folder, passed_over, step)


def _next_below(infos: Sequence[CheckpointInfo], step: int | None) -> int:
    """Return the step above which a checkpoint from storage is newer than any left to try."""
    if step is not None:
        return step - 1
    return infos[0].step if infos else -1


def _none_verifies(
    folder: Path, passed_over: Sequence[PassedOver], step: int | None
) -> NoVerifiedCheckpoint:
    reasons = "; ".join(f"step {item.step}: {item.reason}" for item in passed_over)
    advice = (
        "Put a good copy there, or move them away to start over."
        if step is None
        else f"Step {step} was requested: give another one, or none to take the newest that verifies."
    )
    return NoVerifiedCheckpoint(f"No checkpoint in {folder} verifies ({reasons}). {advice}")


def _candidates(
    ranks: Ranks,
    folder: Path,
    step: int | None,
    fetch_instead: Callable[[int, int], int | None] | None,
) -> list[CheckpointInfo]:
    """Return the checkpoints to try, in order. If `step` is given, try only that step. Collective.

    Raises:
        NotFound: there is no checkpoint of `step` in the folder or in storage.
    """
    if step is None:
        return ranks.first(lambda: _of_the_line(folder))
    infos: list[CheckpointInfo] = ranks.first(lambda: look(folder))
    found = [info for info in infos if info.step == step]
    if not found and fetch_instead is not None and fetch_instead(step, step - 1) is not None:
        found = [info for info in ranks.first(lambda: look(folder)) if info.step == step]
    if not found:
        steps = ", ".join(str(each) for each in sorted({info.step for info in infos})) or "none"
        raise NotFound(
            f"There is no checkpoint of step {step} in {folder}. The steps there are: {steps}."
        )
    return found


def _of_the_line(folder: Path) -> list[CheckpointInfo]:
    """Return the checkpoints of the present line of training, newest first.

    If training restarted from an older checkpoint, the newer ones are abandoned and left out.

    Raises:
        NoVerifiedCheckpoint: all checkpoints were abandoned.
    """
    found = look(folder)
    line = [info for info in found if not info.abandoned]
    if found and not line:
        steps = ", ".join(str(info.step) for info in found[:_NAMED])
        raise NoVerifiedCheckpoint(
            f"All checkpoints in {folder} were abandoned (step {steps}): training had started over "
            "beside them, and has saved nothing since. Restore one of them by its step, or "
            "move them away to start over."
        )
    return line


def restored_event(
    checkpoint: OpenCheckpoint, passed_over: Sequence[PassedOver], *, restore_s: float
) -> dict[str, Any]:
    """Build the data of the event `restored`, as plain JSON values."""
    return {
        "step": checkpoint.manifest.step,
        "path": str(checkpoint.path),
        "restore_s": restore_s,
        "tier": checkpoint.files.tier,
        "bytes_read": checkpoint.files.bytes_read,
        "passed_over": [asdict(item) | {"path": str(item.path)} for item in passed_over],
    }


def _is_gone(path: Path) -> bool:
    """Return True if the path certainly does not exist."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _digest(info: CheckpointInfo) -> str:
    """Return the digest in the manifest, which identifies the save; "" if it cannot be read."""
    try:
        return read_manifest(info.path, step=info.step).digest
    except (ManifestError, OSError):
        return ""
