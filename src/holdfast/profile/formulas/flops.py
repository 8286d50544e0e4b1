"""Compute FLOPs per token, MFU and HFU.

Peaks come from the vendors' data sheets or from the user. No peak is guessed.
"""

import re
from dataclasses import dataclass
from typing import Final

from holdfast.core.errors import BadUse
from holdfast.profile.formulas.shape import Model, Recompute

PEAK_TFLOPS: Final[tuple[tuple[str, str, float], ...]] = (
    # Name, pattern of the device name that the driver reports, dense BF16 TFLOP/s from the vendor's
    # data sheet. The first match counts, so a narrower pattern stands above a wider one.
    ("H100 NVL", r"\bH100\b.*\bNVL\b", 835),
    ("H100 PCIe", r"\bH100\b.*\bPCIe\b", 756),
    ("H100 SXM", r"\bH100\b.*(\bSXM|\bHBM3\b)", 989),
    ("H200", r"\bH200\b(?!.*\bNVL\b)", 989),
    ("H20", r"\bH20\b", 148),
    ("GB300", r"\bGB300\b", 2500),
    ("GB200", r"\bGB200\b", 2500),
    ("B300", r"\bB300\b", 2250),
    ("B200", r"\bB200\b", 2250),
    ("A100", r"\bA100\b", 312),
    ("A6000", r"\bRTX A6000\b", 154.85),
    ("L40S", r"\bL40S\b", 362),
    ("MI250X, one die", r"\bMI250X\b", 191.5),
    ("MI300X", r"\bMI300X\b", 1300),
    ("MI325X", r"\bMI325X\b", 1300),
    ("MI355X", r"\bMI355X\b", 2500),
)


@dataclass(frozen=True)
class Peak:
    """Hold a GPU's peak throughput and the source of the number."""

    tflops: float
    """Dense BF16 throughput of one GPU, in TFLOP/s."""
    source: str


def peak_of(device: str | None, stated_tflops: float | None = None) -> Peak:
    """Return the peak throughput of a GPU.

    The peak is `stated_tflops` if given, else the vendor's number for the device name.

    Args:
        device: the device name that the driver reports; None if unknown.
        stated_tflops: dense TFLOP/s that the user states, in the precision of the job.

    Raises:
        BadUse: no peak is stated, and the table has no peak for the device. MIG slices and
            virtual GPUs are not in the table.
    """
    if stated_tflops is not None:
        if not stated_tflops > 0:
            raise BadUse(f"The peak is {stated_tflops} TFLOP/s. Give a number above 0.")
        return Peak(stated_tflops, "stated by the user")
    step = "State the peak: --peak-tflops, or gpu.peak_tflops in the job's file."
    if not device:
        raise BadUse(f"The name of the GPU is not stated, so there is no peak. {step}")
    if re.search(r"\bMIG\b|^GRID\b|-\d+[ABCQ]$", device, re.IGNORECASE):
        raise BadUse(f"{device} is a part of a GPU, which has less than the whole peak. {step}")
    for name, pattern, tflops in PEAK_TFLOPS:
        if re.search(pattern, device, re.IGNORECASE):
            return Peak(float(tflops), f"the vendor's data sheet for {name}, dense BF16")
    raise BadUse(f"{device} is not in the table of peaks. {step}")


def flops_per_token(model: Model, sequence: int, *, causal: bool) -> float:
    """Return the model's FLOPs for one token, forward and backward.

    6·N + 12·L·H·Q·T (PaLM, arXiv:2204.02311, appendix B). N is `Model.matmul_parameters`, L the
    number of layers, H the number of heads, Q the size of a head, T the sequence length. The
    attention term counts each pair of tokens. With `causal` the term is halved, as in Megatron-LM,
    because a token attends to no later token.

    Args:
        model: the model's shape.
        sequence: tokens per sequence.
        causal: True halves the attention term.
    """
    attention = _attention_flops(model, sequence, causal=causal)
    return 6.0 * model.matmul_parameters + attention


def hardware_flops_per_token(
    model: Model, sequence: int, *, causal: bool, recompute: Recompute
) -> float:
    """Return the FLOPs that the hardware executes for one token, including recomputation.

    HFU divides these FLOPs by the peak (PaLM, arXiv:2204.02311, appendix B). A forward pass is a
    third of forward and backward together. Recompute `full` runs the forward pass a second time for
    the whole model, `selective` only for the attention matrices.
    """
    model_flops = flops_per_token(model, sequence, causal=causal)
    again = {
        "none": 0.0,
        "selective": _attention_flops(model, sequence, causal=causal),
        "full": model_flops,
    }[recompute]
    return model_flops + again / 3


def utilization(flops_a_token: float, tokens_per_s_per_gpu: float, peak_tflops: float) -> float:
    """Return MFU or HFU as a share of the peak, from 0 to 1.

    FLOPs per token times tokens per second and GPU, divided by the peak (PaLM, arXiv:2204.02311,
    appendix B).
    """
    return flops_a_token * tokens_per_s_per_gpu / (peak_tflops * 1e12)


def _attention_flops(model: Model, sequence: int, *, causal: bool) -> float:
    whole = 12.0 * model.layers * model.attention_size * sequence
    return whole / 2 if causal else whole
