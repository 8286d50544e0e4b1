"""Compute the bytes that training holds on each pipeline stage, by kind."""

from dataclasses import dataclass, replace

from holdfast.profile.formulas.pipeline import chunks_in_flight
from holdfast.profile.formulas.shape import Layout, Model

WEIGHT_BYTES = 2
"""bf16."""
OPTIMIZER_BYTES = 12
"""Adam: fp32 weights, first and second moments, 4 bytes each."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Hold the bytes that each GPU of a pipeline stage holds at its fullest.

    Not counted: the CUDA context, buffers of NCCL, workspaces, fragmentation.
    """

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    output: float
    """Input of the output layer, and the loss; the last stage alone has them."""
    gathered: float
    """Two whole layers that ZeRO-3 gathers, one in use and one on its way."""
    in_flight: int
    """Forward passes of a model chunk that wait for their backward pass."""

    @property
    def total(self) -> float:
        """Return the bytes of all kinds."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, float]:
        """Return the bytes of each kind, in the order of drawing."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "gathered": self.gathered,
            "activations": self.activations,
            "output": self.output,
        }


def state_bytes_per_parameter(
    *, zero: int = 0, shards: int = 1, fp32_gradients: bool = False
) -> tuple[float, float, float]:
    """Return the bytes a parameter of weights, gradients and optimizer.

    bf16 and Adam hold 2 + 2 + 12 = 16 (Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3.1).
    Megatron-LM keeps gradients in fp32: 18. ZeRO divides by the shards d the optimizer (stage 1:
    4 + 12/d), the gradients too (stage 2: 2 + 14/d), the weights too (stage 3: 16/d). Megatron's
    distributed optimizer is stage 1 with fp32 gradients: 6 + 12/d.
    """
    gradient_bytes = 4 if fp32_gradients else 2
    return (
        WEIGHT_BYTES / (shards if zero >= 3 else 1),
        gradient_bytes / (shards if zero >= 2 else 1),
        OPTIMIZER_BYTES / (shards if zero >= 1 else 1),
    )


def activation_bytes_per_layer(model: Model, layout: Layout) -> float:
    """Return the bytes that one layer of one microbatch keeps for the backward pass, on one GPU.

    Korthikanti et al. (arXiv:2205.05198), table 2, with s tokens, b sequences, h hidden, a heads,
    t tensor-parallel: none: s·b·h·(34 + 5·a·s/h); tensor parallel: s·b·h·(10 + 24/t +
    5·a·s/(h·t)); with sequence parallel: s·b·h/t·(34 + 5·a·s/h); selective recompute drops the
    term of a; full recompute keeps 2·s·b·h. The 24 is 8 + 4·f/h with an inner size f of the
    feed-forward layer other than 4·h, as in Megatron-LM's `theoretical_memory_usage.py`.
    """
    sbh = layout.sequence * layout.microbatch * model.hidden
    if layout.recompute == "full":
        return 2.0 * sbh
    tensor = layout.tensor
    split = 8 + 4 * model.ffn_size / model.hidden
    if layout.recompute == "none":
        split += 5 * model.heads * layout.sequence / model.hidden
    whole = 10 / (tensor if layout.sequence_parallel else 1)
    return sbh * (whole + split / tensor)


def output_bytes(model: Model, layout: Layout) -> float:
    """Return the bytes of the output layer's input and of the logits: 4·s·b·h·(1 + v/h)/t.

    Korthikanti et al. (arXiv:2205.05198), section 4.3, with a vocabulary of v. The last stage
    alone holds them.
    """
    sbh = layout.sequence * layout.microbatch * model.hidden
    return 4 * sbh * (1 + model.vocabulary / model.hidden) / layout.tensor


def stage_parameters(model: Model, layout: Layout, stage: int) -> float:
    """Return the parameters on one GPU of a stage, before ZeRO shards them.

    The first stage has the input embedding, the last one the output layer. Tied weights are on
    both.
    """
    last = layout.pipeline - 1
    whole = model.layers / layout.pipeline * model.layer_parameters
    if stage == 0:
        whole += model.embedding_parameters
    if stage == last:
        whole += model.hidden
        if not model.tied or last > 0:
            whole += model.embedding_parameters
    return whole / layout.tensor


def stage_memory(model: Model, layout: Layout, stage: int) -> StageMemory:
    """Return the bytes on each GPU of a pipeline stage at its fullest.

    A stage holds L/(p·v) layers of each forward pass in flight (`pipeline.chunks_in_flight`).

    Raises:
        ValueError: the stage is not one of the layout's.
    """
    in_flight = chunks_in_flight(stage, layout.pipeline, layout.microbatches, layout.chunks)
    parameters = stage_parameters(model, layout, stage)
    weights, gradients, optimizer = state_bytes_per_parameter(
        zero=layout.zero, shards=layout.shard_count, fp32_gradients=layout.fp32_gradients
    )
    layers_a_chunk = model.layers / (layout.pipeline * layout.chunks)
    activations = in_flight * layers_a_chunk * activation_bytes_per_layer(model, layout)
    if layout.recompute == "full":
        # The layer that is computed again holds all of its activations for a moment.
        activations += _whole_layer(model, layout)
    gathered = (
        2 * WEIGHT_BYTES * model.layer_parameters / layout.tensor if layout.zero == 3 else 0.0
    )
    return StageMemory(
        stage=stage,
        weights=weights * parameters,
        gradients=gradients * parameters,
        optimizer=optimizer * parameters,
        activations=activations,
        output=output_bytes(model, layout) if stage == layout.pipeline - 1 else 0.0,
        gathered=gathered,
        in_flight=in_flight,
    )


def _whole_layer(model: Model, layout: Layout) -> float:
    return activation_bytes_per_layer(model, replace(layout, recompute="selective"))
