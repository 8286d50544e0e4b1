"""Export a checkpoint's model as a Hugging Face folder, for transformers and other programs."""

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
    """Describe a written folder; `files` are its weight files, and their index if there is one."""

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
    """Export the model of a Holdfast or DCP checkpoint as a Hugging Face folder.

    The folder has the weights in safetensors, the configuration and the tokenizer. The weights keep
    their dtype. Sharded tensors are put together. A checkpoint of Holdfast is verified by its
    checksums while it is read. `output` appears only when it is complete. After a crash, a folder
    `.NAME.RANDOM.tmp` may remain beside `output`; the next export to `output` removes it.

    Args:
        checkpoint: the folder of one step.
        output: the path of the new folder.
        hf_config: a folder with `config.json` and the tokenizer.
        name_map: a TOML file that maps the checkpoint's names to the model's names
            (`holdfast.checkpoint.state.name_map`).
        shard_bytes: the largest size of a weight file in bytes; only a file with a single larger
            tensor exceeds it.
        progress: called with the number of bytes written so far and the total.

    Raises:
        NotFound: a given file or folder does not exist.
        BadUse: `output` exists, or the checkpoint lacks tensors that the configuration needs.
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
    """Yield a hidden, locked folder; if the block succeeds, rename it to `output` durably."""
    for left in output.parent.glob(f".{glob.escape(output.name)}.*.tmp"):
        # The folder may be gone by now, or may be another user's.
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
        except OSError:  # another process holds it, or this file system cannot lock folders
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
