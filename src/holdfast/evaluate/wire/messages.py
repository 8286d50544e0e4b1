"""Define the messages between the coordinator and its peers, and their encoding over TCP.

A frame (see `core.channel`) holds msgpack, decoded into one of the types below only. The first
frame of a connection is a `Hello` with the evaluation's token; a connection without it is closed
unread. Frames are bounded. A peer that lost its connection dials again with the same name.

| role | process | sends | receives |
|---|---|---|---|
| command | `holdfast eval`, one | AddModel, Finish | Status, TaskOutcome, ModelOutcome |
| node | one agent a node | NodeReport, ModelFetched, FetchFailed, ChildExited | FetchModel, ReleaseModel, StartEngine |
| host | the harness host of a node | Prepared, TaskEnded, SampleMeasured | Prepare, RunTask, MeasureSample |
| client | one task of one model | Submit | Answers |
| engine | an engine's worker | Serving, ServeFailed, Done, GivenBack, Holding | Serve, AskEngine, TakeBack, Acked |

Every role receives `Welcome`, `Refused` and `Stop`, and sends `Alive`.
"""

import asyncio
from typing import Any

import msgspec

from holdfast.core.channel import frame, read_frame
from holdfast.core.errors import ChannelError
from holdfast.evaluate.types.engine import Curve, EngineSpec
from holdfast.evaluate.types.harness import AnsweredSample, ModelFacts, TaskResult
from holdfast.evaluate.types.model_manifest import ModelManifest
from holdfast.evaluate.types.requests import Keyed
from holdfast.evaluate.types.suite import TaskEntry

ENV_ADDRESS = "HOLDFAST_EVAL_COORDINATOR"
"""host:port of the coordinator."""
ENV_TOKEN = "HOLDFAST_EVAL_TOKEN"
ENV_OF_HOSTS = "HOLDFAST_HOST_"
"""The prefix of a node's environment variables that only its harness host receives, without the
prefix."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
HELLO_TIMEOUT_S = 10.0


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The base of all messages."""


# Everyone


class Hello(Message, frozen=True, kw_only=True):
    """The first frame; `name` is unique within its role and kept over reconnections."""

    token: str
    role: str
    name: str
    node: int = -1
    pid: int = 0
    model: int = -1
    task: int = -1


class Welcome(Message, frozen=True, kw_only=True):
    """The coordinator accepts the peer; `epoch` changes with its restarts."""

    epoch: int = 0


class Refused(Message, frozen=True, kw_only=True):
    """The coordinator refuses the peer, which must end; `why` is a sentence."""

    why: str


class Stop(Message, frozen=True, kw_only=True):
    """The peer must end; its work is not needed."""


class Alive(Message, frozen=True, kw_only=True):
    """A sign of life, once a second, from peers that may hang."""


# Command


class AddModel(Message, frozen=True, kw_only=True):
    """Evaluate the suite on one more model; `model` counts from 0.

    `manifest` is None if the engines have their own model. `folder` is the folder for files of its
    tasks, if not the evaluation's own. `tokenizer` is a folder with config and tokenizer that every
    host can read before the weights arrive; empty if there is none. `digest` and `numerics` are
    given to use only the answers kept under them.
    """

    model: int
    name: str
    manifest: ModelManifest | None = None
    folder: str = ""
    tokenizer: str = ""
    digest: str = ""
    numerics: str = ""


class Finish(Message, frozen=True, kw_only=True):
    """No more models will come: end when all are done."""


class Status(Message, frozen=True, kw_only=True):
    """The progress, twice a second, with times in seconds since the coordinator's first start."""

    now_s: float
    samples: int
    samples_done: int
    requests: int
    requests_done: int
    reused: int
    engines: int
    engines_ready: int
    nodes: int
    busy_share: float
    time_left_s: float
    bound_s: float
    state: str


class TaskOutcome(Message, frozen=True, kw_only=True):
    """A task of a model ended, with its result or its error."""

    model: int
    task: int
    result: TaskResult | None = None
    error: str = ""


class ModelOutcome(Message, frozen=True, kw_only=True):
    """All tasks of a model ended, or the model cannot be served (`error`).

    `wrong_use`: the model can never be served. `any_model`: no other model can be served either.
    `is_stale`: a newer model replaced this one.
    """

    model: int
    digest: str = ""
    numerics: str = ""
    error: str = ""
    wrong_use: bool = False
    any_model: bool = False
    is_stale: bool = False


# Node


class NodeReport(Message, frozen=True, kw_only=True):
    """The properties of a node; `store` is host:port of its chunks.

    `kind` is equal for nodes on which an engine has equal numerics (`run.node_kind`); empty if
    unknown.
    """

    host: str
    cores: int
    memory_bytes: int
    gpus: int
    store: str
    kind: str = ""


class FetchModel(Message, frozen=True, kw_only=True):
    """Fetch a model: read `owners[chunk] == node` from the source, all other chunks from peers.

    The message is repeated with other owners when a node joined or left. `peers` is node number to
    host:port of its chunks; `max_read_mib_s` 0 is no limit.
    """

    model: int
    manifest: ModelManifest
    owners: list[int]
    peers: dict[int, str]
    max_read_mib_s: float = 0.0


class ModelFetched(Message, frozen=True, kw_only=True):
    """The whole model is in `folder` of this node."""

    model: int
    folder: str
    digest: str
    remote_bytes: int
    peer_bytes: int
    seconds: float


