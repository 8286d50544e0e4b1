"""What is trained: a model of the usual shape, and very many small tensors. Torch is set to one thread."""

import time
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name in every PyTorch program
from torch.utils import _pytree

HEAD_WIDTH = 64
CONTEXT = 1024
"""Tokens that go through the model at once, at most; gradients of more are added up."""


class Workload(Protocol):
    """Something with a state, whose step is forward and backward, then an update of that state."""

    state: dict[str, Any]
    """As a script gives it to Holdfast."""

    def state_dict(self) -> dict[str, Any]:
        """As a script gives it to the peers."""
        ...

    def forward_backward(self, amount: int) -> float:
        """So much work; leaves the state alone.

        Returns:
            The longest time, in s, between two moments at which this thread went on; 0 where that is not told.
        """
        ...

    def update(self) -> None:
        """Change the state."""
        ...

    def settle(self) -> None:
        """Wait until what was started on a device is done."""
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
        """(batch, tokens, width) to the same."""
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
    """A model of Llama's shape and fp32 AdamW: 12 bytes a parameter; the amount of work is tokens."""

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
    """Many tensors of equal size, such as the experts of a model, which an optimizer without moments updates.

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
    """Of its state: all tensors together."""
    leaves = _pytree.tree_leaves(workload.state_dict())
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


def _one_thread() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
