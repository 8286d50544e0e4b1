"""Compare the final weights of two runs to the last bit, after loading them with plain PyTorch."""

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from holdfast.demo.corpus import VOCABULARY_SIZE
from holdfast.demo.model import GPT, GPTConfig


def final_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load the model's weights from a checkpoint with PyTorch's `dcp.load`, not with Holdfast."""
    state: dict[str, Any] = {"model": GPT(GPTConfig(vocabulary_size=VOCABULARY_SIZE)).state_dict()}
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled"
        )  # expected, since this is a single process
        dcp.load(state, checkpoint_id=checkpoint)  # type: ignore[attr-defined]  # public, but not declared so
    weights: dict[str, torch.Tensor] = state["model"]
    return weights


def compare(checkpoint: Path, reference: Path) -> dict[str, Any]:
    """Return the hashes of both runs' weights, and whether they are equal, for the ledger."""
    ours, theirs = final_weights(checkpoint), final_weights(reference)
    return {
        "tensors": len(ours),
        "bytes": sum(tensor.nbytes for tensor in ours.values()),
        "sha256": _sha256(ours),
        "reference_sha256": _sha256(theirs),
        "identical": list(ours) == list(theirs)
        and all(_same_bits(ours[name], theirs[name]) for name in ours),
        "loaded_with": f"torch.distributed.checkpoint.load of torch {torch.__version__}",
        "checkpoint": str(checkpoint),
        "reference_checkpoint": str(reference),
    }


def _sha256(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Bytes, not values: -0.0 equals 0.0 and NaN does not equal itself.
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()
