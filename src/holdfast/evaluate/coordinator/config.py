"""Define the coordinator's configuration file, which is read at every start."""

from pathlib import Path

import msgspec

from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.suite import Suite

DONE, FAILED, LEFT, UNWRITABLE = 0, 3, 4, 5
"""Exit codes of a coordinator that ended on purpose.

In this order: all work is done; the evaluation failed; the command is gone; the disk is full or
failing. The exit code 1 means a crash.
"""


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Configure the coordinator of an evaluation.

    Attributes:
        evaluation_id: the id of the evaluation.
        suite: the suite to run.
        spec: the kind of engine and its settings.
        engines_per_node: the number of engines on each node; 0 for one engine per `tensor_parallel`
            GPUs, but at least one.
        nodes: the expected number of nodes; fewer or more may connect.
        folder: the evaluation's folder, with the same path on every node.
        journals: the folder of all journals.
        listen_host: the address to listen on; the first start takes a free port, and a restart uses
            the same port again.
        metric_slots: the number of metrics that a node computes at a time; 0 for its number of
            cores.
        linger_s: the seconds for which engines may finish begun requests after the command is gone.
        silent_s: an engine that sends nothing for this many seconds counts as hung and is
            restarted.
        settle_s: the seconds after a restart of the coordinator in which engines may connect and
            report the requests that they hold; the wait ends early once all have reported. Requests
            of engines that report later may be answered twice.
        gather_s: the seconds for which the first node waits for the other nodes, so that each node
            reads a share of the weights.
        certify: which fresh load certifies a swap: "beside" for the load of a spare engine beside
            the others, "first" for a restart of the first engine that should swap.
        max_read_mib_s: the limit in MiB/s on reading the next checkpoint while one is evaluated; 0
            for no limit.
        drop_stale: True if a newer model cancels the models whose evaluation has not begun.
        is_stream: True if more models will come.
        rescore: True to compute the scores from the answers in the journal, without engines.
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
    """Name the files of a coordinator, all below `FOLDER/state`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "state"
        self.config = self.folder / "config.msgpack"
        self.token = self.folder / "token"
        self.address = self.folder / "address"
        """Holds host:port of the coordinator; written once the coordinator listens."""
        self.models = self.folder / "models"
        """Holds each model's `AddModel`, the digest of its weights, its canaries and its end."""
        self.results = self.folder / "results"
        """Holds one file for each ended task of each model."""
        self.history = self.folder / "history.json"
        """Holds the history of the suite's samples from before this evaluation."""
        self.learned = self.folder / "learned.json"
        """Holds the history of the suite's samples including this evaluation."""
        self.curve = self.folder / "curve.json"
        """Holds the cost curve that the first ready engine measured."""


def task_names(suite: Suite) -> list[str]:
    """Name the suite's entries for the history; an entry whose name is taken gets a number."""
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
