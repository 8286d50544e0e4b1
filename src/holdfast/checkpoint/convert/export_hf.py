"""A checkpoint's model as a Hugging Face folder, which transformers and whatever reads its format load."""

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.convert.hf_model import hf_small_files, write_hf_small_files
from holdfast.checkpoint.convert.inspect import open_for_reading, reading_verified
from holdfast.checkpoint.convert.safetensors import (
    SHARD_BYTES,
    Progress,
    settle_conversion,
    write_safetensors,
)
from holdfast.checkpoint.state.name_map import read_name_map
from holdfast.core.atomic import fsync_folder
from holdfast.core.errors import BadUse, NotFound


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that was written. `files`: its files of weights, with their index where there are several."""

    path: Path
    files: list[str]
    tensors: int
    size_bytes: int


def export_safetensors(
    checkpoint: Path,
    output: Path,
    *,
    hf_config: Path,
    name_map: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda _done, _total: None,
) -> Exported:
    """Write the model of a Holdfast or DCP checkpoint as a Hugging Face folder: configuration, tokenizer, safetensors.

    The weights keep their type. Tensors that were sharded over ranks come out whole. A checkpoint of Holdfast's is
    checked against its checksums as it is read. `output` appears whole or not at all; a
    crash can leave `.NAME.RANDOM.tmp` beside it, which the next export to `output` removes.

    Args:
        checkpoint: the folder of one step.
        output: the folder to make.
        hf_config: a folder with `config.json` and the tokenizer.
        name_map: a TOML file that says which names differ (`holdfast.checkpoint.state.name_map`).
        shard_bytes: of a file of weights, at most.
        progress: told how far it is.

    Raises:
        NotFound: something that was named is not there.
        BadUse: `output` exists, or the checkpoint does not have what the configuration needs.
        CheckpointError: the checkpoint is damaged.
        OSError: a file cannot be read or written.
    """
    if output.exists() or output.is_symlink():
        raise BadUse(f"{output} exists already. Name a folder that does not.")
    if not output.absolute().parent.is_dir():
        raise NotFound(f"There is no folder {output.absolute().parent}. Make it first.")
    names = read_name_map(name_map)
    opened = open_for_reading(checkpoint)
    conversion = settle_conversion(opened.metadata, hf_config, names, checkpoint=str(checkpoint))
    with reading_verified(opened) as verified, _appearing(output.absolute()) as folder:
        write_hf_small_files(folder, hf_small_files(hf_config))
        files = write_safetensors(
            checkpoint,
            opened.metadata,
            conversion,
            folder,
            files=verified,
            shard_bytes=shard_bytes,
            progress=progress,
        )
        size_bytes = sum((folder / name).stat().st_size for name in files)
    tensors = sum(not each.tied for each in conversion.plan)
    return Exported(path=output, files=files, tensors=tensors, size_bytes=size_bytes)


@contextlib.contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `output`, durably, if the block ends well; locked while its process lives."""
    for left in output.parent.glob(f".{glob.escape(output.name)}.*.tmp"):
        # It may be gone by now, or be a file of somebody else's.
        with contextlib.suppress(OSError), _try_lock(left) as is_free:
            if is_free:
                shutil.rmtree(left)
    making = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    making.mkdir()
    try:
        with _try_lock(making):
            yield making
            for path in making.rglob("*"):
                if path.is_dir():
                    fsync_folder(path)
                else:
                    _fsync(path)
            fsync_folder(making)
            making.rename(output)
            fsync_folder(output.parent)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


@contextlib.contextmanager
def _try_lock(folder: Path) -> Iterator[bool]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its process lives, or this file system locks no folders
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
