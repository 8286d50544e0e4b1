"""Killed data-loader workers and data sets that cannot be read."""

from failure_lab.program import Program

_LOADER = """\
import mmap
import os
import signal
import sys

import torch
from torch.utils.data import Dataset


class Tokens(Dataset):
    def __init__(self, how, length=64):
        self.how, self.length = how, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == 40:
            fail(self.how)
        return torch.full((16,), float(index))


def fail(how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "bus":
        with open(f"shm-{os.getpid()}", "w+b") as file:
            file.truncate(mmap.PAGESIZE)
            area = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            file.truncate(0)
            area[0]
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "gone":
        os._exit(9)
"""
"""A data set with a sample that ends the worker that reads it."""


def _loop(how: str, workers: int = 2) -> str:
    return f"""
        from torch.utils.data import DataLoader

        from token_data import Tokens

        tokens = Tokens({how!r} if RANK == WORLD - 1 else "never")
        loader = iter(DataLoader(tokens, batch_size=4, num_workers={workers}))
        for step in training(16):
            batch = next(loader)
        """


_KILLED = (
    Program(
        id="dataloader-worker-killed",
        reason="DataloaderKilled",
        cause="A data-loader worker was killed (SIGKILL).",
        root=r"is killed by signal: Killed|exited unexpectedly",  # whoever looks first says so
        accept_reasons=("OutOfMemoryError",),
        restart_helps=True,
        faulty={"rank": 1},
        ranks=2,
        dialect="megatron",
        script=_loop("killed"),
        files={"token_data.py": _LOADER},
    ),
    Program(
        id="dataloader-bus-error",
        reason="DataloaderKilled",
        cause="A data-loader worker met a bus error: shared memory ran short.",
        root=r"bus error|signal: Bus error",
        accept_reasons=("OutOfMemoryError",),
        dialect="hf",
        name="run_mlm.py",
        script=_loop("bus"),
        files={"token_data.py": _LOADER},
    ),
    Program(
        id="dataloader-segfault",
        reason="DataloaderKilled",
        cause="A decoder crashed inside a data-loader worker.",
        root=r"signal: Segmentation fault|Unexpected segmentation fault",
        restart_helps=True,
        faulty={"rank": 1},
        ranks=2,
        dialect="lightning",
        prefix="[rank${rank}]:",
        script=_loop("segfault", workers=1),
        files={"token_data.py": _LOADER},
    ),
    Program(
        id="dataloader-exited",
        reason="DataloaderKilled",
        cause="A data-loader worker left with exit code 9.",
        root=r"exited unexpectedly",
        restart_helps=True,
        launcher="python",
        dialect="plain",
        name="train_vlm.py",
        script=_loop("gone", workers=3),
        files={"token_data.py": _LOADER},
    ),
)

_UNREADABLE = (
    Program(
        id="dataset-new-columns",
        reason="DatasetLoadingError",
        cause="One file of the instruction set has a column that the others have not.",
        root=r"DatasetGenerationCastError|DatasetGenerationError|CastError: Couldn't cast",
        ranks=2,
        dialect="hf",
        name="sft.py",
        files={
            "data/part0.jsonl": "".join(
                f'{{"prompt": "q{n}", "answer": "a{n}"}}\n' for n in range(40)
            ),
            "data/part1.jsonl": "".join(
                f'{{"prompt": "q{n}", "rating": {n}}}\n' for n in range(40)
            ),
        },
        script="""
        from datasets import load_dataset

        join()
        rows = load_dataset("json", data_files="data/*.jsonl", split="train", cache_dir=f"cache-{RANK}")
        """,
    ),
    Program(
        id="dataset-not-parquet",
        reason="DatasetLoadingError",
        cause="A shard of the data set is no Parquet file: it was cut short while it was copied.",
        root=r"ArrowInvalid",
        dialect="titan",
        name="train.py",
        files={"shards/part-00017.parquet": b"PAR1" + bytes(range(256)) * 16},
        script="""
        import glob

        import pyarrow.parquet

        for step in training(3):
            pass
        for path in sorted(glob.glob("shards/*.parquet")):
            pyarrow.parquet.read_table(path, columns=["tokens"])
        """,
    ),
    Program(
        id="dataset-no-dataset-folder",
        reason="DatasetLoadingError",
        cause="The folder of the tokenized set holds no data set.",
        root=r"is neither a",
        accept_reasons=("FileNotFoundError",),
        ranks=2,
        dialect="deepspeed",
        files={
            "tokenized/readme.txt": """\
state.json went missing
"""
        },
        script="""
        from datasets import load_from_disk

        train = load_from_disk("tokenized")
        """,
    ),
    Program(
        id="dataset-index-magic",
        reason="DatasetLoadingError",
        cause="The index of a memory-mapped data set is no index.",
        root=r"AssertionError: bad header, cannot read",
        accept_reasons=("AssertionError", "ValueError"),
        ranks=2,
        dialect="megatron",
        prefix="[default${local_rank}]:",
        name="pretrain_gpt.py",
        files={
            "corpus_text_document.idx": b"\x00" * 512,
            "indexed_dataset.py": """\
import struct

MAGIC = b"MMIDIDX\\x00\\x00"


class _IndexReader:
    def __init__(self, path):
        with open(path, "rb") as stream:
            header = stream.read(9)
            assert header == MAGIC, f"bad header, cannot read: {path}"
            self.version = struct.unpack("<Q", stream.read(8))[0]


class IndexedDataset:
    def __init__(self, prefix):
        self.index = _IndexReader(prefix + ".idx")
""",
        },
        script="""
        from indexed_dataset import IndexedDataset

        join()
        print("> building train, validation, and test datasets for GPT ...", flush=True)
        IndexedDataset("corpus_text_document")
        """,
    ),
    Program(
        id="dataset-remote-offline",
        reason="DatasetLoadingError",
        cause="The named data set is neither in the cache nor to be had from the hub.",
        root=r"ConnectionError: Couldn't reach|doesn't exist on the Hub|OfflineModeIsEnabled",
        accept_reasons=("ConnectionError", "NetworkError", "FileNotFoundError"),
        launcher="python",
        dialect=None,
        name="prepare_data.py",
        script="""
        from datasets import load_dataset

        print("downloading allenai/c4 (en)", flush=True)
        load_dataset("allenai/c4", "en", split="train", streaming=False)
        """,
    ),
)

PROGRAMS = (*_KILLED, *_UNREADABLE)
