"""Describe and fetch a PEFT adapter with its base: each byte once, and a digest over both."""

import asyncio
import json

import pytest
from weights_world import fetch_all, make_files, nodes, storage_over_http

from holdfast.core.errors import BadUse, NotFound
from holdfast.evaluate.weights.describe import describe
from holdfast.evaluate.weights.stamp import stamp_of

MIB = 1 << 20
BASE = {"config.json": 20, "tokenizer.json": 30, "model.safetensors": 2 * MIB + 5}


def make_adapter(folder, base="", **more):
    make_files(folder, {"adapter_model.safetensors": MIB + 7, "README.md": 9, "optimizer.pt": 9})
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), **more}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def base(tmp_path):
    make_files(tmp_path / "base", BASE, seed=1)
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path, base):
    return make_adapter(tmp_path / "lora", base)


def fetched(manifest, root):
    """Return the digest, the bytes read, and the files, by two nodes that share the work."""

    async def scenario():
        async with nodes(root, 2) as (stores, peers):
            both = await fetch_all(stores, peers, manifest)
            files = {
                path.relative_to(both[0].folder).as_posix(): path.read_bytes()
                for path in both[0].folder.rglob("*")
                if path.is_file()
            }
            [digest] = {one.digest for one in both}
            return digest, sum(one.remote_bytes for one in both), files

    return asyncio.run(scenario())


def expected_files(base, adapter):
    found = {name: (base / name).read_bytes() for name in BASE}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        found[f"adapter/{name}"] = (adapter / name).read_bytes()
    return found


def test_base_and_adapter_are_fetched_once_each_into_one_folder(base, adapter, tmp_path):
    manifest = describe(str(adapter))
    assert (manifest.source, manifest.adapter) == (str(base), str(adapter))
    _, remote_bytes, files = fetched(manifest, tmp_path / "memory")
    assert files == expected_files(base, adapter)
    assert remote_bytes == manifest.size_bytes == sum(map(len, files.values()))


def test_the_digest_covers_both_and_no_place(base, adapter, tmp_path):
    digest, _, _ = fetched(describe(str(adapter)), tmp_path / "memory-0")
    alone, _, _ = fetched(describe(str(base)), tmp_path / "memory-1")
    adapter.rename(tmp_path / "elsewhere")
    base.rename(tmp_path / "other")
    moved = describe(str(tmp_path / "elsewhere"), base=str(tmp_path / "other"))
    assert fetched(moved, tmp_path / "memory-2")[0] == digest != alone
    for folder, name in (("elsewhere", "adapter_model"), ("other", "model")):
        weights = tmp_path / folder / f"{name}.safetensors"
        before, stamp = weights.read_bytes(), stamp_of(moved, 0.0)
        weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert fetched(moved, tmp_path / f"memory-{folder}")[0] != digest
        assert stamp_of(moved, 0.0) != stamp
        weights.write_bytes(before)


def test_both_may_lie_behind_urls(base, adapter, tmp_path):
    with storage_over_http(tmp_path, failing=0.2) as storage:
        manifest = describe(f"{storage.url}/lora", base=f"{storage.url}/base")
        assert fetched(manifest, tmp_path / "memory")[2] == expected_files(base, adapter)


def test_what_is_wrong_with_an_adapter_is_one_sentence_with_the_way(base, adapter, tmp_path):
    with pytest.raises(BadUse, match=r"is not a PEFT adapter .* --base"):
        describe(str(base), base=str(base))
    unnamed = make_adapter(tmp_path / "unnamed")
    with pytest.raises(BadUse, match=r"names no base\. Give its folder: --base FOLDER"):
        describe(str(unnamed))
    away = make_adapter(tmp_path / "away", "org/llama")
    with pytest.raises(
        NotFound, match=r"a PEFT adapter of org/llama, which is not here.*--base FOLDER"
    ):
        describe(str(away))
    upon = make_adapter(tmp_path / "upon", adapter)
    with pytest.raises(BadUse, match="is an adapter, too"):
        describe(str(upon))
    (away / "adapter_config.json").write_text("[")
    with pytest.raises(BadUse, match=r"adapter_config.json of .* is unreadable"):
        describe(str(away))
    (away / "adapter_model.safetensors").rename(away / "adapter_model.bin")
    with pytest.raises(BadUse, match=r"without adapter_model.safetensors"):
        describe(str(away))
