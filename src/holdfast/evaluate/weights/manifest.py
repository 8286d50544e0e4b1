"""Which bytes a model is made of: its files, cut into chunks that nodes read and exchange."""

import msgspec

CHUNK_BYTES = 64 * 1024 * 1024


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
        name_map: for "dcp": the conversion's map of names, as its file's text; empty for none.
        digests: chunk to XXH3-128 in hex, where the source states them; empty where the readers find them out.
    """

    source: str
    form: str
    files: list[ModelFile]
    chunks: list[Chunk]
    hf_config: dict[str, bytes] = {}
    name_map: str = ""
    digests: list[str] = []