class FetchFailed(Message, frozen=True, kw_only=True):
    """This node cannot get the model; with `final`, no other node can either.

    If the memory is full, `beside` names the models in memory; after the release of one, the node
    may get the model.
    """

    model: int
    why: str
    final: bool = False
    beside: list[int] = []


class ReleaseModel(Message, frozen=True, kw_only=True):
    """Free this model, which no engine on the node needs."""

    model: int


class StartEngine(Message, frozen=True, kw_only=True):
    """Start an engine's worker under this name; a restart has the same name."""

    name: str
    spec: EngineSpec
    index: int


class StopEngine(Message, frozen=True, kw_only=True):
    """End an engine's worker."""

    name: str


class ChildExited(Message, frozen=True, kw_only=True):
    """A child of the node ended: `role` "engine" or "host"; `tail` is the end of its output."""

    role: str
    name: str
    exit_code: int
    tail: str = ""


# Harness host


class Prepare(Message, frozen=True, kw_only=True):
    """Import the harnesses and find these tasks."""

    entries: list[TaskEntry]
    include_paths: list[str] = []
    confirm_unsafe_code: bool = False
    folder: str


class Prepared(Message, frozen=True, kw_only=True):
    """The host is ready, or with `error` can never be; `versions` is harness to version."""

    versions: dict[str, str] = {}
    error: str = ""


class RunTask(Message, frozen=True, kw_only=True):
    """Run a task for the model `facts.model`, in a process of its own."""

    task: int
    entry: TaskEntry
    facts: ModelFacts
    folder: str


class TaskEnded(Message, frozen=True, kw_only=True):
    """A task's process ended, with its result or its error."""

    model: int
    task: int
    result: TaskResult | None = None
    error: str = ""


class MeasureSample(Message, frozen=True, kw_only=True):
    """Compute a metric; `answers` are encoded `Answer`s."""

    metric_key: bytes
    task: int
    entry: TaskEntry
    facts: ModelFacts
    sample: int
    answers: list[bytes]


class SampleMeasured(Message, frozen=True, kw_only=True):
    """A metric was computed, or raised `error`; with `lost`, its process died: it may be retried.

    `read` is each file that the metric depends on with the digest of its content. None means that
    the files are not all known, and the metric is not kept for others.
    """

    metric_key: bytes
    measured: bytes = b""
    read: dict[str, str] | None = None
    seconds: float
    error: str = ""
    lost: bool = False


# Client


class KeyedSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sample with encoded requests; see `SampleRequests`."""

    sample: int
    requests: list[Keyed]
    metric_key: bytes = b""


class Submit(Message, frozen=True, kw_only=True):
    """Samples to answer, all repeated after a reconnection; `final`: this task submits no more."""

    samples: list[KeyedSample]
    final: bool = False


class Answers(Message, frozen=True, kw_only=True):
    """Answered and measured samples, as they come."""

    samples: list[AnsweredSample]


# Engine


class Serve(Message, frozen=True, kw_only=True):
    """Serve this model, by a load in a new engine, else by a swap; `fresh` demands a load."""

    model: int
    folder: str
    digest: str
    fresh: bool = False


class Serving(Message, frozen=True, kw_only=True):
    """The engine serves this model by a "load" or "swap" (`how`); `kept`: already before a cut."""

    model: int
    how: str
    seconds: float
    numerics: str
    max_length: int
    curve: Curve
    canary: list[float]
    kept: bool = False


class ServeFailed(Message, frozen=True, kw_only=True):
    """The engine cannot serve the model.

    `restart`: a new process may. `any_model`: no model can be served, since the engine cannot be
    made.
    """

    model: int
    why: str
    restart: bool = False
    any_model: bool = False


class AskEngine(Message, frozen=True, kw_only=True):
    """Answer requests, in this order, after the present ones: (key, encoded `Request`)."""

    model: int
    requests: list[tuple[bytes, bytes]]


class TakeBack(Message, frozen=True, kw_only=True):
    """Return the requests among these keys that have not begun."""

    keys: list[bytes]


class GivenBack(Message, frozen=True, kw_only=True):
    """These requests were not begun and will not be."""

    keys: list[bytes]


class Holding(Message, frozen=True, kw_only=True):
    """All open requests of this engine, sent after a cut and after the unacknowledged answers."""

    model: int
    keys: list[bytes]


class DoneRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An encoded `Answer`, or `error`; times are of the worker's monotonic clock."""

    key: bytes
    body: bytes
    new_tokens: int
    started_s: float
    finished_s: float
    error: str = ""


class Done(Message, frozen=True, kw_only=True):
    """Finished requests, kept and repeated by the worker until `Acked` names `number`."""

    number: int
    model: int
    done: list[DoneRequest]
    now_s: float


class Acked(Message, frozen=True, kw_only=True):
    """Everything up to this number is committed."""

    number: int


_encoder = msgspec.msgpack.Encoder()


def _all_messages() -> Any:
    union: Any = None
    for message in Message.__subclasses__():
        union = message if union is None else union | message
    return union


_decoder = msgspec.msgpack.Decoder(_all_messages())


def encode(message: Message) -> bytes:
    """Encode a message as a frame.

    Raises:
        ChannelError: the message is too long for a frame.
    """
    what = f"A {type(message).__name__}"
    return frame(_encoder.encode(message), MAX_FRAME_BYTES, what=what)


async def read(reader: asyncio.StreamReader) -> Message:
    """Read the next message.

    Raises:
        HungUp: the peer is gone.
        ChannelError: the data is too long, or not a message.
    """
    body = await read_frame(reader, MAX_FRAME_BYTES)
    try:
        message: Message = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ChannelError(f"A frame holds no message: {error}.") from error
    return message
