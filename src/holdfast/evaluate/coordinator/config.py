"""What the coordinator is told once, as a file: it reads it again whenever it is started anew."""

from pathlib import Path

import msgspec

from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.suite import Suite

DONE, FAILED, LEFT, UNWRITABLE = 0, 3, 4, 5
"""Exit codes of a coordinator that meant to end: all done; it cannot be done; the command is gone; its disk is full or
failing. Not 1, a crash's."""


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An evaluation, as its coordinator sees it.

    Attributes:
        evaluation_id: names the evaluation.
        suite: what to run.
        spec: which engines.
        engines_per_node: how many of them on each node; 0 for one a `tensor_parallel` GPUs, at least one.
        nodes: how many nodes are expected; fewer may come, and more.
        folder: the evaluation's own, seen by every node under the same path.
        journals: root of all journals.
        listen_host: the address to listen on; port 0 the first time, the same one again later.
        metric_slots: metrics at a time on a node; 0 for its cores.
        linger_s: how long work that was begun may go on when the command is gone.
        silent_s: how long an engine may be silent before it is taken for hung and started anew.
        settle_s: how long, after the coordinator was restarted, engines may take to dial again and say what they have;
            less where all have said so. What an engine that takes longer has finished may be asked of another.
        gather_s: how long the first node waits for the others, so that each reads its share of the weights.
        certify: how a swap's canaries get their reference: "beside" (a fresh engine beside the others) or "first"
            (the first engine to change is started anew).
        max_read_mib_s: of the next checkpoint, read while the one before is evaluated; 0 for no limit.
        drop_stale: whether a newer model ends the evaluation of those that have not begun.
        is_stream: whether more models are to be expected.
        rescore: scores from the answers that there are; no engine is started.
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
    """Every file of a coordinator's own, below `FOLDER/state`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "state"
        self.config = self.folder / "config.msgpack"
        self.token = self.folder / "token"
        self.address = self.folder / "address"
        """host:port it listens on, written when it does."""
        self.models = self.folder / "models"
        """A file for each model that was added, what its weights are, what its canaries are, and how it ended."""
        self.results = self.folder / "results"
        """One file a task of a model that ended."""
        self.history = self.folder / "history.json"
        """What was known of the suite's samples before."""
        self.learned = self.folder / "learned.json"
        """What is known of them now."""
        self.curve = self.folder / "curve.json"
        """What work costs on an engine, as the first one that was ready measured it."""


def task_names(suite: Suite) -> list[str]:
    """The suite's entries as its history names them: two entries of one name are told apart by their order."""
    names: list[str] = []
    for entry in suite.entries:
        name = f"{entry.harness}:{entry.name}"
        names.append(name if name not in names else f"{name}#{len(names)}")
    return names


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CoordinatorConfig)


def encode_config(config: CoordinatorConfig) -> bytes:
    """The file's content."""
    return _encoder.encode(config)


def decode_config(data: bytes) -> CoordinatorConfig:
    """The config of a file.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _decoder.decode(data)
