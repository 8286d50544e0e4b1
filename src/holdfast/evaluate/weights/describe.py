"""Describe a model as a `ModelManifest`; the command does this before any process starts.

A Hugging Face folder is used as it is: `config.json`, the tokenizer, and the weights as
safetensors. For a Holdfast or DCP checkpoint, the manifest covers only the model's tensors and not
the optimizer's. Only DCP's own metadata is unpickled, with the checkpoint package's list of allowed
names.
"""

import asyncio
import difflib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import re2

from holdfast.checkpoint import (
    HF_CONFIG_NAME,
    HF_INDEX_NAME,
    HF_WEIGHTS_NAME,
    MANIFEST_NAME,
    ManifestError,
    hf_small_files,
    is_hf_small_file,
    read_manifest,
)
from holdfast.core.errors import BadUse, CheckpointError, NotFound
from holdfast.evaluate.types.model_manifest import (
    ADAPTER_FOLDER,
    ModelFile,
    ModelManifest,
    chunk_size_for,
    cut,
)
from holdfast.evaluate.weights.source import Source, open_source

METADATA = ".metadata"
KNOWN_SMALL_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""The files to look for on a server that cannot list its files."""
_DESCRIBE_ATTEMPTS = 12
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ENCODER_DECODERS = {
    "t5",
    "mt5",
    "umt5",
    "longt5",
    "switch_transformers",
    "bart",
    "mbart",
    "pegasus",
}
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def describe(
    model: str,
    *,
    hf_config: str | None = None,
    name_map: str | None = None,
    chunk_bytes: int | None = None,
    base: str | None = None,
) -> ModelManifest:
    """Describe which bytes to read for a model.

    Args:
        model: the path or URL (file, http, https, s3, gs, az) of a Hugging Face folder, of one
            checkpoint, or of a PEFT adapter.
        hf_config: for a checkpoint, a folder with the `config.json` and the tokenizer of its model.
        name_map: for a checkpoint whose tensors have other names, the file that maps the names
            (`holdfast.checkpoint.read_name_map`).
        chunk_bytes: the largest size of a chunk; None to choose by the model's size. The digest of
            a model depends on the size.
        base: for an adapter, the path or URL of its base model in Hugging Face's format; None for
            the base that the adapter names.

    Raises:
        NotFound: there is nothing at `model`.
        BadUse: the model cannot be read, or the checkpoint lacks tensors that the configuration
            needs.
        EvaluationError: the storage cannot be read.
    """
    return asyncio.run(_describe(_found(model), hf_config, name_map, chunk_bytes, base))


def _found(model: str) -> str:
    """Return the absolute path of a model's folder; return a URL unchanged.

    Raises:
        NotFound: there is no such folder.
    """
    if "://" in model:
        return model
    model = str(_in_the_hub_cache(model) or Path(model).absolute())
    _check_folder(Path(model))
    return model


async def _describe(
    model: str,
    hf_config: str | None,
    name_map: str | None,
    chunk_bytes: int | None,
    base: str | None,
) -> ModelManifest:
    source = open_source(model, attempts=_DESCRIBE_ATTEMPTS)
    found = await source.sizes()
    listed = found is not None
    if found is None:
        found = await _ask_for(
            source,
            (
                METADATA,
                MANIFEST_NAME,
                HF_CONFIG_NAME,
                HF_INDEX_NAME,
                HF_WEIGHTS_NAME,
                "pytorch_model.bin",
                ADAPTER_CONFIG,
                ADAPTER_WEIGHTS,
            ),
        )
    sizes = found
    is_adapter = ADAPTER_CONFIG in sizes and not {HF_WEIGHTS_NAME, HF_INDEX_NAME} & sizes.keys()
    if base is not None and not is_adapter:
        raise BadUse(
            f"{model} is not a PEFT adapter (it has no {ADAPTER_CONFIG}), and only an adapter takes "
            "--base. Give the adapter's folder, or leave --base out."
        )
    if METADATA in sizes:
        return await _describe_checkpoint(model, source, sizes, hf_config, name_map, chunk_bytes)
    if hf_config is not None or name_map is not None:
        raise BadUse(
            f"{model} is not a checkpoint (it has no {METADATA}), and only a checkpoint takes "
            "--hf-config and --name-map. "
            "Give the folder of one step, or leave them out."
        )
    if is_adapter:
        return await _describe_adapter(model, source, sizes, base, chunk_bytes)
    return await _describe_huggingface(model, source, sizes, listed, chunk_bytes)


async def _describe_huggingface(
    model: str, source: Source, sizes: dict[str, int], listed: bool, chunk_bytes: int | None
) -> ModelManifest:
    if HF_CONFIG_NAME not in sizes:
        raise BadUse(_contents_sentence(model, sizes))
    await _refuse_other_kinds(model, source, sizes[HF_CONFIG_NAME])
    if HF_INDEX_NAME in sizes:
        weights = await _indexed(model, source, sizes[HF_INDEX_NAME])
    elif HF_WEIGHTS_NAME in sizes:
        weights = [HF_WEIGHTS_NAME]
    else:
        raise BadUse(_no_weights(model, sizes))
    if listed:
        small = [path for path in sizes if is_hf_small_file(path) or path == HF_INDEX_NAME]
    else:
        sizes = {**sizes, **await _ask_for(source, (*KNOWN_SMALL_FILES, *weights))}
        small = [
            path for path in sizes if path in {HF_CONFIG_NAME, HF_INDEX_NAME, *KNOWN_SMALL_FILES}
        ]
    if missing := [path for path in weights if path not in sizes]:
        raise BadUse(
            f"{model} lacks {missing[0]}, which its {HF_INDEX_NAME} names ({len(missing)} of "
            f"{len(weights)} files). "
            "Copy it again."
        )
    files = [ModelFile(path=path, size_bytes=sizes[path]) for path in sorted({*small, *weights})]
    return _of_whole_files(model, files, chunk_bytes)


def _of_whole_files(
    model: str, files: list[ModelFile], chunk_bytes: int | None, adapter: str = ""
) -> ModelManifest:
    chunk_bytes = chunk_bytes or chunk_size_for(sum(file.size_bytes for file in files))
    chunks = [
        chunk
        for number, file in enumerate(files)
        for chunk in cut(number, 0, file.size_bytes, chunk_bytes)
    ]
    return ModelManifest(
        source=model, form="huggingface", files=files, chunks=chunks, adapter=adapter
    )


async def _describe_adapter(
    model: str, source: Source, sizes: Mapping[str, int], base: str | None, chunk_bytes: int | None
) -> ModelManifest:
    """Describe the files of a PEFT adapter and of its base.

    The adapter's files are listed below `ADAPTER_FOLDER`.
    """
    if ADAPTER_WEIGHTS not in sizes:
        raise BadUse(
            f"{model} is a PEFT adapter without {ADAPTER_WEIGHTS}. Save it with peft's "
            "`save_pretrained`, which writes safetensors."
        )
    try:
        config = json.loads(bytes(await source.read(ADAPTER_CONFIG, 0, sizes[ADAPTER_CONFIG])))
        base = base or str(config.get("base_model_name_or_path") or "")
    except (ValueError, AttributeError) as error:
        raise BadUse(
            f"{ADAPTER_CONFIG} of {model} is unreadable ({error}). Copy the adapter again."
        ) from error
    if not base:
        raise BadUse(f"{model} is a PEFT adapter and names no base. Give its folder: --base FOLDER")
    try:
        found = _found(base)
    except (NotFound, BadUse) as error:
        raise NotFound(
            f"{model} is a PEFT adapter of {base}, which is not here. Give the folder of its base "
            "by --base FOLDER, or fetch it: hf download ORG/NAME."
        ) from error
    whole = await _describe(found, None, None, chunk_bytes, None)
    if whole.adapter:
        raise BadUse(
            f"The base {base} of the PEFT adapter {model} is an adapter, too. Merge the base first."
        )
    files = [
        *whole.files,
        *(
            ModelFile(path=f"{ADAPTER_FOLDER}/{path}", size_bytes=sizes[path])
            for path in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        ),
    ]
    return _of_whole_files(found, files, chunk_bytes, model)


async def _indexed(model: str, source: Source, size_bytes: int) -> list[str]:
    try:
        index = json.loads(bytes(await source.read(HF_INDEX_NAME, 0, size_bytes)))
        weights = sorted({str(path) for path in index["weight_map"].values()})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadUse(
            f"{HF_INDEX_NAME} of {model} is unreadable ({error}). Copy the model again."
        ) from error
    for path in weights:
        if PurePosixPath(path).name != path or not path.endswith(".safetensors"):
            raise BadUse(
                f"{HF_INDEX_NAME} of {model} names {path!r}, which is not a weights file beside "
                "it. Do not trust it."
            )
    return weights


async def _describe_checkpoint(
    model: str,
    source: Source,
    sizes: dict[str, int],
    hf_config: str | None,
    name_map: str | None,
    chunk_bytes: int | None,
) -> ModelManifest:
    if hf_config is None:
        raise BadUse(
            f"{model} is a checkpoint, which has neither the model's configuration nor its "
            "tokenizer. "
            "Give a folder with both by --hf-config."
        )
    from holdfast.checkpoint import (
        check_metadata_against_files,
        read_dcp_metadata,
        read_name_map,
        settle_conversion,
    )

    names = read_name_map(None if name_map is None else Path(name_map))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for path in (METADATA, MANIFEST_NAME):
            if path in sizes:
                (folder / path).write_bytes(await source.read(path, 0, sizes[path]))
        try:
            metadata = read_dcp_metadata(folder)
            whole = {METADATA: sizes[METADATA]}
            whole |= await _ask_for(
                source, {str(stored.relative_path) for stored in metadata.storage_data.values()}
            )
            check_metadata_against_files(metadata, whole)
            digests = _stated_digests(folder, whole) if MANIFEST_NAME in sizes else {}
        except ManifestError as error:
            raise CheckpointError(
                f"{model} is damaged: {error}. Take another checkpoint."
            ) from error
    conversion = settle_conversion(metadata, Path(hf_config), names, checkpoint=model)
    ranges = {METADATA: [(0, sizes[METADATA])], **conversion.ranges(metadata)}
    chunk_bytes = chunk_bytes or chunk_size_for(
        sum(count for each in ranges.values() for _, count in each)
    )
    files = [ModelFile(path=path, size_bytes=whole[path]) for path in ranges]
    chunks = [
        chunk
        for number, file in enumerate(files)
        for offset, size_bytes in ranges[file.path]
        for chunk in cut(number, offset, size_bytes, chunk_bytes)
    ]
    read_whole = {file.path for file in files if ranges[file.path] == [(0, file.size_bytes)]}
    return ModelManifest(
        source=model,
        form="dcp",
        files=files,
        chunks=chunks,
        hf_config=hf_small_files(Path(hf_config)),
        name_map=conversion.as_text(),
        file_digests={path: digest for path, digest in digests.items() if path in read_whole},
        converted_bytes=conversion.size_bytes(metadata),
    )


def _stated_digests(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the file digests that a Holdfast checkpoint's manifest states.

    Raises:
        ManifestError: the manifest is damaged, or contradicts the files' sizes.
    """
    try:
        step = int(json.loads((folder / MANIFEST_NAME).read_bytes())["step"])
    except (ValueError, LookupError, TypeError) as error:
        raise ManifestError(f"{MANIFEST_NAME} is unreadable ({error!r})") from error
    entries = read_manifest(folder, step=step).files
    for entry in entries:
        if sizes.get(entry.path, entry.size_bytes) != entry.size_bytes:
            raise ManifestError(
                f"{entry.path} has {sizes[entry.path]} bytes instead of {entry.size_bytes}"
            )
    return {entry.path: entry.checksum for entry in entries}


