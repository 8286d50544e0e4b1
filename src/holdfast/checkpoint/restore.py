"""Restoring: the newest checkpoint that verifies on all ranks, read into a state that fits it."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep as _pause
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.checkpoint import dcp, rng
from holdfast.checkpoint.catalog import CheckpointInfo, inspect, scan
from holdfast.checkpoint.contents import STRUCTURE, has_state_dict, rank_structure, state_dicts
from holdfast.checkpoint.fit import ABSENT, Fit, fill
from holdfast.checkpoint.folders import step_path
from holdfast.checkpoint.keeping import Told
from holdfast.checkpoint.kept import Predecessors
from holdfast.checkpoint.manifest import Manifest, ManifestError, UnreadError, check_contents, read_manifest
from holdfast.checkpoint.metadata import METADATA_NAME, check_against_files, read_metadata, unpack_metadata
from holdfast.checkpoint.peer_restoring import Move, bring, moves, newest_whole
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.reading import VerifiedFiles
from holdfast.checkpoint.tree import Skeleton, skeleton_from_paths
from holdfast.core.errors import CheckpointError, NoVerifiedCheckpoint, StateMismatch

_logger = logging.getLogger("holdfast")
_OPENINGS: Final = 3
"""A process that outlives its trainer may put another save of a step in the place of one, while ranks open it."""
_LOOKS: Final = 3
"""Whoever saves meanwhile deletes what is superfluous: then there is a newer one."""
_PAUSES_S: Final = (0.1, 1.0)
"""Before something is read again that could not be read: network file systems recover."""


@dataclass(frozen=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint whose metadata is whole; of the rest each byte is checked when it is read."""

    path: Path
    manifest: Manifest
    metadata: Metadata
    files: VerifiedFiles

    @functools.cached_property
    def shared(self) -> dict[Any, Any]:
        """The skeleton of the state."""
        shared = self._skeleton(STRUCTURE)
        if shared is not None:
            return shared
        names = self.metadata.state_dict_metadata
        return skeleton_from_paths(self.metadata.planner_data or {name: (name,) for name in names})

    def own(self, rank: int) -> dict[Any, Any] | None:
        """The skeleton of what belongs to `rank`: `user` and `rng`. None where DCP alone wrote it."""
        return self._skeleton(rank_structure(rank))

    def read(self, wanted: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        """See `dcp.read`."""
        return dcp.read(self.path, self.metadata, wanted, self.files)

    def _skeleton(self, name: str) -> dict[Any, Any] | None:
        """A skeleton that was stored under `name`, whose every leaf the metadata knows; None if there is none."""
        if name not in self.metadata.state_dict_metadata:
            return None
        (skeleton,) = self.read({name: None})[name]
        unknown = set(_leaves(skeleton)) - self.metadata.state_dict_metadata.keys()
        if unknown or not isinstance(skeleton, dict):
            raise CheckpointError(f"{name} names what the checkpoint does not hold: {sorted(unknown)[:3]}")
        return skeleton


@dataclass(frozen=True, kw_only=True)
class PassedOver:
    """A checkpoint that was not taken, and why."""

    step: int
    path: Path
    reason: str


def open_checkpoint(path: Path, manifest: Manifest, memory: Predecessors | None = None) -> OpenCheckpoint:
    """Read what a checkpoint says of itself; each byte that is read is checked.

    Args:
        path: the checkpoint.
        manifest: what it says.
        memory: where it is to be taken from; None: from disk.

    Raises:
        ManifestError: it is damaged, contradicts itself, or its metadata names what it must not; nothing of it has run.
        OSError: it cannot be read.
    """
    files: VerifiedFiles
    if memory is not None:
        content, files = memory.open(path, manifest)
        metadata = unpack_metadata(content)
    else:
        check_contents(path, [entry for entry in manifest.files if entry.path == METADATA_NAME])
        metadata, files = read_metadata(path), VerifiedFiles(path, manifest.files)
    opened = OpenCheckpoint(path=path, manifest=manifest, metadata=metadata, files=files)
    try:
        check_against_files(metadata, {entry.path: entry.size_bytes for entry in manifest.files})
        opened.shared  # noqa: B018 - read now, while another checkpoint can still be taken
    except (ManifestError, OSError):
        raise
    except Exception as error:  # whoever made it up may have made up anything
        raise ManifestError(f"its structure is unreadable ({type(error).__name__}: {error})") from error
    return opened


def restore_newest(
    ranks: Ranks,
    folder: Path,
    state: MutableMapping[str, Any],
    per_rank: MutableMapping[str, Any] | None,
    fetch_instead: Callable[[int, int], int | None] | None = None,
    *,
    from_memory: bool = True,
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

    Returns:
        It, or None where there is none at all, and those that were passed over, newest first.

    Raises:
        NoVerifiedCheckpoint: there are checkpoints, and none verifies.
        BadUse, StateMismatch, CheckpointError: see `restore_into`; where a newer step was damaged, tensors may hold
            parts of that, and StateMismatch says so.
    """
    if not from_memory:
        return _restore_newest(ranks, folder, state, per_rank, None, fetch_instead)
    found: list[Predecessors] = []

    def ask() -> list[Told]:
        found.append(Predecessors(folder, ranks.rank, ranks.world_size))
        return found[0].told

    told = ranks.together(ask)
    with found[0] as memory:
        in_memory = newest_whole(told, ranks.world_size)
        if in_memory is None and any(told) and ranks.rank == 0:
            _logger.warning("Not all ranks' parts of one step are in memory (%s).", _missing(told, ranks.world_size))
        planned = [] if in_memory is None else moves(told, in_memory)
        source = _Memory(memory, -1 if in_memory is None else in_memory[0], planned)
        restored = _restore_newest(ranks, folder, state, per_rank, source, fetch_instead)
        memory.end()
        return restored


class _Memory(NamedTuple):
    """Which step can be had from memory, and what is to be sent for it."""

    predecessors: Predecessors
    step: int
    moves: list[Move]


def _missing(told: Sequence[Sequence[Told]], world_size: int) -> str:
    newest = max(image.step for each in told for image in each)
    having = {image.rank for each in told for image in each if image.step == newest}
    return f"of step {newest}, {world_size - len(having)} of {world_size} are missing"


def _restore_newest(
    ranks: Ranks,
    folder: Path,
    state: MutableMapping[str, Any],
    per_rank: MutableMapping[str, Any] | None,
    memory: _Memory | None,
    fetch_instead: Callable[[int, int], int | None] | None,
) -> tuple[OpenCheckpoint | None, list[PassedOver]]:
    partly_read: list[int] = []

    def attempt(info: CheckpointInfo, tier: Predecessors | None) -> tuple[OpenCheckpoint | None, str]:
        if tier is None and info.state != "written":
            return None, info.reason or info.state
        for _ in range(_OPENINGS):
            before = ranks.first(functools.partial(_digest, info))
            opened, reason = open_together(ranks, info.path, info.step, tier)
            if opened is not None:
                try:
                    reason = restore_into(ranks, opened, state, per_rank)
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
    infos, looks = ranks.first(lambda: _look(folder)), 1
    while infos:
        info, *infos = infos
        if memory is not None and info.step == memory.step:
            reason = bring(ranks, memory.predecessors, memory.moves)
            opened, reason = (None, reason) if reason else attempt(info, memory.predecessors)
            if opened is not None:
                return opened, passed_over
            if ranks.rank == 0:
                _logger.warning("Step %d is not taken from memory, but from disk: %s.", info.step, reason)
            memory = None
        opened, reason = attempt(info, None)
        if opened is not None:
            return opened, passed_over
        if looks < _LOOKS and ranks.first(functools.partial(_is_gone, info.path)):
            infos, looks = ranks.first(lambda: _look(folder)), looks + 1
            passed_over.clear()
            if infos:
                continue
        passed_over.append(PassedOver(step=info.step, path=info.path, reason=reason))
        if ranks.rank == 0:
            _logger.warning("Passed over the checkpoint of step %d (%s): %s.", info.step, info.path, reason)
        if fetch_instead is None:
            continue
        fetched = fetch_instead(info.step, infos[0].step if infos else -1)
        if fetched is not None:
            instead = ranks.first(functools.partial(inspect, step_path(folder, fetched)))
            opened, reason = attempt(instead, None)
            if opened is not None:
                return opened, [item for item in passed_over if item.step != fetched]  # it took its place
            passed_over.append(PassedOver(step=fetched, path=instead.path, reason=reason))
    if not passed_over:
        return None, []
    reasons = "; ".join(f"step {item.step}: {item.reason}" for item in passed_over)
    raise NoVerifiedCheckpoint(
        f"No checkpoint in {folder} verifies ({reasons}). Put a good copy there, or move them away to start over."
    )


def _look(folder: Path) -> list[CheckpointInfo]:
    """What there is; what cannot be read is looked at again."""
    for pause_s in _PAUSES_S:
        infos = scan(folder)
        if not any(info.unread for info in infos):
            return infos
        _pause(pause_s)
    return scan(folder)


def _is_gone(path: Path) -> bool:
    """Not, where nobody can tell."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _failing(work: Callable[[], None]) -> str:
    """Why something of a checkpoint could not be read, or nothing; what may pass is tried again.

    Raises:
        CheckpointError: it holds what must not be read.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            work()
        except (UnreadError, OSError) as error:
            if pause_s is None or isinstance(error, FileNotFoundError):
                return str(error)
            _logger.debug("reading again: %s", error)
            _pause(pause_s)
        except ManifestError as error:
            return str(error)
        else:
            break
    return ""


def _digest(info: CheckpointInfo) -> str:
    """Which save of its step lies there now."""
    try:
        return read_manifest(info.path, step=info.step).digest
    except (ManifestError, OSError):
        return ""


def open_together(
    ranks: Ranks, path: Path, step: int, memory: Predecessors | None = None
) -> tuple[OpenCheckpoint | None, str]:
    """The same save of a step, opened by all ranks, or why some cannot. Collective."""
    opened: OpenCheckpoint | None = None

    def open_it() -> None:
        nonlocal opened
        opened = open_checkpoint(path, read_manifest(path, step=step), memory)
        if opened.manifest.world_size == ranks.world_size:
            opened.own(ranks.rank)

    def try_it() -> tuple[str, str]:
        reason = _failing(open_it)
        return reason, "" if reason or opened is None else opened.manifest.digest

    for _ in range(_OPENINGS):
        told = ranks.together(try_it)
        reason = next((reason for reason, _ in told if reason), "")
        if reason or len({digest for _, digest in told}) == 1:
            return (None, reason) if reason else (opened, "")
    return None, "it is being saved again"


def restore_into(
    ranks: Ranks,
    checkpoint: OpenCheckpoint,
    state: MutableMapping[str, Any],
    per_rank: MutableMapping[str, Any] | None,
) -> str:
    """Put a checkpoint into `state`, `per_rank` and this process's random generators. Collective.

    Returns:
        Nothing, or what of it is damaged: then tensors of `state` may hold parts of it.

    Raises:
        BadUse: `state` or `per_rank` is no dict of named entries.
        StateMismatch: they do not fit the checkpoint; nothing was changed on any rank.
        CheckpointError: it holds what must not be read.
    """
    same_world = checkpoint.manifest.world_size == ranks.world_size
    parts: list[_Part] = []
    fit = Fit(checkpoint.metadata.state_dict_metadata)
    rng_skeleton: dict[str, Any] = {}

    def look() -> None:
        nonlocal rng_skeleton
        parts.append(_Part(state, checkpoint.shared))
        own = checkpoint.own(ranks.rank) if same_world else None
        if per_rank is not None:
            if not same_world:
                raise _another_world(ranks, checkpoint)
            parts.append(_Part(per_rank, own["user"] if own else {}))
        for part in parts:
            part.look(fit)
        if own:
            rng_skeleton = own["rng"]
            fit.fit("rng", ABSENT, rng_skeleton)
        if fit.problems:
            more = f", and {len(fit.problems) - 3} more" if len(fit.problems) > 3 else ""
            raise StateMismatch(
                f"The state does not fit {checkpoint.path}: {'; '.join(fit.problems[:3])}{more}. "
                "Build it with the same model and optimizer, or leave that entry out to restore the rest."
            )

    ranks.together(look)
    loaded: dict[str, Any] = {}

    def read(*, plain: bool) -> str:
        wanted = {name: tensor for name, tensor in fit.wanted.items() if (tensor is None) == plain}
        return _failing(lambda: loaded.update(checkpoint.read(wanted)))

    # Plain values first: they are what may be refused, and until then no tensor has changed.
    for plain in (True, False):
        reasons = ranks.together(functools.partial(read, plain=plain))
        if any(reasons):
            return next(filter(None, reasons))
        if plain and rng_skeleton:
            ranks.together(functools.partial(rng.check, rng_skeleton, loaded))

    def put() -> None:
        for part in parts:
            part.put(loaded)
        if rng_skeleton:
            rng.put_back(fill(ABSENT, rng_skeleton, loaded))

    ranks.together(put)
    if not rng_skeleton and ranks.rank == 0:
        _logger.warning(
            "The random generators were left alone: %s was saved by %d ranks and is restored by %d, "
            "or was not saved by Holdfast.",
            checkpoint.path,
            checkpoint.manifest.world_size,
            ranks.world_size,
        )
    return ""


def per_rank_states(checkpoint: OpenCheckpoint) -> list[dict[str, Any]]:
    """What every rank had saved under `per_rank`, by rank; tensors on the CPU. Not collective.

    Raises:
        CheckpointError: something could not be read.
    """
    states = []
    for rank in range(checkpoint.manifest.world_size):
        own = checkpoint.own(rank)
        fit = Fit(checkpoint.metadata.state_dict_metadata)
        skeleton = own["user"] if own else {}
        fit.fit("per_rank", ABSENT, skeleton)
        states.append(fill({}, skeleton, checkpoint.read(fit.wanted)))
    return states


class _Part:
    """A dict of the user, of top-level entries, and the skeleton it is restored from."""

    def __init__(self, entries: MutableMapping[str, Any], skeleton: dict[Any, Any]) -> None:
        self._entries = entries
        self._skeleton = skeleton
        self._targets = state_dicts(entries)

    def look(self, fit: Fit) -> None:
        for name, target in self._targets.items():
            if name in self._skeleton:
                fit.fit(name, target, self._skeleton[name])
            else:
                fit.require(name, target)

    def put(self, loaded: Mapping[str, Any]) -> None:
        for name, target in self._targets.items():
            filled = fill(target, self._skeleton.get(name, {}), loaded)
            if has_state_dict(self._entries[name]):
                self._entries[name].load_state_dict(filled)
            else:
                self._entries[name] = filled


def _another_world(ranks: Ranks, checkpoint: OpenCheckpoint) -> StateMismatch:
    step, saved_by = checkpoint.manifest.step, checkpoint.manifest.world_size
    return StateMismatch(
        f"{checkpoint.path} was saved by {saved_by} ranks and is restored by {ranks.world_size}, "
        "so per_rank has no one to go to. Restore without per_rank, take what each of them had from "
        f"Checkpointer.per_rank_states({step}), and share it out."
    )


def _leaves(skeleton: Skeleton) -> Iterator[str]:
    if isinstance(skeleton, str):
        yield skeleton
    else:
        for part in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from _leaves(part)
