"""Describe Hugging Face folders and checkpoints, in folders and over HTTP, and refuse all else."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from weights_world import fetch_all, folder_digest, make_files, nodes, storage_over_http

from holdfast import Checkpointer
from holdfast.core.clock import SystemClock
from holdfast.core.errors import BadUse, CheckpointError, NotFound
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.model_manifest import DamagedModel, chunk_size_for, cut, model_digest
from holdfast.evaluate.weights.describe import describe

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    sizes = {"config.json": 20, "tokenizer.json": 30, "model.safetensors": 2 * MIB + 5}
    extra = {
        "README.md": 9,
        "model.py": 9,
        "pytorch_model.bin": 9,
        ".git/config.json": 9,
        "runs/config.json": 9,
    }
    make_files(tmp_path / "llama", {**sizes, **extra, "additional_chat_templates/tools.jinja": 4})
    return tmp_path / "llama"


def paths(manifest):
    return [file.path for file in manifest.files]


def test_a_hugging_face_folder_is_its_configuration_tokenizer_and_weights(folder):
    manifest = describe(str(folder))
    assert manifest.source == str(folder)
    assert manifest.form == "huggingface"
    assert paths(manifest) == [
        "additional_chat_templates/tools.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert [chunk.size_bytes for chunk in manifest.chunks] == [4, 20, MIB, MIB, 5, 30]
    assert manifest.size_bytes == sum(file.size_bytes for file in manifest.files)


def test_over_http_the_known_files_are_asked_for(folder, tmp_path):
    with storage_over_http(tmp_path, failing=0.3) as storage:
        manifest = describe(f"{storage.url}/llama", chunk_bytes=MIB)
        assert paths(manifest) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert manifest.size_bytes == 2 * MIB + 55
        with pytest.raises(BadUse, match="is not a model"):
            describe(f"{storage.url}/no")


def test_several_files_of_weights_are_those_that_the_index_names(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    make_files(folder, {"a.safetensors": 10, "b.safetensors": 10, "consolidated.safetensors": 10})
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = [
        "a.safetensors",
        "b.safetensors",
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert [path for path in paths(describe(str(folder))) if "jinja" not in path] == expected
    with storage_over_http(tmp_path) as storage:
        assert paths(describe(f"{storage.url}/llama")) == expected
    (folder / "b.safetensors").unlink()
    with pytest.raises(BadUse, match=r"lacks b.safetensors, which its .* names \(1 of 2 files\)"):
        describe(str(folder))
    for content, said in [
        ({"weight_map": {"x": "../../etc/passwd.safetensors"}}, "Do not trust it"),
        ({"weight_map": {"x": "pytorch_model.bin"}}, "Do not trust it"),
        ({"weights": 1}, "is unreadable"),
        ([], "is unreadable"),
    ]:
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        with pytest.raises(BadUse, match=said):
            describe(str(folder))


def test_chunks_are_by_the_models_size_alone():
    assert [
        chunk_size_for(size) // MIB for size in (0, MIB, 256 * MIB, 256 * MIB + 1, 1 << 40)
    ] == [1, 1, 1, 2, 64]
    assert [(each.offset, each.size_bytes) for each in cut(3, 10, 25, 10)] == [
        (10, 10),
        (20, 10),
        (30, 5),
    ]
    assert cut(0, 0, 0, 10) == []


def test_what_is_no_model_is_a_sentence_with_the_next_step(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    make_files(tmp_path / "empty", {"x": 1})
    make_files(tmp_path / "runs", {"step-0000000010/.metadata": 1, "step-0000000020/.metadata": 1})
    make_files(tmp_path / "named", {"config.json": 1, "weights.safetensors": 1})
    for error, said, model in [
        (BadUse, "holds its weights pickled (pytorch_model.bin)", folder),
        (BadUse, "it has weights.safetensors", tmp_path / "named"),
        (
            BadUse,
            "has neither config.json (a Hugging Face folder) nor .metadata",
            tmp_path / "empty",
        ),
        (BadUse, f"Give one of them: {tmp_path / 'runs'}/step-0000000020.", tmp_path / "runs"),
        (BadUse, "llama, named in it is one. Give", tmp_path),
        (BadUse, "is a file", folder / "config.json"),
        (NotFound, f"Did you mean {folder}?", tmp_path / "llam"),
        (NotFound, "Did you mean", tmp_path / "llam/sub"),
        (NotFound, "Give its folder or URL", tmp_path / "qqq"),
        (BadUse, "Holdfast cannot read hf://", "hf://llama"),
    ]:
        with pytest.raises(error) as raised:
            describe(str(model))
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)
    with pytest.raises(BadUse, match="only a checkpoint takes --hf-config"):
        describe(str(tmp_path / "named"), hf_config=str(folder))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Make a Holdfast checkpoint with a large optimizer; return it with config and model."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("trained")
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        dtype="float32",
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(10)[None]).logits.square().mean().backward()
    optimizer.step()
    config.save_pretrained(folder / "config")
    (folder / "config/tokenizer.json").write_text('{"a": 1}')
    with Checkpointer(folder / "checkpoints", every=1) as checkpointer:
        path = checkpointer.save(7, {"model": model, "optimizer": optimizer}).result()
    return Path(path), folder / "config", model


def test_of_a_checkpoint_the_models_tensors_are_read_and_not_the_optimizers(trained):
    checkpoint, config, model = trained
    manifest = describe(str(checkpoint), hf_config=str(config), chunk_bytes=10_000)
    assert manifest.form == "dcp"
    assert paths(manifest) == [".metadata", "__0_0.distcp"]
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert weights <= manifest.converted_bytes < weights + 5000
    data = [chunk for chunk in manifest.chunks if chunk.file == 1]
    # PyTorch puts about 1500 bytes around every tensor.
    assert (
        weights < sum(chunk.size_bytes for chunk in data) < weights + 2000 * len(model.state_dict())
    )
    assert sum(chunk.size_bytes for chunk in data) < manifest.files[1].size_bytes / 2.5
    assert manifest.hf_config["tokenizer.json"] == b'{"a": 1}'
    assert set(manifest.file_digests) == {".metadata"}
    with storage_over_http(checkpoint.parent) as storage:
        over_http = describe(
            f"{storage.url}/{checkpoint.name}", hf_config=str(config), chunk_bytes=10_000
        )
    assert model_digest(over_http, []) == model_digest(manifest, [])
    assert over_http.fingerprint() != manifest.fingerprint(), "another source may hold another step"


def test_a_checkpoint_that_cannot_be_described(trained, tmp_path):
    checkpoint, config, _ = trained
    with pytest.raises(BadUse, match="Give a folder with both by --hf-config"):
        describe(str(checkpoint))
    with pytest.raises(NotFound, match=r"There is no config.json in"):
        describe(str(checkpoint), hf_config=str(tmp_path))
    with pytest.raises(BadUse, match=r"name map .* cannot be read"):
        describe(str(checkpoint), hf_config=str(config), name_map=str(tmp_path / "no.toml"))
    copy = tmp_path / "step-0000000007"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    data = (copy / "__0_0.distcp").read_bytes()
    (copy / "__0_0.distcp").write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match=r"is damaged: .*Take another checkpoint"):
        describe(str(copy), hf_config=str(config))
    (copy / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="is not a file of the checkpoint"):
        describe(str(copy), hf_config=str(config))
    (copy / "__0_0.distcp").write_bytes(data)
    (copy / ".metadata").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(CheckpointError, match="made to run code"):
        describe(str(copy), hf_config=str(config))


@pytest.mark.slow  # a process a node that imports torch
def test_nodes_make_a_hugging_face_folder_of_a_checkpoint_and_let_go_of_what_they_read(
    trained, tmp_path
):
    from transformers import AutoModelForCausalLM

    checkpoint, config, model = trained
    manifest = describe(str(checkpoint), hf_config=str(config), chunk_bytes=10_000)

    async def run():
        async with nodes(tmp_path, 2, clock=SystemClock()) as (stores, peers):
            fetched = await fetch_all(stores, peers, manifest)
            assert sum(each.remote_bytes for each in fetched) == manifest.size_bytes
            assert fetched[0].digest == fetched[1].digest
            assert folder_digest(fetched[0].folder) == folder_digest(fetched[1].folder)
            loaded = AutoModelForCausalLM.from_pretrained(fetched[1].folder, dtype="auto")
            assert (fetched[1].folder / "tokenizer.json").read_text() == '{"a": 1}'
            for name, tensor in model.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], tensor)
            for store in stores:
                while list(store.memory.folder.glob("*.chunks")):
                    await asyncio.sleep(0.01)
                assert store.memory.used_bytes == manifest.converted_bytes
                assert [path.name for path in store.memory.folder.glob("model-*")] == ["model-0"]

    asyncio.run(run())


@pytest.mark.slow  # a process a node that imports torch
def test_a_checkpoint_that_cannot_be_converted_is_one_sentence(trained, tmp_path):
    checkpoint, config, _ = trained
    manifest = describe(str(checkpoint), hf_config=str(config))
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    without = type(manifest)(**{**fields, "chunks": manifest.chunks[:1]})

    async def run():
        async with nodes(tmp_path, 1) as (stores, peers):
            with pytest.raises(DamagedModel, match="could not be converted"):
                await fetch_all(stores, peers, without)
            assert not list(stores[0].memory.folder.glob("model-*"))
            assert stores[0].memory.used_bytes == 0

    asyncio.run(run())
    assert issubclass(DamagedModel, EvaluationError)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Make Hugging Face's cache with `org/tiny`, with `main` at the first commit."""
    hub = tmp_path / "hub"
    model = hub / "models--org--tiny"
    make_files(model / "blobs", {"c": 20, "w": 40})
    for commit in ("111aaa", "222bbb"):
        snapshot = model / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for name, blob in (("config.json", "c"), ("model.safetensors", "w")):
            (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / blob)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("111aaa")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    return model


def test_a_name_of_the_hub_is_found_in_its_cache(cached):
    first, second = (str(cached / "snapshots" / commit) for commit in ("111aaa", "222bbb"))
    for said in ("org/tiny", "org/tiny@main", str(cached)):
        assert describe(said).source == first
    assert describe("org/tiny@222bbb").source == second
    assert paths(describe("org/tiny")) == ["config.json", "model.safetensors"]
    with pytest.raises(NotFound, match=r"has no revision 'v2'\. It has 111aaa, 222bbb"):
        describe("org/tiny@v2")
    with pytest.raises(NotFound, match="hf download ORG/NAME"):
        describe("org/other")
    (cached / "refs" / "main").unlink()
    with pytest.raises(NotFound, match=r"no revision 'main'.*hf download org/tiny"):
        describe(str(cached))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        {"model_type": "own", "is_encoder_decoder": True},
    ],
)
def test_an_encoder_decoder_is_refused_by_name(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    named = config.get("architectures", ["own"])[0]
    with pytest.raises(BadUse, match=rf"encoder-decoder model \({named}\).*backend=seq2seq"):
        describe(str(folder))
