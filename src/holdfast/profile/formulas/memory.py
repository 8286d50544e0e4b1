"""Compute the bytes that training holds on each pipeline stage, by kind."""

from dataclasses import dataclass, replace

from holdfast.profile.formulas.pipeline import chunks_in_flight
from holdfast.profile.formulas.shape import Layout, Model

WEIGHT_BYTES = 2
"""Bytes of one weight in bf16."""
OPTIMIZER_BYTES = 12
"""Bytes of Adam's state per weight: fp32 weight, first and second moment, 4 bytes each."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Hold the peak memory of each GPU of a pipeline stage, in bytes by kind.

    The CUDA context, NCCL buffers, workspaces and fragmentation are not counted.
    """

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    output: float
    """The input of the output layer, and the logits of the loss. Only the last stage has them."""
    gathered: float
    """Two whole layers that ZeRO-3 gathers: the one in use and the prefetched next one."""
    in_flight: int
    """Forward passes of a model chunk that still await their backward pass."""

    @property
    def total(self) -> float:
        """Return the total bytes of all kinds."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, float]:
        """Return the bytes of each kind, in the order in which a chart stacks them."""
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
    """Return the bytes per parameter of weights, of gradients and of the optimizer state.

    bf16 with Adam takes 2 + 2 + 12 = 16 bytes (Rajbhandari et al., ZeRO, arXiv:1910.02054, section
    3.1). Megatron-LM keeps gradients in fp32, which makes 18 bytes. ZeRO divides parts of these
    bytes by the number of shards d:

    - Stage 1 divides the optimizer state: 4 + 12/d.
    - Stage 2 divides the gradients too: 2 + 14/d.
    - Stage 3 divides the weights too: 16/d.

    Megatron's distributed optimizer is stage 1 with fp32 gradients: 6 + 12/d.
    """
    gradient_bytes = 4 if fp32_gradients else 2
    return (
        WEIGHT_BYTES / (shards if zero >= 3 else 1),
        gradient_bytes / (shards if zero >= 2 else 1),
        OPTIMIZER_BYTES / (shards if zero >= 1 else 1),
    )


def activation_bytes_per_layer(model: Model, layout: Layout) -> float:
    """Return the bytes that one GPU keeps of one layer and microbatch for the backward pass.

    The formulas are from Korthikanti et al. (arXiv:2205.05198), table 2, with s tokens, b
    sequences, hidden size h, a heads, and t tensor-parallel ranks:

    - no parallelism: s·b·h·(34 + 5·a·s/h)
    - tensor parallel: s·b·h·(10 + 24/t + 5·a·s/(h·t))
    - tensor and sequence parallel: s·b·h/t·(34 + 5·a·s/h)
    - selective recompute: the same without the term that contains a
    - full recompute: 2·s·b·h

    The 24 holds for a feed-forward layer of inner size 4·h. For another inner size f it becomes 8 +
    4·f/h, as in Megatron-LM's `theoretical_memory_usage.py`.
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

    The formula is from Korthikanti et al. (arXiv:2205.05198), section 4.3, with a vocabulary of v
    tokens. Only the last stage holds these bytes.
    """
    sbh = layout.sequence * layout.microbatch * model.hidden
    return 4 * sbh * (1 + model.vocabulary / model.hidden) / layout.tensor


def stage_parameters(model: Model, layout: Layout, stage: int) -> float:
    """Return the number of parameters on one GPU of a stage, before ZeRO shards them.

    The first stage holds the input embedding, the last stage the output layer. Both hold a copy if
    the two share weights.
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
    """Return the peak memory of each GPU of a pipeline stage.

    For each forward pass in flight (`pipeline.chunks_in_flight`), a stage holds the activations of
    L/(p·v) layers: L layers over p stages with v model chunks each.

    Raises:
        ValueError: the layout has no such stage.
    """
    in_flight = chunks_in_flight(stage, layout.pipeline, layout.microbatches, layout.chunks)
    parameters = stage_parameters(model, layout, stage)
    weights, gradients, optimizer = state_bytes_per_parameter(
        zero=layout.zero, shards=layout.shard_count, fp32_gradients=layout.fp32_gradients
    )
    layers_a_chunk = model.layers / (layout.pipeline * layout.chunks)
    activations = in_flight * layers_a_chunk * activation_bytes_per_layer(model, layout)
    if layout.recompute == "full":
        # A layer that is being recomputed holds all of its activations for a moment.
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
