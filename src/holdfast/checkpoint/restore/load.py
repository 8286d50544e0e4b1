"""Restore an open checkpoint into a live state, or read the `per_rank` state of every rank."""

import functools
import logging
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from holdfast.checkpoint.batches.batches import Batches
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.restore.open import OpenCheckpoint, failing
from holdfast.checkpoint.restore.state_part import StatePart
from holdfast.checkpoint.state import random_state
from holdfast.checkpoint.state.capture import OPTIMIZERS, rank_optimizers
from holdfast.checkpoint.state.compatibility import ABSENT, Fit, fill
from holdfast.checkpoint.state.parameter_names import parameter_names
from holdfast.checkpoint.state.tensors import local
from holdfast.core.errors import StateMismatch

if TYPE_CHECKING:
    from holdfast.checkpoint.state.renaming import Rename, Renaming

_logger = logging.getLogger("holdfast")


@dataclass
class Terms:
    """Hold the options of one restore, and record the names that did not match.

    Attributes:
        strict: whether the state and the checkpoint must have the same names and types.
        rng: whether to restore the random generators.
        renaming: the name map for the tensors of `state`; None if the saved names are right.
        missing: names that only the state has; set by `restore_into`.
        unexpected: names that only the checkpoint has; set by `restore_into`.
    """

    strict: bool = True
    rng: bool = True
    renaming: "Renaming | None" = None
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def rename_by(self, rename: "Rename | None") -> None:
        """Set `renaming` from the user's `rename`; None leaves the names unchanged.

        Raises:
            BadUse: `rename` is not a valid name map.
        """
        if rename is not None:
            from holdfast.checkpoint.state.renaming import (
                Renaming,  # imported here, since few restores need the regular expressions
            )

            self.renaming = Renaming(rename)


def restore_into(
    ranks: Ranks,
    checkpoint: OpenCheckpoint,
    state: MutableMapping[str, Any],
    per_rank: MutableMapping[str, Any] | None,
    terms: Terms | None = None,
) -> str:
    """Restore a checkpoint into `state`, `per_rank` and the random generators of this process.

    Collective: all ranks must call this function.

    Returns:
        An empty string if the checkpoint was restored, else the reason why it could not be read.
        After a failed read, tensors of `state` may hold parts of the checkpoint.

    Raises:
        BadUse: `state` or `per_rank` is not a dict whose keys are strings, or a rule of the name
            map matches nothing.
        StateMismatch: the state does not fit the checkpoint. No rank's state has changed, unless
            the message states so.
        CheckpointError: reading the checkpoint would run code from its files.
    """
    same_world = checkpoint.manifest.world_size == ranks.world_size
    parts: list[StatePart] = []
    terms = terms or Terms()
    saved, renaming = checkpoint.metadata.state_dict_metadata, terms.renaming
    fit = Fit(saved, strict=terms.strict, transposed=renaming.transposed if renaming else ())
    rng_skeleton: dict[str, Any] = {}
    known: dict[str, Any] = {}
    loaded: dict[str, Any] = {}

    def read(*, plain: bool) -> str:
        wanted = {name: tensor for name, tensor in fit.wanted.items() if (tensor is None) == plain}
        return failing(lambda: loaded.update(checkpoint.read(wanted)))

    def begin() -> str:
        nonlocal rng_skeleton
        own = checkpoint.own(ranks.rank) if same_world else None
        shared = checkpoint.shared
        if renaming is not None:
            shared = renaming.skeleton(shared, lambda leaf: not fit.has_plain(leaf))
        parts.append(StatePart(state, shared, OPTIMIZERS, lost_empty=not checkpoint.has_structure))
        if per_rank is not None:
            if not same_world:
                raise _another_world(ranks, checkpoint)
            parts.append(
                StatePart(per_rank, own["user"] if own else {}, rank_optimizers(ranks.rank))
            )
        rng_skeleton = own["rng"] if own and terms.rng else {}
        leaves = [leaf for part in parts for leaf in part.plain_leaves() if fit.has_plain(leaf)]
        return failing(lambda: known.update(checkpoint.read(dict.fromkeys(leaves))))

    def look() -> None:
        names = parameter_names(*((part.entries, part.targets) for part in parts))
        for part, each in zip(parts, names, strict=True):
            part.arrange(fit, known, each, renaming.name if renaming else str)
            part.look(fit)
        for part in parts:
            part.adopt(fit)
        if rng_skeleton:
            fit.fit("rng", ABSENT, rng_skeleton)
        _check_fits(fit, checkpoint, parts)

    def prepare() -> str:
        """Take all steps that change no state; return the reason why a read failed."""
        if reason := begin():
            return reason
        look()
        # Read plain values before any tensor changes, since plain values may be rejected.
        reason = read(plain=True)
        if rng_skeleton and not reason:
            random_state.check(rng_skeleton, loaded)
        return reason

    for work in (prepare, functools.partial(read, plain=False)):
        if reason := next(filter(None, ranks.together(work)), ""):
            return reason

    def put() -> None:
        fit.convert(loaded)
        _check_same(fit, loaded)
        for part in parts:
            part.put(fit, loaded)
        if rng_skeleton:
            random_state.put_back(fill(ABSENT, rng_skeleton, loaded))

    ranks.together(put)
    terms.missing, terms.unexpected = tuple(fit.missing), tuple(fit.unexpected)
    if not rng_skeleton and terms.rng and ranks.rank == 0:
        _warn_rng_not_restored(ranks, checkpoint)
    return ""


