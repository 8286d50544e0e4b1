"""Apply a PEFT adapter to its base model, as lm-eval does.

The model is changed by the calls that HFLM makes with `peft=` (lm-eval 0.4.13). The adapter is
applied in each forward pass and is not merged into the weights, since a merged product would differ
in its last bits.
"""

import json
import textwrap
import warnings
from pathlib import Path
from typing import Any

from holdfast.core.errors import BadUse
from holdfast.evaluate.types.model_manifest import ADAPTER_FOLDER


def has_adapter(folder: Path) -> bool:
    """Return True if the folder of a model contains an adapter."""
    return (folder / ADAPTER_FOLDER).is_dir()


def with_adapter(model: Any, folder: Path, tokenizer: Any) -> Any:
    """Apply the adapter in a model's folder to the model in place; return the resulting model.

    Raises:
        BadUse: peft is not installed, the installed peft has no adapters of this type, or the
            adapter does not fit the model.
    """
    try:
        from peft import PeftModel, __version__
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
        from peft.tuners.tuners_utils import BaseTuner
        from safetensors import SafetensorError
    except ImportError as error:
        raise BadUse(
            "The model is a PEFT adapter, which needs peft. Run on each node: pip install "
            "'holdfast[peft]'"
        ) from error
    config = json.loads((folder / ADAPTER_FOLDER / "adapter_config.json").read_text())
    kind = str(config.get("peft_type"))
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise BadUse(
            f"The PEFT adapter is of the type {kind}, which peft {__version__} does not have. "
            "Install the version of peft that made the adapter, or a newer one, on each node."
        )
    text = getattr(model.config, "text_config", model.config)
    if text.vocab_size != len(tokenizer):  # an adapter may have been trained with added tokens
        model.resize_token_embeddings(len(tokenizer))
    try:
        with warnings.catch_warnings():
            # peft only warns about missing layers, and layers without adapter weights add nothing.
            # So the scores would be the base model's.
            warnings.filterwarnings("error", r"(?s).*missing adapter keys", UserWarning)
            adapted: Any = PeftModel.from_pretrained(model, folder / ADAPTER_FOLDER)
    except SafetensorError as error:
        raise BadUse(
            f"The weights of the PEFT adapter are unreadable ({error}). Copy the adapter again."
        ) from error
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, UserWarning) as error:
        reason = textwrap.shorten(" ".join(str(error).split("\n")[:2]), 300, placeholder=" ...")
        raise BadUse(
            f"The PEFT adapter does not fit its base: {reason} Give the base that it was trained "
            "on: --base FOLDER"
        ) from error
    if not isinstance(adapted.base_model, BaseTuner):
        raise BadUse(
            f"The PEFT adapter is of the type {kind}, which adds tokens to each prompt. Holdfast "
            "only applies adapters of layers, such as LoRA; evaluate this one with lm_eval."
        )
    return adapted.get_base_model().eval()


def adapter_numerics(folder: Path) -> tuple[str, ...]:
    """Return the text that an adapter adds to an engine's numerics."""
    if not has_adapter(folder):
        return ()
    import peft

    return (f"peft {peft.__version__}",)
