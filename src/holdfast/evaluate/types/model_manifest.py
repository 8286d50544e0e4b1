"""Which bytes a model is made of: its files, cut into chunks that nodes read and exchange."""

from collections.abc import Iterable

import msgspec
import xxhash

from holdfast.evaluate.types.errors import EvaluationError

CHUNK_BYTES = 64 * 1024 * 1024
"""Chunks are at most this long."""
SMALLEST_CHUNK_BYTES = 1024 * 1024
WANTED_CHUNKS = 256
"""Enough for 64 nodes to share a model out evenly."""


class DamagedModel(EvaluationError):
    """A model's bytes are not what they should be, or make no model: no node can have it."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A file of a model; `path` is relative to its folder, with `/`."""

    path: str
    size_bytes: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A range of a file: what one node reads from the source at a time."""

    file: int
    offset: int
    size_bytes: int


class ModelManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to read to have a model, and how to make a Hugging Face folder of it.

    Attributes:
        source: a folder, or the URL of one (file, http, https, s3, gs, az).
        form: "huggingface" (the files are the folder) or "dcp" (they are converted on the node).
        files: what is read, in this order; bytes that no chunk covers are not needed.
        chunks: what is read of them.
        hf_config: for "dcp": the small files of the folder to make (config, tokenizer), path to content.
        name_map: for "dcp": the conversion, settled (`as_text` of what `settle_conversion` returns).
        digests: chunk to XXH3-128 in hex, where the source states them; empty where the readers find them out.
        file_digests: file, of those that are read whole, to its checksum, where the source states them.
        converted_bytes: for "dcp": the size of the folder to make, without its small files.
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

    @property
    def size_bytes(self) -> int:
        """What is read of the source, once."""
        return sum(chunk.size_bytes for chunk in self.chunks)

    def fingerprint(self) -> bytes:
        """XXH3-128 of all that this says: nodes exchange chunks of equal fingerprint only.

        With its source, since two checkpoints of one run differ in nothing else, and both come at the same time.
        """
        return xxhash.xxh3_128_digest(_encoder.encode(self))


def chunk_size_for(model_bytes: int) -> int:
    """How large to make the chunks: a power of two from 1 to 64 MiB, for some hundreds of them.

    By the model's size alone, never by the number of nodes, since the digest of a model depends on it.
    """
    size_bytes = SMALLEST_CHUNK_BYTES
    while size_bytes < CHUNK_BYTES and size_bytes * WANTED_CHUNKS < model_bytes:
        size_bytes *= 2
    return size_bytes


def cut(file: int, offset: int, size_bytes: int, chunk_bytes: int) -> list[Chunk]:
    """A range of a file as chunks of at most `chunk_bytes`, in order."""
    end = offset + size_bytes
    return [
        Chunk(file=file, offset=start, size_bytes=min(chunk_bytes, end - start))
        for start in range(offset, end, chunk_bytes)
    ]


def model_digest(manifest: ModelManifest, chunk_digests: Iterable[bytes]) -> str:
    """XXH3-128, in hex, over the digests of all chunks in order, and over what they are chunks of.

    Equal content cut alike gives the same digest wherever it lies and whoever read it.
    """
    checksum = xxhash.xxh3_128(_encoder.encode(msgspec.structs.replace(manifest, source="")))
    for digest in chunk_digests:
        checksum.update(digest)
    return checksum.hexdigest()


_encoder = msgspec.msgpack.Encoder(order="deterministic")