def per_rank_states(checkpoint: OpenCheckpoint) -> list[dict[str, Any]]:
    """Read every rank's `per_rank` state, with tensors on the CPU. Not collective.

    Returns:
        The `per_rank` dict of each rank, by rank.

    Raises:
        CheckpointError: a part of the checkpoint cannot be read.
    """
    states = []
    for rank in range(checkpoint.manifest.world_size):
        own = checkpoint.own(rank)
        fit = Fit(checkpoint.metadata.state_dict_metadata)
        skeleton = own["user"] if own else {}
        fit.fit("per_rank", ABSENT, skeleton)
        states.append(fill({}, skeleton, checkpoint.read(fit.wanted)))
    return states


def _check_fits(fit: Fit, checkpoint: OpenCheckpoint, parts: Sequence[StatePart]) -> None:
    if fit.problems:
        absent = [
            name
            for part in parts
            for name, entry in part.entries.items()
            if isinstance(entry, Batches) and f"the checkpoint has no {name!r}" in fit.problems
        ]
        if absent and len(fit.problems) == len(absent):
            raise StateMismatch(
                f"{checkpoint.path} was saved without a position in the data: it has no "
                f"{absent[0]!r}. Restore it once with strict=False; the rest is restored, and the "
                "batches begin with the first epoch."
            )
        more = f", and {len(fit.problems) - 3} more" if len(fit.problems) > 3 else ""
        raise StateMismatch(
            f"The state does not fit {checkpoint.path}: {'; '.join(fit.problems[:3])}{more}. "
            "Build it with the same model and optimizer, or leave that entry out to restore the "
            "rest."
        )


def _warn_rng_not_restored(ranks: Ranks, checkpoint: OpenCheckpoint) -> None:
    why = "Checkpointer.save has not saved it"
    if checkpoint.manifest.world_size != ranks.world_size:
        why = f"it was saved by {checkpoint.manifest.world_size} ranks and is restored by {ranks.world_size}"
    _logger.warning("The random generators were not restored from %s: %s.", checkpoint.path, why)


def _check_same(fit: Fit, loaded: dict[str, Any]) -> None:
    """Check that saved tensors are equal if the live state has one tensor for them.

    Tied weights are an example.

    Raises:
        StateMismatch: the saved tensors differ.
    """
    for (name, flat), (other, beside) in fit.same:
        if not torch.equal(_bits(loaded[flat]), _bits(loaded[beside])):
            raise StateMismatch(
                f"{name!r} and {other!r} are one tensor in the state, and two that differ in the "
                "checkpoint. Untie them, as they were when it was saved; tensors of the state "
                "hold parts of it."
            )
        loaded[beside] = loaded[flat]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        local(tensor)
        .detach()
        .resolve_conj()
        .resolve_neg()
        .cpu()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
    )


def _another_world(ranks: Ranks, checkpoint: OpenCheckpoint) -> StateMismatch:
    step, saved_by = checkpoint.manifest.step, checkpoint.manifest.world_size
    return StateMismatch(
        f"{checkpoint.path} was saved by {saved_by} ranks and is restored by {ranks.world_size}, "
        "so per_rank cannot be restored. Restore without per_rank, read the parts of all saved "
        f"ranks from Checkpointer.per_rank_states({step}), and distribute them."
    )
