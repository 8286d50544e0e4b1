"""List the files of a model, cut into chunks that nodes read and exchange."""

from collections.abc import Iterable

import msgspec
import xxhash

from holdfast.evaluate.types.errors import EvaluationError

CHUNK_BYTES = 64 * 1024 * 1024
"""The size of the largest chunk."""
SMALLEST_CHUNK_BYTES = 1024 * 1024
WANTED_CHUNKS = 256
"""The number of chunks to aim for: enough for 64 nodes to share a model evenly."""


class DamagedModel(EvaluationError):
    """The model's files are corrupt: they differ from their digests, or form no model.

    No node can load such a model.
    """


ADAPTER_FOLDER = "adapter"
"""The subfolder of a model's folder that holds its PEFT adapter."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A file of a model; `path` is relative to the model's folder and uses `/`."""

    path: str
    size_bytes: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A range of bytes of a file, which one node reads from the source."""

    file: int
    offset: int
    size_bytes: int


class ModelManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Define which bytes to read, and how to make a Hugging Face folder of them.

    Attributes:
        source: the model's folder, as a path or a URL (file, http, https, s3, gs, az).
        adapter: the folder of a PEFT adapter, as a path or a URL; its files are listed below
            `ADAPTER_FOLDER`. Empty without an adapter.
        form: "huggingface" if the files already are a Hugging Face folder; "dcp" if each node must
            convert the files.
        files: the files to read, in this order; bytes that are in no chunk are not needed.
        chunks: the byte ranges to read.
        hf_config: for "dcp", the small files of the converted folder (config, tokenizer): path to
            content.
        name_map: for "dcp", how to convert the tensors (`as_text` of the result of
            `settle_conversion`).
        digests: XXH3-128 of each chunk in hex, if the source has digests; empty if each reader
            computes the digests.
        file_digests: file to the checksum of the whole file, if the source has checksums.
        converted_bytes: for "dcp", the size of the converted folder, without its small files.
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
        """Return the folder or URL that holds a file, and the file's path relative to it."""
        inside = path.removeprefix(f"{ADAPTER_FOLDER}/")
        return (self.adapter, inside) if self.adapter and inside != path else (self.source, path)

    @property
    def size_bytes(self) -> int:
        """The total size of the chunks: the bytes that must be read from the source once."""
        return sum(chunk.size_bytes for chunk in self.chunks)

    def fingerprint(self) -> bytes:
        """Return XXH3-128 of the whole manifest; nodes exchange chunks only of equal fingerprint.

        The sources are part of the fingerprint, because two checkpoints of one run may have equal
        manifests except for their sources, and may be fetched at the same time.
        """
        return xxhash.xxh3_128_digest(_encoder.encode(self))


def chunk_size_for(model_bytes: int) -> int:
    """Choose the size of a model's chunks: a power of two from 1 to 64 MiB.

    The size gives a few hundred chunks for most models. The size depends only on the model's size
    and never on the number of nodes, since the chunks determine the model's digest.
    """
    size_bytes = SMALLEST_CHUNK_BYTES
    while size_bytes < CHUNK_BYTES and size_bytes * WANTED_CHUNKS < model_bytes:
        size_bytes *= 2
    return size_bytes


def cut(file: int, offset: int, size_bytes: int, chunk_bytes: int) -> list[Chunk]:
    """Cut a byte range of a file into chunks of at most `chunk_bytes`, in order."""
    end = offset + size_bytes
    return [
        Chunk(file=file, offset=start, size_bytes=min(chunk_bytes, end - start))
        for start in range(offset, end, chunk_bytes)
    ]


def model_digest(manifest: ModelManifest, chunk_digests: Iterable[bytes]) -> str:
    """Return XXH3-128, in hex, over the chunks' digests and the manifest without its sources.

    Equal content in equal chunks has the same digest, from whichever storage and by whichever node
    it was read.
    """
    checksum = xxhash.xxh3_128(
        _encoder.encode(msgspec.structs.replace(manifest, source="", adapter=""))
    )
    for digest in chunk_digests:
        checksum.update(digest)
    return checksum.hexdigest()


_encoder = msgspec.msgpack.Encoder(order="deterministic")
