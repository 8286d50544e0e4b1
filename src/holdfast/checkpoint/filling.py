"""A checkpoint into a state that fits it, and each rank's own part of one."""

import functools
import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import rng
from holdfast.checkpoint.contents import has_state_dict, state_dicts
from holdfast.checkpoint.fit import ABSENT, Fit, fill, rebuilt
from holdfast.checkpoint.judged import judged_names, judges_all
from holdfast.checkpoint.opening import OpenCheckpoint, failing
from holdfast.checkpoint.plan import local
from holdfast.checkpoint.ranks import Ranks
from holdfast.core.errors import HoldfastError, StateMismatch

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
        StateMismatch: they do not fit the checkpoint; nothing was changed on any rank, unless it says so.
        CheckpointError: it holds what must not be read.
    """
    same_world = checkpoint.manifest.world_size == ranks.world_size
    parts: list[_Part] = []
    fit = Fit(checkpoint.metadata.state_dict_metadata)
    rng_skeleton: dict[str, Any] = {}

    def look() -> None:
        nonlocal rng_skeleton
        parts.append(_Part(state, checkpoint.shared, lost_empty=not checkpoint.has_structure))
        own = checkpoint.own(ranks.rank) if same_world else None
        if per_rank is not None:
            if not same_world:
                raise _another_world(ranks, checkpoint)
            parts.append(_Part(per_rank, own["user"] if own else {}))
        for part in parts:
            part.look(fit)
        for part in parts:
            part.adopt(fit)
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
        _check_same(fit, loaded)
        for part in parts:
            part.put(loaded)
        if rng_skeleton:
            rng.put_back(fill(ABSENT, rng_skeleton, loaded))

    ranks.together(put)
    if not rng_skeleton and ranks.rank == 0:
        why = "Checkpointer.save has not saved it"
        if not same_world:
            why = f"it was saved by {checkpoint.manifest.world_size} ranks and is restored by {ranks.world_size}"
        _logger.warning("The random generators were left alone by %s: %s.", checkpoint.path, why)
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

    def __init__(
        self, entries: MutableMapping[str, Any], skeleton: dict[Any, Any], *, lost_empty: bool = False
    ) -> None:
        self._lost_empty = lost_empty
        self._entries = entries
        self._skeleton = skeleton
        self._targets = state_dicts(entries)

        self._own = {name: self._judged(name) for name in self._targets}

    def look(self, fit: Fit) -> None:
        """Compare what is not judged by an object's own code."""
        for name, own in self._own.items():
            if name not in self._skeleton:
                fit.require(name, self._targets[name])
                continue
            if own is _all:
                continue
            target, skeleton = _without(own, self._targets[name]), _without(own, self._skeleton[name])
            problems = len(fit.problems)
            fit.fit(name, target, skeleton)
            if len(fit.problems) == problems:
                fit.problems += _refused(name, self._entries[name], target, skeleton)

    def adopt(self, fit: Fit) -> None:
        """Take the rest as it is."""
        for name, own in self._own.items():
            target, skeleton = self._targets[name], self._skeleton.get(name, {})
            if own is _all:
                fit.adopt(name, target, skeleton)
            elif own is not _nothing:
                for key in filter(own, skeleton):
                    fit.adopt(f"{name}.{key}", target.get(key, ABSENT), skeleton[key])

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Put in what was read."""
        seen: set[int] = set()
        for name, target in self._targets.items():
            skeleton, own = self._skeleton.get(name, {}), self._own[name]
            if own is _all and name in self._skeleton:
                filled = rebuilt(target, skeleton, loaded, lost_empty=self._lost_empty)
            elif own in (_all, _nothing):
                filled = fill(target, skeleton, loaded, seen)
            else:
                filled = fill(target, _without(own, skeleton), loaded, seen)
                for key in [key for key in filled if own(key) and key not in skeleton]:
                    del filled[key]
                for key in filter(own, skeleton):
                    filled[key] = rebuilt(filled.get(key, ABSENT), skeleton[key], loaded)
            if not has_state_dict(self._entries[name]):
                self._entries[name] = filled
                continue
            try:
                self._entries[name].load_state_dict(filled)
            except HoldfastError:
                raise
            except Exception as error:  # it is the user's
                reason = next(iter(str(error).strip().splitlines()), "")
                raise StateMismatch(
                    f"load_state_dict of {name!r} failed ({type(error).__name__}: {reason}). "
                    "Tensors hold what was restored already: build it as it was saved, or leave that entry out."
                ) from error

    def _judged(self, name: str) -> Callable[[Any], bool]:
        """Tells which keys of an entry are judged by an object's own code."""
        entry, target, skeleton = self._entries[name], self._targets[name], self._skeleton.get(name)
        if not has_state_dict(entry):
            return _nothing
        if judges_all(entry):
            return _all
        if isinstance(entry, torch.nn.Module) and isinstance(target, dict) and isinstance(skeleton, dict):
            return judged_names(entry, target, skeleton)
        return _nothing


def _without(own: Callable[[Any], bool], entries: Any) -> Any:
    return entries if own is _nothing else {key: part for key, part in entries.items() if not own(key)}


def _all(_key: Any) -> bool:
    return True


def _nothing(_key: Any) -> bool:
    return False


def _refused(name: str, entry: Any, target: Any, skeleton: Any) -> list[str]:
    """What `load_state_dict` would refuse of a checkpoint in which all is that `target`, its state, has."""
    if not isinstance(skeleton, dict) or not isinstance(target, Mapping):
        return []
    if isinstance(entry, torch.nn.Module):
        return [f"{name!r} has no {key!r}, which the checkpoint has" for key in skeleton if key not in target]
    groups, saved = target.get("param_groups"), skeleton.get("param_groups")
    if isinstance(entry, torch.optim.Optimizer) and isinstance(groups, list) and isinstance(saved, list):
        if len(groups) != len(saved):
            return [f"{name!r} has {len(groups)} groups of parameters, the checkpoint has {len(saved)}"]
        if not entry.state and skeleton.get("state") and any(map(_is_sharded, entry.param_groups)):
            return [f"{name!r} has no state yet and sharded parameters: save and restore it in a ShardedOptimizer"]
    return []


def _is_sharded(group: Mapping[str, Any]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in group["params"])


def _check_same(fit: Fit, loaded: dict[str, Any]) -> None:
    """What is one tensor in the state, as tied weights are, is one in the checkpoint.

    Raises:
        StateMismatch: it is not.
    """
    for (name, flat), (other, beside) in fit.same:
        if not torch.equal(_bits(loaded[flat]), _bits(loaded[beside])):
            raise StateMismatch(
                f"{name!r} and {other!r} are one tensor in the state, and two that differ in the checkpoint. Untie "
                "them, as they were when it was saved; tensors of the state hold parts of it."
            )
        loaded[beside] = loaded[flat]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return local(tensor).detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)


def _another_world(ranks: Ranks, checkpoint: OpenCheckpoint) -> StateMismatch:
    step, saved_by = checkpoint.manifest.step, checkpoint.manifest.world_size
    return StateMismatch(
        f"{checkpoint.path} was saved by {saved_by} ranks and is restored by {ranks.world_size}, "
        "so per_rank has no one to go to. Restore without per_rank, take what each of them had from "
        f"Checkpointer.per_rank_states({step}), and share it out."
    )
