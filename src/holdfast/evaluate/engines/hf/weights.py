"""Load the weights of a Hugging Face folder as lm-eval does, or copy them into a running model.

Only safetensors files are read, since a pickle file can run code.
"""

import json
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.hf.adapter import has_adapter, with_adapter
from holdfast.evaluate.engines.safetensors_files import tensors_of
from holdfast.evaluate.types.engine import EngineSpec, SwapRefused

_NO_LIMIT = int(1e30)  # transformers' value for a tokenizer without a limit
_DEFAULT_LENGTH = 2048
_ADAPTER_STAYS = "A PEFT adapter cannot be swapped in place."
_NOT_OF_THE_MODEL = {"_name_or_path", "transformers_version"}


def load_model(folder: Path, spec: EngineSpec, device: torch.device) -> Any:
    """Load a folder's model and its adapter, by the calls that lm-eval's HFLM makes (0.4.13).

    Raises:
        BadUse: the folder is not a causal language model, its weights are not safetensors, or its
            adapter cannot be applied.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    tensors_of(folder)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=spec.dtype if spec.dtype == "auto" else getattr(torch, spec.dtype),
            trust_remote_code=False,
            use_safetensors=True,
            **({"device_map": {"": str(device)}} if device.type != "cpu" else {}),
        )
    except (OSError, ValueError, AttributeError) as error:
        raise BadUse(f"transformers cannot run the model in {folder}: {error}") from error
    if has_adapter(folder):
        model = with_adapter(model, folder, load_tokenizer(folder))
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder, as lm-eval does.

    Raises:
        BadUse: there is no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, use_fast=True)
    except (OSError, ValueError) as error:
        raise BadUse(f"{folder} has no tokenizer that transformers can load: {error}") from error


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder's tokenizer by name, to compare two folders."""
    names = (
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
    )
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def max_length_of(config: Any, tokenizer: Any) -> int:
    """Return the largest number of tokens of a model.

    The rules are the same as in lm_eval.models.utils.resolve_max_length (0.4.13).
    """
    text = getattr(config, "text_config", None) or config
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if (value := getattr(text, name, None)) is not None:
            return int(value)
    limit = getattr(tokenizer, "model_max_length", None)
    return int(limit) if limit is not None and limit < _NO_LIMIT else _DEFAULT_LENGTH


class Swapper:
    """Replace the weights of a running model.

    A swapper is created while the model still has the weights of `folder`.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self._model = model
        self._why_not = ""
        if has_adapter(folder):
            self._why_not = _ADAPTER_STAYS
            return
        self._configs = _configs_of(folder)
        self._kinds = {name: place.kind() for name, place in tensors_of(folder).items()}
        self._targets, self._why_not = _targets(model, self._kinds)

    @torch.inference_mode()
    def swap(self, folder: Path) -> None:
        """Copy the weights of a folder into the model, after checking that all of them fit.

        Raises:
            SwapRefused: the weights do not fit; the model is unchanged.
        """
        from safetensors import safe_open

        if self._why_not or has_adapter(folder):
            raise SwapRefused(self._why_not or _ADAPTER_STAYS)
        try:
            places, configs = tensors_of(folder), _configs_of(folder)
        except BadUse as error:
            raise SwapRefused(str(error)) from error
        self._check(folder, {name: place.kind() for name, place in places.items()}, configs)
        for path in sorted({place.path for place in places.values()}):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if (target := self._targets.get(name)) is not None:
                        target.copy_(file.get_tensor(name))

    def _check(
        self, folder: Path, kinds: dict[str, tuple[str, tuple[int, ...]]], configs: dict[str, Any]
    ) -> None:
        for name in sorted(kinds.keys() | self._kinds.keys()):
            new, old = kinds.get(name), self._kinds.get(name)
            if new != old:
                shapes = [
                    f"{kind[0]} {list(kind[1])}" if kind else "nothing" for kind in (new, old)
                ]
                raise SwapRefused(
                    f"{folder} has {shapes[0]} as {name}, the running model has {shapes[1]}."
                )
        for key in sorted(configs.keys() | self._configs.keys()):
            if configs.get(key) != self._configs.get(key):
                values = f"{configs.get(key)!r}, the running model has {self._configs.get(key)!r}"
                raise SwapRefused(f"{folder} has {key}={values}.")


def _configs_of(folder: Path) -> dict[str, Any]:
    """Return the configuration files of a model and of its generation, by file name."""
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        try:
            settings = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            if name == "config.json":
                raise BadUse(
                    f"{folder} has no config.json. Give the folder of a Hugging Face model."
                ) from None
            continue
        except (OSError, ValueError) as error:
            raise BadUse(
                f"{folder / name} cannot be read: {error}. Copy the checkpoint again."
            ) from error
        found |= {
            f"{name}:{key}": value
            for key, value in settings.items()
            if key not in _NOT_OF_THE_MODEL
        }
    return found


def _targets(
    model: Any, kinds: dict[str, tuple[str, tuple[int, ...]]]
) -> tuple[dict[str, torch.Tensor], str]:
    """Map each tensor of a checkpoint to the model's tensor.

    Returns:
        The map by the checkpoint's names, and the reason why no swap is possible; empty if one is.
    """
    if getattr(model.config, "quantization_config", None):
        return {}, "Quantized weights cannot be swapped in place."
    state: dict[str, torch.Tensor] = model.state_dict()
    prefix = model.base_model_prefix + "."
    targets: dict[str, torch.Tensor] = {}
    written: dict[int, str] = {}
    for name, (_, shape) in kinds.items():
        target = next(
            (
                state[one]
                for one in (name, prefix + name, name.removeprefix(prefix))
                if one in state
            ),
            None,
        )
        if target is None:
            continue  # a buffer of older transformers, which a load also leaves out
        if tuple(target.shape) != shape:
            return {}, f"The checkpoint's {name} is stored in another form than the model's."
        if (twin := written.setdefault(target.data_ptr(), name)) != name:
            return {}, f"{twin} and {name} are one tensor in the model and two in the checkpoint."
        targets[name] = target
    for name, tensor in state.items():
        if tensor.data_ptr() not in written:
            return {}, f"The model's {name} is not in the checkpoint under that name."
    return targets, ""
