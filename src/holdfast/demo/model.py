"""Define a small GPT with learned positions, pre-norm blocks and causal attention.

It has the shape and initialisation of GPT-2 (Radford et al. 2019), but the output layer does not
share its weights with the embedding.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its name in every PyTorch program


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Hold the sizes of a GPT, such as `width` of the residual stream and `context` in tokens."""

    vocabulary_size: int = 256
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for field in ("vocabulary_size", "context", "layers", "heads", "width"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: give at least 1")
        if self.width % self.heads:
            raise ValueError(
                f"width is {self.width}: give a multiple of heads, which is {self.heads}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}: give at least 0 and less than 1")


class Attention(nn.Module):
    """Compute causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor of shape (batch, tokens, width) to one of the same shape."""
        batch, tokens, width = x.shape
        split = self.query_key_value(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(
            2, 0, 3, 1, 4
        )  # each (batch, heads, tokens, width / heads)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return output


class Block(nn.Module):
    """Apply attention, then a two-layer perceptron.

    Each is preceded by a normalisation, and its output is added to the residual stream.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map a tensor of shape (batch, tokens, width) to one of the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        change: Tensor = self.dropout(self.mlp(self.mlp_norm(x)))
        return x + change


class GPT(nn.Module):
    """Predict, at each position, the token that follows."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        self._initialise(config.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the next tokens.

        Args:
            tokens: int64 of shape (batch, tokens).

        Returns:
            The logits, of shape (batch, tokens, vocabulary).
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def _initialise(self, layers: int) -> None:
        """Draw the weights from a normal distribution with a standard deviation of 0.02.

        The weights of layers that add to the residual stream are scaled by 1/√(number of
        additions).
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.2.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
