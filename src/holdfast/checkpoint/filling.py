"""A checkpoint into a state that fits it, and each rank's own part of one."""

import functools
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.checkpoint import rng
from holdfast.checkpoint.contents import has_state_dict, state_dicts
from holdfast.checkpoint.fit import ABSENT, Fit, fill
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

    def __init__(self, entries: MutableMapping[str, Any], skeleton: dict[Any, Any]) -> None:
        self._entries = entries
        self._skeleton = skeleton
        self._targets = state_dicts(entries)

    def look(self, fit: Fit) -> None:
        for name, target in self._targets.items():
            if name in self._skeleton:
                problems = len(fit.problems)
                fit.fit(name, target, self._skeleton[name])
                if len(fit.problems) == problems:
                    fit.problems += _refused(name, self._entries[name], target, self._skeleton[name])
            else:
                fit.require(name, target)

    def put(self, loaded: Mapping[str, Any]) -> None:
        seen: set[int] = set()
        for name, target in self._targets.items():
            filled = fill(target, self._skeleton.get(name, {}), loaded, seen)
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


def _refused(name: str, entry: Any, target: Any, skeleton: Any) -> list[str]:
    """What `load_state_dict` would refuse of a checkpoint in which all is that `target`, its state, has."""
    if not isinstance(skeleton, dict) or not isinstance(target, Mapping):
        return []
    if isinstance(entry, torch.nn.Module):
        # One of its own, or a hook, may pass over what a module has not.
        is_its_own = type(entry).load_state_dict is not torch.nn.Module.load_state_dict
        if is_its_own or any(module._load_state_dict_pre_hooks for module in entry.modules()):
            return []
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
