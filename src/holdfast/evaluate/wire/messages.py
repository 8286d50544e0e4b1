"""Define the messages between the coordinator and its peers, and their encoding over TCP.

A frame (see `core.channel`) holds msgpack, which is decoded only into the types below. The first
frame of a connection is a `Hello` with the evaluation's token; the coordinator refuses a peer with
another token, and reads nothing else from that peer. Frames have a maximum size. A peer that lost
its connection connects again under the same name.

| role | process | sends | receives |
|---|---|---|---|
| command | `holdfast eval`, one | AddModel, Finish | Status, TaskOutcome, ModelOutcome |
| node | one agent a node | NodeReport, ModelFetched, FetchFailed, ChildExited | FetchModel, ReleaseModel, StartEngine |
| host | the harness host of a node | Prepared, TaskEnded, SampleMeasured | Prepare, RunTask, MeasureSample |
| client | one task of one model | Submit | Answers |
| engine | a worker | Serving, ServeFailed, Done, GivenBack, Holding | Serve, AnswerRequests, TakeBack, Acked |

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
"""Prefix of a node's environment variables that only its harness host receives.

The harness host receives the variables without the prefix.
"""
MAX_FRAME_BYTES = 64 * 1024 * 1024
HELLO_TIMEOUT_S = 10.0


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The base of all messages."""


# Everyone


class Hello(Message, frozen=True, kw_only=True):
    """The first frame of a connection.

    `name` is unique within `role` and stays the same over reconnections.
    """

    token: str
    role: str
    name: str
    node: int = -1
    pid: int = 0
    model: int = -1
    task: int = -1


class Welcome(Message, frozen=True, kw_only=True):
    """The coordinator accepts the peer; `epoch` changes when the coordinator restarts."""

    epoch: int = 0


class Refused(Message, frozen=True, kw_only=True):
    """The coordinator refuses the peer, which must end; `why` is a sentence with the reason."""

    why: str


class Stop(Message, frozen=True, kw_only=True):
    """The peer must end, since its work is not needed."""


class Alive(Message, frozen=True, kw_only=True):
    """A sign of life, sent once a second by peers that may hang."""


# Command


class AddModel(Message, frozen=True, kw_only=True):
    """Evaluate the suite on one more model; `model` counts from 0.

    `manifest` is None if the engines have their own model. `folder` is the folder for the files of
    the model's tasks; empty for the evaluation's folder. `tokenizer` is a folder with config and
    tokenizer that every host can read before the weights arrive; empty if there is none. A rescore
    gives `digest` and `numerics`, so that only the answers in the journal of these two are used.
    """

    model: int
    name: str
    manifest: ModelManifest | None = None
    folder: str = ""
    tokenizer: str = ""
    digest: str = ""
    numerics: str = ""


class Finish(Message, frozen=True, kw_only=True):
    """No more models will come; end when all models are done."""


class Status(Message, frozen=True, kw_only=True):
    """The progress, sent twice a second; times are seconds since the coordinator's first start."""

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
    """All tasks of a model ended, or the model cannot be served for the reason in `error`.

    `wrong_use` is True if the model can never be served, so that a retry is of no use. `any_model`
    is True if no other model can be served either. `is_stale` is True if a newer model replaced
    this one.
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
    """Describe a node; `store` is the host:port where peers get the model chunks of this node.

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
    """Fetch a model, partly from the source and partly from other nodes.

    A node reads chunk `i` from the source if `owners[i]` is its own number, and from a peer
    otherwise. The message is sent again with other owners when a node joins or leaves. `peers` maps
    a node's number to the host:port where it serves chunks. `max_read_mib_s` limits the reading
    from the source; 0 is no limit.
    """

    model: int
    manifest: ModelManifest
    owners: list[int]
    peers: dict[int, str]
    max_read_mib_s: float = 0.0


class ModelFetched(Message, frozen=True, kw_only=True):
    """The whole model is in `folder` on this node."""

    model: int
    folder: str
    digest: str
    remote_bytes: int
    peer_bytes: int
    seconds: float


class FetchFailed(Message, frozen=True, kw_only=True):
    """This node cannot fetch the model; if `final`, no other node can either.

    If the node's memory is full, `beside` lists the models in memory. Once one of them is released,
    the node can try again.
    """

    model: int
    why: str
    final: bool = False
    beside: list[int] = []


