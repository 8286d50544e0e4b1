"""Define the coordinator's configuration file, read at every start."""

from pathlib import Path

import msgspec

from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.suite import Suite

DONE, FAILED, LEFT, UNWRITABLE = 0, 3, 4, 5
"""Exit codes of a coordinator that ended on purpose: all done; failed; the command is gone; the
disk is full or failing. 1 is the code of a crash."""


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Configure the coordinator of an evaluation.

    Attributes:
        evaluation_id: the id of the evaluation.
        suite: the suite to run.
        spec: the engines to use.
        engines_per_node: the engines on each node; 0 for one for each `tensor_parallel` GPUs,
            at least one.
        nodes: the expected number of nodes; fewer or more may come.
        folder: the evaluation's folder, with the same path on every node.
        journals: the folder of all journals.
        listen_host: the address to listen on; the port is free at the first start and the same
            after a restart.
        metric_slots: metrics at a time on a node; 0 for its number of cores.
        linger_s: seconds for which begun work may continue after the command is gone.
        silent_s: seconds of silence after which an engine counts as hung and is restarted.
        settle_s: after a restart of the coordinator, the seconds for engines to connect and
            report their requests; shorter once all have reported. Requests of slower engines may be
            answered twice.
        gather_s: seconds for which the first node waits for the others, so that each reads a
            share of the weights.
        certify: the reference for canaries after a swap: "beside" (a fresh engine beside the
            others) or "first" (the first engine to change is restarted).
        max_read_mib_s: the limit in MiB/s on reading the next checkpoint during an evaluation;
            0 for none.
        drop_stale: True if a newer model ends the evaluation of models that have not begun.
        is_stream: True if more models will come.
        rescore: True to score the recorded answers without engines.
    """

    evaluation_id: str
    suite: Suite
    spec: EngineSpec
    engines_per_node: int
    nodes: int
    folder: str
    journals: str
    listen_host: str = "127.0.0.1"
    metric_slots: int = 0
    linger_s: float = 60.0
    silent_s: float = 30.0
    settle_s: float = 1.5
    gather_s: float = 10.0
    certify: str = "beside"
    max_read_mib_s: float = 0.0
    drop_stale: bool = False
    is_stream: bool = False
    rescore: bool = False


class CoordinatorFiles:
    """Name the files of a coordinator, below `FOLDER/state`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "state"
        self.config = self.folder / "config.msgpack"
        self.token = self.folder / "token"
        self.address = self.folder / "address"
        """The host:port of the coordinator, written once it listens."""
        self.models = self.folder / "models"
        """Files for each model: its message, the digest of its weights, its canaries, and its
        end."""
        self.results = self.folder / "results"
        """One file for each ended task of a model."""
        self.history = self.folder / "history.json"
        """The history of the suite's samples from before this run."""
        self.learned = self.folder / "learned.json"
        """The history including this run."""
        self.curve = self.folder / "curve.json"
        """The cost curve that the first ready engine measured."""


def task_names(suite: Suite) -> list[str]:
    """Name the suite's entries for the history; an entry with a used name gets a number."""
    names: list[str] = []
    for entry in suite.entries:
        name = f"{entry.harness}:{entry.name}"
        names.append(name if name not in names else f"{name}#{len(names)}")
    return names


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CoordinatorConfig)


def encode_config(config: CoordinatorConfig) -> bytes:
    """Encode a configuration for its file."""
    return _encoder.encode(config)


def decode_config(data: bytes) -> CoordinatorConfig:
    """Decode a configuration file.

    Raises:
        msgspec.DecodeError: the data is not a configuration.
    """
    return _decoder.decode(data)
