"""Read a Hugging Face model folder: the tensors by its configuration, and the small files."""

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
    """The tensors of a model.

    Attributes:
        shapes: name to shape; a tied tensor appears under every name.
        ties: groups of names that are one tensor.
    """

    shapes: dict[str, Shape]
    ties: list[list[str]]


def expected_tensors(hf_config: Path) -> ModelTensors:
    """Return the tensors of the model in a folder's `config.json`, without memory for any of them.

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
            f"{lines[0].rstrip('.')}. Give the configuration of a model that the installed "
            "transformers knows by itself."
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
    """Return whether a file is a configuration, tokenizer or chat template, to keep with weights.

    Code (`.py`) is not kept: no code that comes with a model is run.
    """
    pure = PurePosixPath(path)
    beside = pure.parts[:-1] in ((), (_TEMPLATES,))
    # The index of other weights (pytorch_model.bin.index.json) would name files that are not kept.
    return (
        beside
        and path.endswith(SMALL_SUFFIXES)
        and not pure.name.startswith(".")
        and not path.endswith(".index.json")
    )


def hf_small_files(hf_config: Path) -> dict[str, bytes]:
    """Read the small files of a folder: path to content.

    Raises:
        OSError: a file cannot be read.
    """
    found = (Path(root, name) for root, _, names in os.walk(hf_config) for name in names)
    paths = {file.relative_to(hf_config).as_posix(): file for file in found}
    return {path: paths[path].read_bytes() for path in sorted(paths) if is_hf_small_file(path)}


def write_hf_small_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write the small files into a folder.

    Raises:
        OSError: a file cannot be written.
    """
    for path, content in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)


def conversion_command(checkpoint: Path, folder: Path) -> list[str]:
    """Return the command that converts a DCP checkpoint to safetensors, for callers without torch.

    The process reads the conversion (`Conversion.as_text`) from standard input, and prints an error
    as one line on standard error.

    Args:
        checkpoint: the folder of the checkpoint; only the byte ranges that the conversion names are
            read.
        folder: the folder for the weight files.
    """
    return [
        sys.executable,
        "-m",
        "holdfast.checkpoint.convert.safetensors",
        *map(str, (checkpoint, folder)),
    ]
