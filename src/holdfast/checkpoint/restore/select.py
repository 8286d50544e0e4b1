"""Restoring: the newest checkpoint that verifies on all ranks, read into a state that fits it."""

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
"""Steps, at most, in a message."""
_LOOKS: Final = 3
"""Whoever saves meanwhile deletes what is superfluous: then there is a newer one."""


class RestoredStep(int):
    """The step that was restored, 0 where there was no checkpoint, and the names that only one side had.

    Attributes:
        missing: of the state, which the checkpoint lacks; they are as they were.
        unexpected: of the checkpoint, which the state lacks; they were left out.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A checkpoint that was not taken, and why."""

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
    """Restore the newest checkpoint of which all that the ranks need is whole. Collective.

    Where all of it is in memory, left by the ranks before these on their nodes, or by nodes that hold what other ones
    lost, it is taken from there; then, or when another one was restored, that memory is given back.

    Args:
        ranks: those that restore.
        folder: the checkpoints.
        state: see `Checkpointer.restore`.
        per_rank: likewise.
        fetch_instead: takes a step that is damaged and the next older one there is, or -1; puts the newest whole one
            between them into the folder, and tells its step, or None. Collective.
        from_memory: these ranks take the place of those that saved. Else what is in memory is left to those that do.
        step: the only one to take; None: the newest.
        terms: how to restore, see `restore_into`.

    Returns:
        It, or None where there is none at all, and those that were passed over, newest first.

    Raises:
        NotFound: there is no checkpoint of `step`.
        NoVerifiedCheckpoint: there are checkpoints, or those of `step`, and none verifies.
        BadUse, StateMismatch, CheckpointError: see `restore_into`; where a newer step was damaged, tensors may hold
            parts of that, and StateMismatch says so.
    """
    into = functools.partial(restore_into, state=state, per_rank=per_rank, terms=terms)
    if not from_memory:
        return _restore_newest(ranks, folder, into, None, fetch_instead, step)
    found: list[PreviousRanks] = []

    def ask() -> list[SnapshotInfo]:
        found.append(PreviousRanks(folder, ranks.rank, ranks.world_size))
        return found[0].infos

    told = ranks.together(ask)
    with found[0] as memory:
        in_memory = newest_whole(told, ranks.world_size)
        if in_memory is None and any(told) and ranks.rank == 0:
            _logger.warning(
                "Not all ranks' parts of one step are in memory (%s).",
                _missing(told, ranks.world_size),
            )
        planned = [] if in_memory is None else moves(told, in_memory)
        source = _Memory(memory, -1 if in_memory is None else in_memory[0], planned)
        restored = _restore_newest(ranks, folder, into, source, fetch_instead, step)
        memory.end()
        return restored


class _Memory(NamedTuple):
    """Which step can be had from memory, and what is to be sent for it."""

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
            before = ranks.first(functools.partial(_digest, info))
            opened, reason = open_together(ranks, info.path, info.step, tier)
            if opened is not None:
                try:
                    reason = into(ranks, opened)
                except StateMismatch as error:
                    if not partly_read:
                        raise
                    raise StateMismatch(
                        f"{error} Its tensors may hold parts of step {partly_read[-1]}, which is damaged."
                    ) from error
                if reason:
                    partly_read.append(info.step)
            if not reason:
                return opened, ""
            if ranks.first(functools.partial(_digest, info)) == before:
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
                    "Step %d is not taken from memory, but from disk: %s.", info.step, reason
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
                return opened, [
                    item for item in passed_over if item.step != fetched
                ]  # it took its place
            passed_over.append(PassedOver(step=fetched, path=instead.path, reason=reason))
    if not passed_over:
        return None, []
    raise _none_verifies(folder, passed_over, step)


def _next_below(infos: Sequence[CheckpointInfo], step: int | None) -> int:
    """The step up to which storage is not asked for another one."""
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
        else f"Step {step} was asked for: give another one, or none to take the newest that verifies."
    )
    return NoVerifiedCheckpoint(f"No checkpoint in {folder} verifies ({reasons}). {advice}")


def _candidates(
    ranks: Ranks,
    folder: Path,
    step: int | None,
    fetch_instead: Callable[[int, int], int | None] | None,
) -> list[CheckpointInfo]:
    """The checkpoints that are tried, in their order. Collective.

    Raises:
        NotFound: there is none of `step`, here or in storage.
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
    """Return the checkpoints of the line that training is on, newest first.

    Raises:
        NoVerifiedCheckpoint: all that there are were abandoned.
    """
    found = look(folder)
    line = [info for info in found if not info.abandoned]
    if found and not line:
        steps = ", ".join(str(info.step) for info in found[:_NAMED])
        raise NoVerifiedCheckpoint(
            f"All checkpoints in {folder} were abandoned (step {steps}): training had begun anew beside them, and "
            "nothing of that was saved. Restore one of them by its step, or move them away to start over."
        )
    return line


def restored_event(
    checkpoint: OpenCheckpoint, passed_over: Sequence[PassedOver], *, restore_s: float
) -> dict[str, Any]:
    """Return what the event `restored` holds."""
    return {
        "step": checkpoint.manifest.step,
        "path": str(checkpoint.path),
        "restore_s": restore_s,
        "tier": checkpoint.files.tier,
        "bytes_read": checkpoint.files.bytes_read,
        "passed_over": [asdict(item) | {"path": str(item.path)} for item in passed_over],
    }


def _is_gone(path: Path) -> bool:
    """Not, where nobody can tell."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _digest(info: CheckpointInfo) -> str:
    """Which save of its step lies there now."""
    try:
        return read_manifest(info.path, step=info.step).digest
    except (ManifestError, OSError):
        return ""
