"""List the tensors of a Hugging Face model, and read its configuration and tokenizer files."""

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from holdfast.checkpoint.state.name_map import Shape
from holdfast.core.errors import BadUse, NotFound

HF_CONFIG_NAME = "config.json"
HF_INDEX_NAME = "model.safetensors.index.json"
HF_WEIGHTS_NAME = "model.safetensors"
SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm")
_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, kw_only=True)
class ModelTensors:
    """List the tensors of a model.

    Attributes:
        shapes: the shape of each tensor, by name; a tied tensor appears under each of its names.
        ties: groups of names that refer to the same tensor.
    """

    shapes: dict[str, Shape]
    ties: list[list[str]]


def expected_tensors(hf_config: Path) -> ModelTensors:
    """List the tensors of the model that `config.json` in a folder describes.

    No memory is allocated for the tensors.

    Raises:
        NotFound: there is no such folder, or no configuration in it.
        BadUse: transformers does not support the model, or only by running code of the folder.
    """
    if not (hf_config / HF_CONFIG_NAME).is_file():
        raise NotFound(
            f"There is no {HF_CONFIG_NAME} in {hf_config}. Give the folder with the model's "
            "configuration."
        )
    try:
        import torch
        import transformers
    except ImportError as error:
        raise BadUse(
            f"{error.name} is not installed. Install it with: pip install 'holdfast[eval]'."
        ) from error
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # hide warnings, such as about token ids of a missing tokenizer
    try:
        config = transformers.AutoConfig.from_pretrained(
            hf_config, trust_remote_code=False, local_files_only=True
        )
        named = (getattr(config, "architectures", None) or [""])[0]
        architecture = getattr(transformers, named, transformers.AutoModelForCausalLM)
        make = getattr(architecture, "_from_config", None) or architecture.from_config
        with torch.device("meta"):
            model = make(config)
    except Exception as error:  # a foreign configuration may raise any error
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BadUse(
            f"transformers cannot make a model of {hf_config / HF_CONFIG_NAME}: "
            f"{lines[0].rstrip('.')}. Give the configuration of a model that is "
            "built into transformers."
        ) from error
    finally:
        logger.setLevel(level)
    tensors = model.state_dict(keep_vars=True)
    alike: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault(id(tensor), []).append(name)
    return ModelTensors(
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        ties=[group for group in alike.values() if len(group) > 1],
    )


def is_hf_small_file(path: str) -> bool:
    """Return True if a file is a configuration, tokenizer or chat template.

    Such files are copied together with weights. Code (`.py`) is not copied, because code that comes
    with a model is never run.
    """
    pure = PurePosixPath(path)
    beside = pure.parts[:-1] in ((), (_TEMPLATES,))
    # An index of other weights (pytorch_model.bin.index.json) is left out, since it would name
    # files that are not copied.
    return (
        beside
        and path.endswith(SMALL_SUFFIXES)
        and not pure.name.startswith(".")
        and not path.endswith(".index.json")
    )


def hf_small_files(hf_config: Path) -> dict[str, bytes]:
    """Read the files of a folder for which `is_hf_small_file` is True.

    Returns:
        The content of each file, by its path relative to the folder.

    Raises:
        OSError: a file cannot be read.
    """
    found = (Path(root, name) for root, _, names in os.walk(hf_config) for name in names)
    paths = {file.relative_to(hf_config).as_posix(): file for file in found}
    return {path: paths[path].read_bytes() for path in sorted(paths) if is_hf_small_file(path)}


def write_hf_small_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files that `hf_small_files` has read into another folder.

    Raises:
        OSError: a file cannot be written.
    """
    for path, content in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)


def conversion_command(checkpoint: Path, folder: Path) -> list[str]:
    """Return a command that converts a checkpoint to safetensors, for callers without torch.

    The process reads the plan (`Conversion.as_text`) from standard input. It prints an error as one
    line on standard error.

    Args:
        checkpoint: the folder of the checkpoint. Only the byte ranges that the plan names are read,
            so the other bytes need not be there.
        folder: the folder for the weight files.
    """
    return [
        sys.executable,
        "-m",
        "holdfast.checkpoint.convert.safetensors",
        *map(str, (checkpoint, folder)),
    ]
