"""Test that pickles from outside are not trusted."""

import os
import pathlib
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.format.dcp_metadata import read_dcp_metadata
from holdfast.checkpoint.format.manifest import (
    Manifest,
    ManifestError,
    describe_file,
    write_manifest,
)
from holdfast.core.errors import CheckpointError, NoVerifiedCheckpoint


def seal(path, step):
    """Give a folder a fitting manifest, as a person who knows the format can."""
    names = sorted(file.name for file in path.iterdir() if file.name != "holdfast.json")
    files = tuple(describe_file(path, name) for name in names)
    write_manifest(
        path, Manifest(step=step, world_size=1, created_at_s=0.0, torch="2", files=files)
    )


def stock_save(path, state):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


class Evil:
    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize(
    "how",
    [
        lambda mark: Evil(os.system, f"touch {mark}"),
        lambda mark: Evil(eval, f"open({str(mark)!r}, 'w')"),
        lambda mark: Evil(getattr, "text", "upper"),
        lambda mark: Evil(torch.load, str(mark)),
    ],
    ids=["os.system", "eval", "getattr", "torch.load"],
)
def test_a_malicious_metadata_is_refused_and_runs_nothing(tmp_path, how):
    ckpt = Checkpointer(tmp_path / "checkpoints")
    ckpt.save(1, {"a": 1})
    path = ckpt.save(2, {"a": 2}).result()
    mark = tmp_path / "executed"
    (path / ".metadata").write_bytes(pickle.dumps(how(mark)))
    seal(path, 2)
    with pytest.raises(ManifestError, match=r"names .* which no metadata of PyTorch has"):
        read_dcp_metadata(path)
    state = {"a": 0}
    assert ckpt.restore(state) == 1
    assert state == {"a": 1}
    assert not mark.exists()


def test_a_malicious_plain_value_is_refused_runs_nothing_and_changes_nothing(tmp_path):
    mark = tmp_path / "executed"
    path = tmp_path / "step-0000000001"
    stock_save(path, {"t": torch.ones(2), "evil": Evil(os.system, f"touch {mark}")})
    mark.unlink(missing_ok=True)
    seal(path, 1)
    state = {"t": torch.zeros(2), "evil": 0}
    with pytest.raises(
        CheckpointError, match=r"'evil' is not a plain value.*Leave its top-level entry out"
    ):
        Checkpointer(tmp_path).restore(state)
    assert state["t"].tolist() == [0, 0]
    assert not mark.exists()
    state = {"t": torch.zeros(2)}
    Checkpointer(tmp_path).restore(state)
    assert state["t"].tolist() == [1, 1]


def test_metadata_that_leads_out_of_the_checkpoint_is_refused(tmp_path):
    ckpt = Checkpointer(tmp_path)
    path = ckpt.save(1, {"a": 1, "t": torch.ones(3)}).result()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = "../../elsewhere"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(path, 1)
    with pytest.raises(
        NoVerifiedCheckpoint, match="elsewhere, which is not a file of the checkpoint"
    ):
        ckpt.restore({"a": 0})


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda stored: setattr(stored, "length", 10**9), "lies beyond the end"),
        (lambda stored: setattr(stored, "offset", -1), "lies beyond the end"),
    ],
)
def test_metadata_that_promises_more_than_the_files_hold_is_refused(tmp_path, break_it, reason):
    ckpt = Checkpointer(tmp_path)
    path = ckpt.save(1, {"a": 1}).result()
    metadata = pickle.loads((path / ".metadata").read_bytes())
    break_it(next(iter(metadata.storage_data.values())))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(path, 1)
    with pytest.raises(NoVerifiedCheckpoint, match=reason):
        ckpt.restore({"a": 0})


def test_metadata_pickled_with_enum_members_by_name_is_read(tmp_path):
    """Some Python versions pickle so; every other use of `getattr` stays forbidden."""
    path = Checkpointer(tmp_path).save(1, {"t": torch.ones(3)}).result()
    metadata = read_dcp_metadata(path)
    enum = type(metadata.state_dict_metadata["t"].properties.__getstate__()[3])

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            return (getattr, (enum, value.name)) if isinstance(value, enum) else NotImplemented

    with (path / ".metadata").open("wb") as file:
        Pickler(file).dump(metadata)
    assert b"getattr" in (path / ".metadata").read_bytes()
    assert read_dcp_metadata(path).state_dict_metadata == metadata.state_dict_metadata


@pytest.mark.parametrize("owner", [pathlib.PosixPath, MetadataIndex, _MEM_FORMAT_ENCODING])
def test_what_a_pickle_sets_of_a_class_is_undone_and_refused(tmp_path, owner):
    before = dict(vars(owner))
    content = b"".join(
        [
            pickle.PROTO + b"\x02",
            pickle.GLOBAL + f"{owner.__module__}\n{owner.__name__}\n".encode(),
            pickle.NONE,
            pickle.EMPTY_DICT,
            pickle.MARK,
            *(
                pickle.BINUNICODE + len(name).to_bytes(4, "little") + name + pickle.NEWTRUE
                for name in (b"exists", b"__eq__", b"__slotnames__")
            ),
            pickle.SETITEMS,
            pickle.TUPLE2,
            pickle.BUILD,
            pickle.STOP,
        ]
    )
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ManifestError, match=rf"attributes of .*{owner.__name__}"):
        read_dcp_metadata(tmp_path)
    assert dict(vars(owner)) == before


def test_what_a_pickle_sets_of_an_enums_member_is_undone_and_refused(tmp_path):
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    before = dict(vars(member))

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            return (
                (_MEM_FORMAT_ENCODING, (0,), {"_value_": 9}) if value is member else NotImplemented
            )

    with (tmp_path / ".metadata").open("wb") as file:
        Pickler(file).dump(member)
    with pytest.raises(ManifestError, match="attributes of"):
        read_dcp_metadata(tmp_path)
    assert dict(vars(member)) == before
