"""Test checkpoints that DCP alone wrote, and the archives in their files."""

import contextlib
import io
import os
import pickle
import random
import warnings
import zipfile
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.convert.plain_dcp import is_plain_dcp, verify_plain_dcp
from holdfast.checkpoint.format.torch_blobs import BlobError, check_blob


def stock_save(path, state):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))


@pytest.fixture
def plain(tmp_path):
    stock_save(
        tmp_path / "plain",
        {"a": torch.arange(1000.0), "b": torch.ones(3, 4).bfloat16(), "n": 7, "s": "text"},
    )
    return tmp_path / "plain"


@pytest.fixture
def without_checksums():
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def rewrite(path, change):
    """Change DCP's metadata."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def place(path, name):
    """Return the place of a value in the one file."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    return next(stored for index, stored in metadata.storage_data.items() if index.fqn == name)


def test_every_value_matches_its_checksum(plain):
    seen = []
    info = verify_plain_dcp(plain, progress=lambda done, total: seen.append((done, total)))
    assert (info.state, info.step, info.created_at_s) == ("checked", None, None)
    assert "every value matches its CRC-32" in info.reason
    assert info.size_bytes == sum(path.stat().st_size for path in plain.iterdir())
    assert seen == sorted(seen)
    assert 4000 < seen[-1][0] <= seen[-1][1]
    assert is_plain_dcp(plain)


@pytest.mark.parametrize("seed", range(20))
def test_any_flipped_bit_of_a_tensor_is_caught(plain, seed):
    stored = place(plain, "a")
    data = plain / stored.relative_path
    content = bytearray(data.read_bytes())
    begin = content.index(torch.arange(1000.0).numpy().tobytes(), stored.offset)
    bit = random.Random(seed).randrange(32_000)
    content[begin + bit // 8] ^= 1 << bit % 8
    data.write_bytes(content)
    info = verify_plain_dcp(plain)
    assert info.state == "damaged"
    assert info.reason.startswith("'a' in __0_0.distcp is damaged: Bad CRC-32")


def test_without_checksums_it_says_what_cannot_be_checked(without_checksums, tmp_path):
    stock_save(tmp_path / "plain", {"a": torch.arange(10.0), "n": 7})
    info = verify_plain_dcp(tmp_path / "plain")
    assert info.state == "unverifiable"
    assert (
        info.reason
        == "structure ok, but 2 of 2 values have no checksum, so their bits cannot be checked"
    )


def test_without_checksums_the_structure_is_checked_all_the_same(without_checksums, tmp_path):
    stock_save(tmp_path / "plain", {"a": torch.arange(10.0)})
    data = tmp_path / "plain" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[:4] = b"none"
    data.write_bytes(content)
    assert verify_plain_dcp(tmp_path / "plain").state == "damaged"


def test_what_an_extension_has_changed_cannot_be_checked(plain):
    rewrite(
        plain, lambda metadata: setattr(place_in(metadata, "a"), "transform_descriptors", ["zstd"])
    )
    info = verify_plain_dcp(plain)
    assert info.state == "unverifiable"
    assert info.reason.startswith("structure ok, but 1 of 4 values have no checksum")


def place_in(metadata, name):
    return next(stored for index, stored in metadata.storage_data.items() if index.fqn == name)


def overlap(metadata):
    place_in(metadata, "b").offset = place_in(metadata, "a").offset + 8


def outside(metadata):
    metadata.state_dict_metadata["b"].chunks[0].sizes = torch.Size([30, 4])


def hole(metadata):
    metadata.state_dict_metadata["b"].size = torch.Size([5, 4])


def larger(metadata):
    tensor = metadata.state_dict_metadata["b"]
    tensor.size = tensor.chunks[0].sizes = torch.Size([3, 40])


def surplus(metadata):
    metadata.storage_data[MetadataIndex("more")] = replace(
        place_in(metadata, "n"), relative_path="/dev/tty"
    )


def nonsense(metadata):
    metadata.planner_data = {"b": ({},)}


def wrong_types():
    """Yield a change to a wrong type for each place in the metadata."""
    yield lambda metadata: setattr(metadata.state_dict_metadata["b"], "chunks", 3)
    yield lambda metadata: setattr(metadata.state_dict_metadata["b"], "size", 3.5)
    yield lambda metadata: setattr(metadata.state_dict_metadata["b"].chunks[0], "offsets", ["0", 0])
    yield lambda metadata: setattr(metadata.state_dict_metadata["b"], "properties", None)
    yield lambda metadata: setattr(metadata, "state_dict_metadata", ["b"])
    yield lambda metadata: delattr(metadata, "state_dict_metadata")
    yield lambda metadata: metadata.state_dict_metadata.update({"b": "b"})
    yield lambda metadata: metadata.state_dict_metadata.update(
        {7: metadata.state_dict_metadata["b"]}
    )
    yield lambda metadata: setattr(place_in(metadata, "n"), "offset", 0.5)
    yield lambda metadata: setattr(place_in(metadata, "n"), "length", True)
    yield lambda metadata: setattr(place_in(metadata, "n"), "relative_path", 7)
    yield lambda metadata: setattr(metadata, "planner_data", [("b",)])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (overlap, "overlap in __0_0.distcp"),
        (outside, "a part of 'b' lies outside of its shape"),
        (hole, "'b' is not whole: 12 of its 20 values were written"),
        (larger, "'b' in __0_0.distcp holds 24 bytes instead of 240"),
        (nonsense, "its metadata has a name whose path is not valid"),
        (
            lambda metadata: setattr(place_in(metadata, "n"), "relative_path", "../x"),
            "which is not a file of the checkpoint",
        ),
        (lambda metadata: metadata.storage_data.clear(), "was never written"),
        (surplus, "'more' lies in /dev/tty, which is not a file of the checkpoint"),
    ],
    ids=["overlap", "outside", "hole", "larger", "nonsense", "path", "empty", "surplus"],
)
def test_metadata_that_contradicts_itself_or_the_files_is_damage(plain, change, reason):
    rewrite(plain, change)
    info = verify_plain_dcp(plain)
    assert info.state == "damaged"
    assert reason in info.reason


