"""Read ranges from folders, HTTP and buckets, through real servers that fail."""

import asyncio

import pytest
from weights_world import at_once, make_files, storage_over_http

from holdfast.core.errors import BadUse, NotFound
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.weights.source import READ_ATTEMPTS, open_source

SIZES = {"model/config.json": 10, "model/a b.safetensors": 100_000}


@pytest.fixture
def files(tmp_path):
    make_files(tmp_path / "bucket", SIZES)
    return tmp_path / "bucket"


def urls(files, storage):
    return {
        "folder": str(files / "model"),
        "file": f"file://{files}/model",
        "http": f"{storage.url}/model",
    }


@pytest.mark.parametrize("kind", ["folder", "file", "http"])
def test_ranges_are_read_as_they_are(files, kind):
    content = (files / "model/a b.safetensors").read_bytes()

    async def use(source):
        assert await source.size_bytes("a b.safetensors") == 100_000
        assert bytes(await source.read("a b.safetensors", 3, 5)) == content[3:8]
        assert bytes(await source.read("a b.safetensors", 0, 100_000)) == content
        assert bytes(await source.read("a b.safetensors", 7, 0)) == b""
        with pytest.raises(FileNotFoundError):
            await source.size_bytes("b.safetensors")
        with pytest.raises(FileNotFoundError):
            await source.read("b.safetensors", 0, 1)
        return await source.sizes()

    with storage_over_http(files) as storage:
        sizes = asyncio.run(use(open_source(urls(files, storage)[kind], sleep=at_once)))
        assert sizes == (
            None if kind == "http" else {"config.json": 10, "a b.safetensors": 100_000}
        )


@pytest.mark.parametrize("failing", [0.3, 0.6])
def test_storage_that_fails_now_and_then_only_slows_things(files, failing):
    content = (files / "model/a b.safetensors").read_bytes()
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    async def use(source):
        parts = await asyncio.gather(
            *(source.read("a b.safetensors", at, 1000) for at in range(0, 100_000, 1000))
        )
        return b"".join(bytes(part) for part in parts)

    with storage_over_http(files, failing=failing) as storage:
        assert asyncio.run(use(open_source(f"{storage.url}/model", sleep=sleep))) == content
        assert storage.failed > 10
        assert len(pauses) == storage.failed
        assert max(pauses) > 2 * min(pauses), "pauses grow"


def test_storage_that_always_fails_is_one_sentence_after_bounded_attempts(files):
    with storage_over_http(files, failing=1.0) as storage:
        source = open_source(f"{storage.url}/model", sleep=at_once)
        with pytest.raises(EvaluationError) as error:
            asyncio.run(source.read("config.json", 0, 10))
        assert len(storage.requests) == READ_ATTEMPTS
    said = str(error.value)
    assert f"failed {READ_ATTEMPTS} times" in said
    assert f"{storage.url}/model/config.json" in said
    assert "Check that the storage can be reached" in said
    assert "\n" not in said


def test_a_file_that_ends_too_early_is_not_taken_for_whole(files):
    source = open_source(str(files / "model"), attempts=2, sleep=at_once)
    with pytest.raises(EvaluationError, match="5 bytes came instead of 6"):
        asyncio.run(source.read("config.json", 5, 6))


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(NotFound, match="There is no folder"):
        asyncio.run(open_source(str(tmp_path / "no")).sizes())


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(BadUse, match="Holdfast cannot read ftp:// URLs"):
        open_source("ftp://host/model")
    with pytest.raises(BadUse, match="is not the address of a folder"):
        open_source("http://[/model")


def test_a_bucket_is_listed_and_read_by_the_standard_environment(files, monkeypatch):
    """The server implements as much of S3 as needed, and checks no signature."""
    for failing in (0.0, 0.3):
        with storage_over_http(files.parent, failing=failing, buckets=True) as storage:
            monkeypatch.setenv("AWS_ENDPOINT_URL", storage.url)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            monkeypatch.setenv("AWS_REGION", "us-east-1")

            async def use(source):
                assert await source.sizes() == {"config.json": 10, "a b.safetensors": 100_000}
                assert await source.size_bytes("config.json") == 10
                with pytest.raises(FileNotFoundError):
                    await source.read("missing", 0, 1)
                return bytes(await source.read("a b.safetensors", 50, 100))

            read = asyncio.run(use(open_source("s3://bucket/model", sleep=at_once)))
            assert read == (files / "model/a b.safetensors").read_bytes()[50:150]
            assert any(path == "bucket/model/a b.safetensors" for _, path, _ in storage.requests)
