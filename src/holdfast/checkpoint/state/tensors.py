"""Find this process's part of a tensor, and test whether its bytes can be copied as one block."""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is in this process's memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def part_of(leaf: Any, index: MetadataIndex) -> torch.Tensor:
    """Return the part of a tensor that this rank writes for the saved item `index`."""
    if isinstance(leaf, DTensor):
        local: torch.Tensor = leaf.to_local()
        return local
    found: torch.Tensor = find_state_dict_object({index.fqn: leaf}, index)
    return found


def is_in_a_row(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's bytes can be copied as one block.

    The bytes must be contiguous and 8-byte aligned. The tensor must not be lazily conjugated or
    negated, because its stored bytes then differ from its values.
    """
    address = tensor.data_ptr()  # 0 for a tensor that wraps other tensors
    return (
        address != 0
        and address % 8 == 0
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )
