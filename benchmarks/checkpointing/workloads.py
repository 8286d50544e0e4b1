"""Define the trained models: a usual one, and very many small tensors, on one thread."""

import time
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name in every PyTorch program
from torch.utils import _pytree

HEAD_WIDTH = 64
CONTEXT = 1024
"""The most tokens in one pass of the model; gradients of more are added up."""


class Workload(Protocol):
    """A training with a state; a step is forward and backward, then an update of the state."""

    state: dict[str, Any]
    """The state that a script passes to Holdfast."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a script passes to the peers."""
        ...

    def forward_backward(self, amount: int) -> float:
        """Compute forward and backward; leave the state alone.

        Returns:
            The longest pause of this thread in seconds; 0 if unknown.
        """
        ...

    def update(self) -> None:
        """Change the state."""
        ...

    def settle(self) -> None:
        """Wait until the device has finished its work."""
        ...


class Layer(nn.Module):
    """Attention and a gated MLP: nine tensors."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        normed = self.norms[0](hidden)
        query, key, value = (
            one(normed).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for one in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(-2))
        normed = self.norms[1](hidden)
        added: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return hidden + added


class Llama:
    """A model of Llama's shape with fp32 AdamW, 12 bytes per parameter.

    The amount of work is tokens.
    """

    def __init__(
        self, *, layers: int, width: int, inner: int, vocabulary: int, device: str = "cpu"
    ) -> None:
        _one_thread()
        with torch.device(device):
            self._embedding = nn.Embedding(vocabulary, width)
            self._model = nn.Sequential(
                self._embedding,
                *(Layer(width, inner) for _ in range(layers)),
                nn.RMSNorm(width),
                nn.Linear(width, vocabulary, bias=False),
            )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._device = torch.device(device)
        self.state: dict[str, Any] = {"model": self._model, "optimizer": self._optimizer}
        self.forward_backward(1)
        self.update()  # makes the moments

    def state_dict(self) -> dict[str, Any]:
        """See `Workload`."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def forward_backward(self, amount: int) -> float:
        """See `Workload`."""
        self._optimizer.zero_grad()
        for first in range(0, amount, CONTEXT):
            count = min(CONTEXT, amount - first)
            tokens = torch.randint(
                self._embedding.num_embeddings, (1, count + 1), device=self._device
            )
            logits = self._model(tokens[:, :-1])
            torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        return 0.0

    def update(self) -> None:
        """See `Workload`."""
        self._optimizer.step()

    def settle(self) -> None:
        """See `Workload`."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


class ManyTensors:
    """Many tensors of equal size, such as experts, with an optimizer without moments.

    The amount of work is operations so small that Python's own time decides.
    """

    def __init__(self, *, count: int, tensor_bytes: int) -> None:
        _one_thread()
        tensors = {f"expert{number}": torch.randn(tensor_bytes // 4) for number in range(count)}
        self.state: dict[str, Any] = {"model": tensors}
        self.tensors = list(tensors.values())
        parameters = [nn.Parameter(tensor) for tensor in self.tensors]
        gradient = torch.ones(tensor_bytes // 4)
        for parameter in parameters:
            parameter.grad = gradient
        self._optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=True)
        self._small = torch.ones(64)

    def state_dict(self) -> dict[str, Any]:
        """See `Workload`."""
        return self.state

    def forward_backward(self, amount: int) -> float:
        """See `Workload`."""
        longest_s, before_s = 0.0, time.perf_counter()
        for _ in range(amount):
            self._small = torch.tanh(self._small + 0.5)
            now_s = time.perf_counter()
            longest_s, before_s = max(longest_s, now_s - before_s), now_s
        return longest_s

    def update(self) -> None:
        """See `Workload`."""
        self._optimizer.step()

    def settle(self) -> None:
        """See `Workload`."""


WORKLOADS: dict[str, type[Llama | ManyTensors]] = {"llama": Llama, "many": ManyTensors}


def size_bytes(workload: Workload) -> int:
    """Return the size of a workload's state: all tensors together."""
    leaves = _pytree.tree_leaves(workload.state_dict())
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def _one_thread() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
