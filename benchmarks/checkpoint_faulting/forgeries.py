"""Forge checkpoints with knowledge of the format: right checksums and hostile content."""

import io
import json
import os
import pickle
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from checkpoint_faulting.files import Damage, Scene, data_files, rewrite
from checkpoint_faulting.ground import STEPS
from holdfast.checkpoint.format.checksums import SIDECAR_SUFFIX, file_digests
from holdfast.checkpoint.format.dcp_metadata import METADATA_NAME, read_dcp_metadata
from holdfast.checkpoint.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    describe_file,
    read_manifest,
    write_manifest,
)


class _Call:
    """An object that is pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def _gadget(scene: Scene) -> Any:
    """Return an object that makes the canary file if a reader unpickles the object."""
    canary, code = str(scene.canary), f"open({str(scene.canary)!r}, 'w').close()"
    return scene.chance.choice(
        (
            lambda: _Call(os.system, f"touch {canary}"),
            lambda: _Call(eval, code),
            lambda: _Call(exec, code),
            lambda: _Call(os.mkdir, canary),
            lambda: _Call(subprocess.Popen, ["touch", canary]),
            lambda: _Call(io.open, canary, "w"),
            lambda: _Call(Path.touch, scene.canary),
            lambda: OrderedDict(a=_Call(os.system, f"touch {canary}")),
            lambda: {"state": [_Call(eval, code)]},
            lambda: _Call(torch.save, 1, canary),
        )
    )()


def _sign(checkpoint: Path) -> None:
    """Give a checkpoint a manifest and sidecars that match its files."""
    manifest = read_manifest(checkpoint, step=int(checkpoint.name.removeprefix("step-")))
    for path in data_files(checkpoint):
        rewrite(path.with_name(path.name + SIDECAR_SUFFIX), file_digests(path, path.stat().st_size))
    files = tuple(describe_file(checkpoint, entry.path) for entry in manifest.files)
    (checkpoint / MANIFEST_NAME).unlink()
    write_manifest(checkpoint, Manifest(**{**vars(manifest), "files": files}))


def _rename_in_manifest(scene: Scene, checkpoint: Path, name: str) -> None:
    content = json.loads((checkpoint / MANIFEST_NAME).read_bytes())
    scene.chance.choice([each for each in content["files"] if each["path"] != METADATA_NAME])[
        "path"
    ] = name
    content.pop("digest")
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    content["digest"] = xxhash.xxh3_128(canonical).hexdigest()
    rewrite(checkpoint / MANIFEST_NAME, json.dumps(content, indent=1).encode())


def _elsewhere(scene: Scene, checkpoint: Path) -> Path:
    """Make a file outside of the checkpoint that a reader might take for the checkpoint's own."""
    return (
        scene.ground.checkpoint(scene.world_size, STEPS[0], other=True)
        / data_files(checkpoint)[0].name
    )


def _path_in_manifest(scene: Scene, checkpoint: Path) -> None:
    there = _elsewhere(scene, checkpoint)
    names = (
        str(there),
        os.path.relpath(there, checkpoint),
        "../" * 20 + "etc/passwd",
        "/dev/zero",
        "..",
        "a/../../b",
        "",
    )
    _rename_in_manifest(scene, checkpoint, scene.chance.choice(names))


def _path_in_metadata(scene: Scene, checkpoint: Path) -> None:
    there = _elsewhere(scene, checkpoint)
    metadata = read_dcp_metadata(checkpoint)
    stored = scene.chance.choice(list(metadata.storage_data.values()))
    stored.relative_path = scene.chance.choice(
        (str(there), os.path.relpath(there, checkpoint), "/dev/zero", ".")
    )
    rewrite(checkpoint / METADATA_NAME, pickle.dumps(metadata))
    _sign(checkpoint)


def _place_in_metadata(scene: Scene, checkpoint: Path) -> None:
    """Put a tensor beyond the end of its file, or before its begin."""
    metadata = read_dcp_metadata(checkpoint)
    stored = scene.chance.choice(list(metadata.storage_data.values()))
    name, value = scene.chance.choice(
        (("offset", -1), ("offset", 1 << 62), ("length", 1 << 40), ("length", -5))
    )
    setattr(stored, name, value)
    rewrite(checkpoint / METADATA_NAME, pickle.dumps(metadata))
    _sign(checkpoint)


def _link(scene: Scene, checkpoint: Path) -> None:
    """Replace a file by a link to the same bytes elsewhere."""
    path = scene.chance.choice([*data_files(checkpoint), checkpoint / METADATA_NAME])
    outside = scene.folder.with_suffix(f".outside-{path.parent.name}-{path.name}")
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)


def _special(scene: Scene, checkpoint: Path) -> None:
    """Replace a file by a pipe, a folder or a circular link."""
    path = scene.chance.choice([*data_files(checkpoint), checkpoint / METADATA_NAME])
    path.unlink()
    make = (
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: path.symlink_to(path),
        lambda: path.symlink_to("/dev/zero"),
    )
    scene.chance.choice(make)()


def _pickle_in_metadata(scene: Scene, checkpoint: Path) -> None:
    rewrite(
        checkpoint / METADATA_NAME,
        pickle.dumps(_gadget(scene), protocol=scene.chance.choice((2, 4, 5))),
    )
    _sign(checkpoint)


def _pickle_in_value(scene: Scene, checkpoint: Path) -> None:
    """Put a pickle into the slot of a plain value."""
    metadata = read_dcp_metadata(checkpoint)
    gadget = pickle.dumps(_gadget(scene), protocol=2)
    slots = [
        stored
        for index, stored in metadata.storage_data.items()
        if index.offset is None and stored.length >= len(gadget)
    ]
    stored = scene.chance.choice(slots)
    path = checkpoint / stored.relative_path
    content = bytearray(path.read_bytes())
    if scene.chance.random() < 0.5:  # behind what torch.save begins with
        head = io.BytesIO()
        torch.save(None, head, _use_new_zipfile_serialization=False)
        gadget = (head.getvalue()[:-10] + gadget)[: stored.length]
    content[stored.offset : stored.offset + len(gadget)] = gadget
    rewrite(path, bytes(content))
    _sign(checkpoint)


IN_VALUES: Final = "a malicious pickle in a plain value"
"""A restore must refuse the pickle in words; an unread pickle does no harm."""
FORGERIES: Final[dict[str, Damage]] = {
    "../ and absolute paths in a manifest": _path_in_manifest,
    "../ and absolute paths in .metadata": _path_in_metadata,
    "places outside of their files in .metadata": _place_in_metadata,
    "symlinks out of a checkpoint": _link,
    "pipes, folders and devices in the place of files": _special,
    "a malicious pickle in .metadata": _pickle_in_metadata,
    IN_VALUES: _pickle_in_value,
}


def forge(scene: Scene, kind: str) -> None:
    """Forge the newest checkpoint, or the two newest."""
    steps = scene.chance.choice((STEPS[-1:], STEPS[-1:], STEPS[-2:]))
    scene.hit.update(steps)
    scene.may_refuse = kind == IN_VALUES
    if not scene.may_refuse:
        scene.refused.update(steps)
    for step in steps:
        FORGERIES[kind](scene, scene.checkpoint(step))
