"""List the files of a model, cut into chunks that nodes read and exchange."""

from collections.abc import Iterable

import msgspec
import xxhash

from holdfast.evaluate.types.errors import EvaluationError

CHUNK_BYTES = 64 * 1024 * 1024
"""The largest size of a chunk."""
SMALLEST_CHUNK_BYTES = 1024 * 1024
WANTED_CHUNKS = 256
"""Enough for 64 nodes to share a model evenly."""


class DamagedModel(EvaluationError):
    """A model's bytes differ from their digests, or form no model: no node can load it."""


ADAPTER_FOLDER = "adapter"
"""The subfolder of a model's folder with its PEFT adapter."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A file of a model; `path` is relative to the model's folder, with `/`."""

    path: str
    size_bytes: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A range of a file, the unit that one node reads from the source."""

    file: int
    offset: int
    size_bytes: int


class ModelManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Define which bytes to read, and how to make a Hugging Face folder of them.

    Attributes:
        source: a folder, or the URL of one (file, http, https, s3, gs, az).
        adapter: the same, of a PEFT adapter: the files below `ADAPTER_FOLDER`; empty without.
        form: "huggingface" (the files are the folder) or "dcp" (the node converts the files).
        files: the files to read, in this order; bytes outside of all chunks are not needed.
        chunks: the ranges to read.
        hf_config: for "dcp": the small files of the new folder (config, tokenizer), path to
            content.
        name_map: for "dcp": the settled conversion (`as_text` of the result of
            `settle_conversion`).
        digests: chunk to XXH3-128 in hex, if the source has them; empty if the readers compute
            them.
        file_digests: file to checksum, for whole files, if the source has them.
        converted_bytes: for "dcp": the size of the new folder, without its small files.
    """

    source: str
    form: str
    files: list[ModelFile]
    chunks: list[Chunk]
    hf_config: dict[str, bytes] = {}
    name_map: str = ""
    digests: list[str] = []
    file_digests: dict[str, str] = {}
    converted_bytes: int = 0
    adapter: str = ""

    def place_of(self, path: str) -> tuple[str, str]:
        """Return the folder or URL of a file, and the path of the file in that place."""
        inside = path.removeprefix(f"{ADAPTER_FOLDER}/")
        return (self.adapter, inside) if self.adapter and inside != path else (self.source, path)

    @property
    def size_bytes(self) -> int:
        """The bytes to read from the source, once."""
        return sum(chunk.size_bytes for chunk in self.chunks)

    def fingerprint(self) -> bytes:
        """Return XXH3-128 of the whole manifest: nodes exchange chunks of equal fingerprint only.

        The sources are part of the fingerprint: two checkpoints of one run differ in nothing else and
        are fetched at the same time.
        """
        return xxhash.xxh3_128_digest(_encoder.encode(self))


def chunk_size_for(model_bytes: int) -> int:
    """Choose the size of chunks: a power of two from 1 to 64 MiB, for some hundreds of chunks.

    The size depends on the model's size alone, never on the number of nodes, since it is part of
    the model's digest.
    """
    size_bytes = SMALLEST_CHUNK_BYTES
    while size_bytes < CHUNK_BYTES and size_bytes * WANTED_CHUNKS < model_bytes:
        size_bytes *= 2
    return size_bytes


def cut(file: int, offset: int, size_bytes: int, chunk_bytes: int) -> list[Chunk]:
    """Cut a range of a file into chunks of at most `chunk_bytes`, in order."""
    end = offset + size_bytes
    return [
        Chunk(file=file, offset=start, size_bytes=min(chunk_bytes, end - start))
        for start in range(offset, end, chunk_bytes)
    ]


def model_digest(manifest: ModelManifest, chunk_digests: Iterable[bytes]) -> str:
    """Return XXH3-128, in hex, over the manifest without its sources and all chunk digests.

    Equal content in equal chunks gives the same digest, from any storage and any reader.
    """
    checksum = xxhash.xxh3_128(
        _encoder.encode(msgspec.structs.replace(manifest, source="", adapter=""))
    )
    for digest in chunk_digests:
        checksum.update(digest)
    return checksum.hexdigest()


_encoder = msgspec.msgpack.Encoder(order="deterministic")