async def _refuse_other_kinds(model: str, source: Source, size_bytes: int) -> None:
    """Check that a model continues text, as Holdfast's requests need.

    Raises:
        BadUse: the model has an encoder and a decoder, such as T5.
    """
    try:
        config = json.loads(bytes(await source.read(HF_CONFIG_NAME, 0, size_bytes)))
        kind = str(config.get("model_type") or "")
        named = ", ".join(map(str, config.get("architectures") or ())) or kind
    except (ValueError, AttributeError, TypeError):  # the engine will report the error
        return
    if config.get("is_encoder_decoder") or kind in _ENCODER_DECODERS:
        raise BadUse(
            f"{model} is an encoder-decoder model ({named}), and Holdfast evaluates models that "
            "continue text. Use "
            f"lm-eval itself: lm_eval --model hf --model_args pretrained={model},backend=seq2seq"
        )


def _in_the_hub_cache(model: str) -> Path | None:
    """Return the folder of a model in Hugging Face's cache; None if `model` names none.

    The folder is `models--ORG--NAME/snapshots/COMMIT`. A name that is not a folder here, `ORG/NAME`
    or `ORG/NAME@REVISION`, is looked up in the cache.

    Raises:
        NotFound: the cache has the model but not this revision.
    """
    name, _, revision = model.partition("@")
    if Path(model).exists():
        folder, revision = Path(model).absolute(), ""
    else:
        if not re2.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
            return None
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
        folder = hub / f"models--{name.replace('/', '--')}"
    snapshots = folder / "snapshots"
    if not folder.name.startswith("models--") or not snapshots.is_dir():
        return None
    wanted = revision or "main"
    reference = folder / "refs" / wanted
    commit = reference.read_text().strip() if reference.is_file() else wanted
    if (snapshots / commit).is_dir():
        return snapshots / commit
    there = sorted(one.name for one in snapshots.iterdir())
    if not revision and len(there) == 1:
        return snapshots / there[0]
    raise NotFound(
        f"{folder} has no revision {wanted!r}. It has {', '.join(there[:3]) or 'none'}: give "
        f"{snapshots}/COMMIT, or fetch it: hf download "
        f"{name if revision else folder.name[8:].replace('--', '/')}"
    )


