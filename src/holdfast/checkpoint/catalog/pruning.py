"""Delete checkpoints by a policy when the user requests it, and report why the others stay."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.checkpoint.catalog.annotations import held_for_reading, locked
from holdfast.checkpoint.catalog.catalog import (
    CheckpointInfo,
    Progress,
    inspect_checkpoint,
    scan,
    verify_and_note,
)
from holdfast.checkpoint.catalog.retention import Retention, Verdict, judge
from holdfast.checkpoint.catalog.staging_dir import erase, erase_abandoned, hide
from holdfast.core.errors import BadUse, HoldfastError, NotFound


@dataclass(frozen=True, kw_only=True)
class PruneResult:
    """Describe the result of `prune`.

    Attributes:
        verdicts: the decision about each checkpoint, newest first.
        deleted: the checkpoints that were deleted.
        failed: the checkpoints that could not be deleted.
    """

    verdicts: list[Verdict]
    deleted: list[Path]
    failed: list[Path]

    @property
    def freed_bytes(self) -> int:
        """Return the total size of the deleted checkpoints in bytes."""
        return sum(
            verdict.info.size_bytes
            for verdict in self.verdicts
            if verdict.info.path in self.deleted
        )


def prune(
    folder: Path,
    policy: Retention,
    *,
    by: str,
    now_s: float,
    dry_run: bool = False,
    progress: Progress = lambda _done, _total: None,
) -> PruneResult:
    """Delete the checkpoints of a folder that a policy does not keep.

    Before anything is deleted, this function ensures that an undamaged checkpoint stays. It is
    enough if one that stays is marked verified and is newer than all that will be deleted.
    Otherwise, the checkpoints that stay are read, from the newest on, until one of them is found
    undamaged. The results are recorded in the marks. A checkpoint that cannot be deleted stays, and
    its verdict gives the reason.

    Args:
        folder: the checkpoint folder.
        policy: the rules.
        by: the name that is recorded in the marks.
        now_s: the time, in seconds since the Unix epoch.
        dry_run: whether only to decide, without reading or deleting anything.
        progress: called during a verification with the number of bytes read so far and the total.

    Raises:
        NotFound: `folder` is not a folder.
        BadUse: the policy has no rule, or names a metric that no checkpoint has.
    """
    if not policy.has_rules:
        raise BadUse(
            "No rule names the checkpoints to keep. Give at least one rule: --last, --every, --best or --within."
        )
    _check_metrics(folder, policy)
    if dry_run:
        return PruneResult(verdicts=judge(scan(folder), policy, now_s=now_s), deleted=[], failed=[])
    erase_abandoned(folder)
    verdicts = _compare_with_verified(folder, policy, by=by, now_s=now_s, progress=progress)
    deleted, failed = [], []
    for index, verdict in enumerate(verdicts):
        if not verdict.stays:
            try:
                claim = delete_unclaimed(verdict.info, now_s=now_s)
            except (OSError, HoldfastError) as error:
                failed.append(verdict.info.path)
                claim = f"it could not be deleted: {error}"
            if claim:
                verdicts[index] = replace(verdict, stays=(claim,), goes=None)
            else:
                deleted.append(verdict.info.path)
    return PruneResult(verdicts=verdicts, deleted=deleted, failed=failed)


def delete_unclaimed(
    judged: CheckpointInfo, *, now_s: float | None, progress: Callable[[int], None] = lambda _: None
) -> str | None:
    """Delete a checkpoint, unless it has changed since the decision to delete it.

    A process that sets a mark holds the same lock. So either the mark is set first and the
    checkpoint stays, or the process that sets the mark receives NotFound. `progress` is called with
    1 after each deleted file.

    Returns:
        The reason why the checkpoint stays; None if it is deleted.

    Raises:
        CheckpointError: another process holds the lock.
        OSError: the folder cannot be written.
    """
    try:
        with locked(judged.path):
            now = inspect_checkpoint(judged.path)
            if now.marks.pinned is not None:
                return "pinned"
            if now.marks.unreadable is not None:
                return f"its marks cannot be read: {now.marks.unreadable}"
            if holders := now.marks.wanted_by(now_s):
                return f"wanted by {', '.join(holders)}"
            if now.marks.as_dict() != judged.marks.as_dict():
                return "it was marked during the deletion"
            if (now.created_at_s, now.size_bytes) != (judged.created_at_s, judged.size_bytes):
                return "its step was saved again during the deletion"
            hidden = hide(judged.path)
    except NotFound:  # another process has deleted the checkpoint
        return None
    if hidden is None:
        return "it could not be deleted"
    erase(hidden, progress)
    return None


def _compare_with_verified(
    folder: Path, policy: Retention, *, by: str, now_s: float, progress: Progress
) -> list[Verdict]:
    damaged: set[Path] = set()
    while True:
        verdicts = judge(scan(folder), policy, now_s=now_s, damaged=damaged)
        line = [verdict for verdict in verdicts if not verdict.info.abandoned]
        staying = [verdict.info for verdict in line if verdict.stays and verdict.is_whole]
        going = [verdict.info.step for verdict in line if not verdict.stays]
        if not going or any(info.marks.verified and info.step >= going[0] for info in staying):
            return verdicts
        # If any checkpoint goes, the newest whole one stays, so `staying` is not empty.
        newest = staying[0]
        with contextlib.suppress(NotFound):  # the job has deleted the checkpoint by its own policy
            with held_for_reading(newest.path, "prune", clock_s=lambda: now_s):
                found = verify_and_note(newest, by=by, now_s=now_s, progress=progress)
            if found.state == "verified":
                return verdicts
            damaged.add(newest.path)


def _check_metrics(folder: Path, policy: Retention) -> None:
    known = {name for info in scan(folder) for name in info.marks.metrics}
    for best in policy.best:
        if best.metric not in known:
            there = (
                f"There are: {', '.join(sorted(known))}."
                if known
                else "Record one with `holdfast.checkpoint.note_metrics`."
            )
            raise BadUse(f"No checkpoint in {folder} has a metric {best.metric!r}. {there}")