@pytest.mark.parametrize("change", list(wrong_types()))
def test_metadata_of_wrong_types_is_damage_and_not_a_traceback(plain, change):
    rewrite(plain, change)
    info = verify_plain_dcp(plain)
    assert (info.state, info.reason) == ("damaged", ".metadata does not hold DCP's metadata")


def test_a_truncated_file_and_a_missing_one_are_damage(plain):
    data = plain / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 1)
    assert "lies beyond the end of __0_0.distcp" in verify_plain_dcp(plain).reason
    data.unlink()
    assert "which is not a file of the checkpoint" in verify_plain_dcp(plain).reason


def test_metadata_that_would_run_code_runs_nothing(plain, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    (plain / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert is_plain_dcp(plain)
    assert "names posix.system" in verify_plain_dcp(plain).reason
    assert not (tmp_path / "ran").exists()


def test_one_of_holdfast_that_lost_its_manifest_is_not_foreign(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        path = ckpt.save(1, {"n": 1}).result()
    (path / "holdfast.json").unlink()
    assert not is_plain_dcp(path)


@pytest.fixture
def check(tmp_path):
    """Return a function that checks bytes as a blob within a file."""

    def check(content):
        (tmp_path / "file").write_bytes(b"before" + content + b"after")
        fd = os.open(tmp_path / "file", os.O_RDONLY)
        try:
            return check_blob(fd, 6, len(content))
        finally:
            os.close(fd)

    return check


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def zipped(records, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return file.getvalue()


def test_a_blob_says_how_many_bytes_of_tensors_it_holds(check):
    blob = check(saved([torch.zeros(10), torch.zeros(3, dtype=torch.int8)]))
    assert (blob.data_bytes, blob.is_checked) == (43, True)
    assert check(saved(torch.zeros(0))).is_checked


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a zip file"),
        (b"\x80\x02.", "not a zip file"),
        (zipped({"readme": "x"}), "not one that torch.save wrote"),
        (zipped({"a/data.pkl": "x", "b/data.pkl": "x"}), "not one that torch.save wrote"),
        (zipped({"a/data.pkl": "x" * 999}, zipfile.ZIP_DEFLATED), "compressed or encrypted"),
    ],
)
def test_what_torch_save_did_not_write_is_no_blob(check, content, said):
    with pytest.raises(BlobError, match=said):
        check(content)


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_blob_is_a_damaged_blob_and_nothing_worse(check, seed):
    """After a change of any bytes, the check raises an error, or its result is still true."""
    content = bytearray(saved(torch.arange(20.0)))
    source = random.Random(seed)
    for _ in range(source.choice([1, 1, 8])):
        content[source.randrange(len(content))] = source.randrange(256)
    with contextlib.suppress(BlobError):
        blob = check(bytes(content))
        assert blob.data_bytes >= 80 or not blob.is_checked
        assert torch.arange(20.0).numpy().tobytes() in content or not blob.is_checked
