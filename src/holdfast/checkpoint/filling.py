"""A checkpoint into a state that fits it, and each rank's own part of one."""

import functools
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from holdfast.checkpoint import rng
from holdfast.checkpoint.contents import has_state_dict, state_dicts
from holdfast.checkpoint.fit import ABSENT, Fit, fill
from holdfast.checkpoint.opening import OpenCheckpoint, failing
from holdfast.checkpoint.ranks import Ranks
from holdfast.core.errors import StateMismatch

_logger = logging.getLogger("holdfast")


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
        return failing(lambda: loaded.update(checkpoint.read(wanted)))

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
