"""Identify everything about a node that the last bits of an engine's answers may depend on.

On two nodes of equal kind, engines of the kind `hf` have equal numerics. The kind is computed in
milliseconds, without importing torch.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.cluster import core_count

_VARIABLES = (
    "ATEN_", "CUBLAS", "CUDA", "CUDNN", "DNNL_", "HF_", "KMP_", "LD_", "MKL", "NVIDIA_",
    "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONPATH", "PYTORCH", "SAFETENSORS", "TOKENIZERS_",
    "TORCH", "TRANSFORMERS_",
)  # fmt: skip
"""Prefixes of the environment variables that torch and its libraries read."""


def node_kind(
    environment: Mapping[str, str] | None = None,
    search_path: Iterable[str] | None = None,
    root: Path = Path("/"),
) -> str:
    """Return a digest of this node's processor, GPUs, packages and environment variables.

    Args:
        environment: the environment variables of the engines; None for this process's own.
        search_path: the folders of packages; None for `sys.path`.
        root: the folder that contains `proc` and `dev`.

    Returns:
        The digest; an empty string if the node has an accelerator whose model cannot be read.
    """
    environment = os.environ if environment is None else environment
    gpus = _gpus(root)
    if gpus is None:
        return ""
    said = {
        "python": sys.version,
        "machine": platform.machine(),
        "processor": _processor(root / "proc/cpuinfo"),
        "cores": core_count(),
        "gpus": gpus,
        "packages": sorted(_packages(sys.path if search_path is None else search_path)),
        "environment": sorted(
            f"{name}={value}" for name, value in environment.items() if name.startswith(_VARIABLES)
        ),
    }
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()


def _processor(cpuinfo: Path) -> list[str]:
    """Return the lines with model and instruction sets of the first processor."""
    try:
        lines = cpuinfo.read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    kept = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return [line for line in lines if line.startswith(kept)]


def _gpus(root: Path) -> list[str] | None:
    """Return the driver's version and the models of the NVIDIA GPUs.

    Return None if there is a GPU whose model cannot be read.
    """
    devices = [
        path
        for path in (root / "dev").glob("nvidia[0-9]*")
        if path.name.removeprefix("nvidia").isdigit()
    ]
    if (root / "dev/kfd").exists():  # AMD's GPUs
        return None
    driver = root / "proc/driver/nvidia"
    try:
        cards = [
            line
            for path in sorted(driver.glob("gpus/*/information"))
            for line in path.read_text(errors="replace").splitlines()
            if line.startswith("Model")
        ]
        version = (driver / "version").read_text(errors="replace") if devices else ""
    except OSError:
        return None
    return None if len(cards) < len(devices) else [version, *cards]


def _packages(search_path: Iterable[str]) -> set[str]:
    """Return the installed packages, as the names of their `.dist-info` folders with versions."""
    found = set[str]()
    for folder in search_path:
        try:
            found |= {path.name for path in Path(folder).iterdir() if path.suffix == ".dist-info"}
        except OSError:  # a zip file, or a folder that does not exist
            continue
    return found
