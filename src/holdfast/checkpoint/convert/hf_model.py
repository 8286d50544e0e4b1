"""What a Hugging Face folder says of a model: its tensors, by the configuration, and the small files beside them."""

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
    """`shapes`: name to shape, tied ones under every name. `ties`: groups of names that are one tensor."""

    shapes: dict[str, Shape]
    ties: list[list[str]]


def expected_tensors(hf_config: Path) -> ModelTensors:
    """The tensors of the model that `config.json` of a folder describes, without memory for any of them.

    Raises:
        NotFound: there is no such folder, or no configuration in it.
        BadUse: transformers knows no such model, or only by running code that the folder brings.
    """
    if not (hf_config / HF_CONFIG_NAME).is_file():
        raise NotFound(
            f"There is no {HF_CONFIG_NAME} in {hf_config}. Give the folder with the model's configuration."
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
    logger.setLevel(logging.ERROR)  # token ids of a tokenizer that is not at hand, and the like
    try:
        config = transformers.AutoConfig.from_pretrained(
            hf_config, trust_remote_code=False, local_files_only=True
        )
        named = (getattr(config, "architectures", None) or [""])[0]
        architecture = getattr(transformers, named, transformers.AutoModelForCausalLM)
        make = getattr(architecture, "_from_config", None) or architecture.from_config
        with torch.device("meta"):
            model = make(config)
    except Exception as error:  # a configuration from outside may make anything fail
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise BadUse(
            f"transformers cannot make a model of {hf_config / HF_CONFIG_NAME}: {lines[0].rstrip('.')}. Give the "
            "configuration of a model that the installed transformers knows by itself."
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
    """Whether a file of such a folder is kept beside the weights: configuration, tokenizer, chat templates.

    Code (`.py`) is not: nothing that comes with a model is run.
    """
    pure = PurePosixPath(path)
    beside = pure.parts[:-1] in ((), (_TEMPLATES,))
    # The index of other weights (pytorch_model.bin.index.json) would lead readers to files that are not there.
    return (
        beside
        and path.endswith(SMALL_SUFFIXES)
        and not pure.name.startswith(".")
        and not path.endswith(".index.json")
    )


def hf_small_files(hf_config: Path) -> dict[str, bytes]:
    """The small files of a folder, path to content.

    Raises:
        OSError: one cannot be read.
    """
    found = (Path(root, name) for root, _, names in os.walk(hf_config) for name in names)
    paths = {file.relative_to(hf_config).as_posix(): file for file in found}
    return {path: paths[path].read_bytes() for path in sorted(paths) if is_hf_small_file(path)}


def write_hf_small_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write them into a folder.

    Raises:
        OSError: one cannot be written.
    """
    for path, content in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(content)


def conversion_command(checkpoint: Path, folder: Path) -> list[str]:
    """Return the command of a process that converts a DCP checkpoint to safetensors, for callers without torch.

    The process reads the settled conversion (`Conversion.as_text`) from its standard input, and prints an error as one
    line on standard error.

    Args:
        checkpoint: the folder of the checkpoint, which needs to hold only the ranges that the conversion names.
        folder: the folder that the files of weights are written to.
    """
    return [
        sys.executable,
        "-m",
        "holdfast.checkpoint.convert.safetensors",
        *map(str, (checkpoint, folder)),
    ]