class ReleaseModel(Message, frozen=True, kw_only=True):
    """Free this model's memory, since no engine on the node needs the model."""

    model: int


class StartEngine(Message, frozen=True, kw_only=True):
    """Start an engine's worker process under this name; a restarted worker keeps its name."""

    name: str
    spec: EngineSpec
    index: int


class StopEngine(Message, frozen=True, kw_only=True):
    """End an engine's worker."""

    name: str


class ChildExited(Message, frozen=True, kw_only=True):
    """A child process of the node ended.

    `role` is "engine" or "host"; `tail` is the end of the child's output.
    """

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
    """The host has imported the harnesses; or it never can, for the reason in `error`.

    `versions` maps each harness to its version.
    """

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
    """Compute the metric of one sample; `answers` are encoded `Answer`s."""

    metric_key: bytes
    task: int
    entry: TaskEntry
    facts: ModelFacts
    sample: int
    answers: list[bytes]


class SampleMeasured(Message, frozen=True, kw_only=True):
    """A sample's metric was computed, or failed with `error`.

    `lost` means that the process which computed the metric died, so that another attempt may
    succeed. `read` maps each file that the metric depends on to the digest of its content. `read`
    is None if not all of these files are known; then the metric is not kept for reuse.
    """

    metric_key: bytes
    measured: bytes = b""
    read: dict[str, str] | None = None
    seconds: float
    error: str = ""
    lost: bool = False


# Client


class KeyedSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sample with its encoded requests; the fields are described in `SampleRequests`."""

    sample: int
    requests: list[Keyed]
    metric_key: bytes = b""


class Submit(Message, frozen=True, kw_only=True):
    """Samples to answer; after a reconnection, the client sends all of them again.

    `final` means that this task submits no more samples.
    """

    samples: list[KeyedSample]
    final: bool = False


class Answers(Message, frozen=True, kw_only=True):
    """Samples that were answered and measured since the last such message."""

    samples: list[AnsweredSample]


# Engine


class Serve(Message, frozen=True, kw_only=True):
    """Serve this model.

    A new engine loads the weights; an engine that serves a model swaps its weights. `fresh` forbids
    the swap.
    """

    model: int
    folder: str
    digest: str
    fresh: bool = False


class Serving(Message, frozen=True, kw_only=True):
    """The engine serves this model after a "load" or a "swap" (`how`).

    `kept` is True if the engine already served the model before the connection was cut.
    """

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

    `restart` is True if a new process may be able to serve it. `any_model` is True if no model can
    be served, because the engine cannot even be created.
    """

    model: int
    why: str
    restart: bool = False
    any_model: bool = False


class AnswerRequests(Message, frozen=True, kw_only=True):
    """Answer these requests, in this order, after those already queued.

    Each request is a pair of its key and the encoded `Request`.
    """

    model: int
    requests: list[tuple[bytes, bytes]]


class TakeBack(Message, frozen=True, kw_only=True):
    """Give back the requests with these keys, except requests that the engine has begun."""

    keys: list[bytes]


class GivenBack(Message, frozen=True, kw_only=True):
    """The engine had not begun these requests, and will not answer them."""

    keys: list[bytes]


class Holding(Message, frozen=True, kw_only=True):
    """All requests that the engine has not answered, sent after a reconnection.

    Before this message, the worker sends its answers that are not acknowledged.
    """

    model: int
    keys: list[bytes]


class DoneRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An encoded `Answer` or an `error`; the times are of the worker's monotonic clock."""

    key: bytes
    body: bytes
    new_tokens: int
    started_s: float
    finished_s: float
    error: str = ""


class Done(Message, frozen=True, kw_only=True):
    """Finished requests; the worker sends them again after a cut until `Acked` names `number`."""

    number: int
    model: int
    done: list[DoneRequest]
    now_s: float


class Acked(Message, frozen=True, kw_only=True):
    """The answers of all `Done` messages up to this number are committed."""

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
    """Read and decode the next message.

    Raises:
        HungUp: the peer closed the connection.
        ChannelError: the frame is too long, or holds no message.
    """
    body = await read_frame(reader, MAX_FRAME_BYTES)
    try:
        message: Message = _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ChannelError(f"A frame has no message: {error}.") from error
    return message