def _no_weights(model: str, sizes: Mapping[str, int]) -> str:
    pickled = sorted(path for path in sizes if path.endswith(_PICKLED) and "/" not in path)
    if pickled:
        return (
            f"{model} holds its weights pickled ({pickled[0]}), and reading those could run code. "
            "Convert them once, "
            "where you trust them: transformers' `model.save_pretrained(FOLDER)` writes "
            "safetensors; then give FOLDER."
        )
    other = sorted(path for path in sizes if path.endswith(".safetensors"))
    named = f"it has {', '.join(other[:3])}" if other else "it has no safetensors"
    return (
        f"{model} has neither {HF_WEIGHTS_NAME} nor {HF_INDEX_NAME}: {named}. Save it with "
        "transformers' "
        "`save_pretrained`."
    )


def _contents_sentence(model: str, sizes: Mapping[str, int]) -> str:
    steps = sorted(
        {
            path.split("/")[0]
            for path in sizes
            if path.startswith("step-") and path.endswith("/" + METADATA)
        }
    )
    if steps:
        several = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else steps[0]
        return f"{model} is a folder of checkpoints ({several}). Give one of them: {model.rstrip('/')}/{steps[-1]}."
    inside = sorted({path.split("/")[0] for path in sizes if path.endswith("/" + HF_CONFIG_NAME)})
    if inside:
        return (
            f"{model} is not a model, but {', '.join(inside[:3])} in it is one. "
            f"Give {model.rstrip('/')}/{inside[0]}."
        )
    return (
        f"{model} is not a model: it has neither {HF_CONFIG_NAME} (a Hugging Face folder) nor "
        f"{METADATA} (a checkpoint). "
        "Give the folder that `save_pretrained` or Checkpointer wrote."
    )


def _check_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    if folder.exists():
        raise BadUse(f"{folder} is a file. Give the folder of the model.")
    # Suggest names that are similar to the first part of the path that does not exist.
    parent = next(parent for parent in folder.parents if parent.is_dir())
    wanted = folder.relative_to(parent).parts[0]
    near = difflib.get_close_matches(
        wanted, [each.name for each in parent.iterdir() if each.is_dir()], n=3, cutoff=0.6
    )
    hint = (
        f"Did you mean {', '.join(str(parent / name) for name in near)}?"
        if near
        else "Give its folder or URL, or fetch it: hf download ORG/NAME."
    )
    raise NotFound(f"There is no model {folder}. {hint}")


async def _ask_for(source: Source, paths: Iterable[str]) -> dict[str, int]:
    """Return the sizes of those files among `paths` that exist."""

    async def one(path: str) -> tuple[str, int] | None:
        try:
            return path, await source.size_bytes(path)
        except FileNotFoundError:
            return None

    return dict(found for found in await asyncio.gather(*map(one, paths)) if found is not None)
