"""Run an engine: `python -m holdfast.evaluate.engines.worker --name NAME --node N --spec JSON`.

The worker connects to the coordinator, whose address and token are in the environment. The worker
loads and swaps models as ordered, and answers requests. The main thread runs the engine, and the
connection (`uplink`) has a thread of its own. While the coordinator is away, the engine continues
with its requests. If the coordinator stays away, the worker writes the answers to the journal.

The exit code is 0 after an order to end, or if the coordinator stayed away. The exit code is 1 if
the coordinator refused the worker, or if the engine failed.
"""

import argparse
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.phases import phase
from holdfast.core.processes import die_with_parent, end_without_collecting
from holdfast.evaluate.engines.choose import make_engine
from holdfast.evaluate.engines.uplink import Uplink
from holdfast.evaluate.types.engine import Engine, EngineSpec, Finished, SwapRefused
from holdfast.evaluate.types.requests import (
    Request,
    decode_answer,
    decode_request,
    encode_answer,
)
from holdfast.evaluate.wire import messages
from holdfast.profile import start_evaluation, stop_phases


class Pulse:
    """Show one thread whether another thread hangs.

    The other thread must call `beat` at least every `limit_s` seconds.
    """

    def __init__(self, limit_s: float, clock: Clock) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._until_s = clock.monotonic_s() + limit_s

    def beat(self) -> None:
        """Record that the thread is working."""
        self._until_s = self._clock.monotonic_s() + self._limit_s

    @contextmanager
    def held(self, limit_s: float) -> Iterator[None]:
        """Allow the thread up to `limit_s` seconds without a beat, for a load or a swap."""
        self._until_s = self._clock.monotonic_s() + limit_s
        try:
            yield
        finally:
            self.beat()

    def beats(self) -> bool:
        """Return True if the thread has recently called `beat`, or need not call it yet."""
        return self._clock.monotonic_s() < self._until_s


HANG_AFTER_S = 120.0  # a normal step takes 0.1 s, or one batch
LOAD_LIMIT_S = 3600.0
_END_WITHIN_S = 5.0
_IDLE_S = 0.5


class _Ended(Exception):
    """Raised to end this worker; with `keep`, answers that are not committed must be kept."""

    def __init__(self, exit_code: int = 0, *, keep: bool = False) -> None:
        super().__init__()
        self.exit_code = exit_code
        self.keep = keep


class EngineWorker:
    """Run one engine.

    Any thread may call `receive` and `held_keys`; only the main thread may call the other methods.

    Args:
        spec: the engine.
        clock: the clock of the times that the worker reports.
        pulse: gets a beat whenever a call of the engine returns.
        linger_s: the seconds after which an idle worker ends if the coordinator is away.
    """

    def __init__(self, spec: EngineSpec, *, clock: Clock, pulse: Pulse, linger_s: float) -> None:
        self._spec = spec
        self._clock = clock
        self._pulse = pulse
        self._linger_s = linger_s
        self._inbox: queue.SimpleQueue[messages.Message] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._unmade = ""  # the reason why no engine could be made
        self._serves: messages.Serve | None = None
        self._served: messages.Serving | None = None
        self._held: dict[int, bytes] = {}  # id within the engine to key
        self._ids: dict[bytes, int] = {}
        self._next_id = 0
        self.journals: dict[int, str] = {}
        """Model number to the identity of the journal of its answers."""

    def receive(self, message: messages.Message) -> None:
        """Queue a message from the coordinator, and wake the engine if it waits."""
        self._inbox.put(message)
        wake = getattr(self._engine, "wake", None)
        if wake is not None:
            wake.set()

    def run(self, line: Uplink) -> None:
        """Serve until the coordinator orders the end.

        Raises:
            _Ended: the order to end came, or the coordinator stayed away.
        """
        self._make()
        while True:
            self._pulse.beat()
            for message in self._news():
                self._handle(message, line)
            if self._held:
                assert self._engine is not None
                self._report(self._engine.step(), line)
            elif line.away_s() > self._linger_s:
                raise _Ended(keep=True)

    def held_keys(self) -> list[bytes]:
        """Return the keys of the requests without an answer; may be called from any thread."""
        return list(self._ids)

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()

    def _make(self) -> bool:
        self._engine = None
        try:
            with self._pulse.held(LOAD_LIMIT_S), phase("load"):
                self._engine = make_engine(self._spec)
        except HoldfastError as error:
            self._unmade = str(error)
        return self._engine is not None

    def _news(self) -> Iterator[messages.Message]:
        """Yield new messages; wait for them if the engine has no requests."""
        try:
            if not self._held:
                yield self._inbox.get(timeout=_IDLE_S)
            while True:
                yield self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, message: messages.Message, line: Uplink) -> None:
        match message:
            case messages.Serve():
                while self._held and self._engine is not None:
                    self._report(self._engine.step(), line)
                    self._pulse.beat()
                line.send(self._serve(message))
            case messages.AnswerRequests():
                self._ask(message, line)
            case messages.TakeBack():
                line.send(messages.GivenBack(keys=self._recall(message.keys)))
            case messages.Stop():
                raise _Ended
            case messages.Refused():
                print(f"The coordinator refused this engine: {message.why}", file=sys.stderr)  # noqa: T201
                raise _Ended(1)

    def _serve(self, order: messages.Serve) -> messages.Message:
        before = self._serves
        if before and self._served and (before.model, before.digest) == (order.model, order.digest):
            return msgspec.structs.replace(self._served, kept=True, seconds=0.0)
        if self._engine is None:
            return messages.ServeFailed(model=order.model, why=self._unmade, any_model=True)
        if order.fresh and before is not None:  # like a new process, without its imports
            self._engine.close()
            if not self._make():
                return messages.ServeFailed(model=order.model, why=self._unmade, any_model=True)
            before = None
        how = "load" if before is None else "swap"
        self._served = None
        began_s = self._clock.monotonic_s()
        try:
            with self._pulse.held(LOAD_LIMIT_S), phase("load"):
                (self._engine.load if how == "load" else self._engine.swap)(Path(order.folder))
                self._served = messages.Serving(
                    model=order.model,
                    how=how,
                    seconds=self._clock.monotonic_s() - began_s,
                    numerics=self._engine.numerics(),
                    max_length=self._engine.max_length(),
                    curve=self._engine.curve(),
                    canary=self._engine.canary(),
                )
        except SwapRefused as refusal:
            return messages.ServeFailed(model=order.model, why=str(refusal), restart=True)
        except HoldfastError as error:
            return messages.ServeFailed(
                model=order.model, why=str(error), restart=not isinstance(error, BadUse)
            )
        except Exception as error:  # loading may raise any error; the coordinator decides
            traceback.print_exc()
            why = f"{how} of {order.folder}: {type(error).__name__}: {error}"
            return messages.ServeFailed(model=order.model, why=why, restart=True)
        self._serves = order
        self.journals[order.model] = f"{order.digest}\n{self._served.numerics}"
        return self._served

    def _ask(self, message: messages.AnswerRequests, line: Uplink) -> None:
        if self._engine is None or self._served is None or message.model != self._served.model:
            line.send(messages.GivenBack(keys=[key for key, _ in message.requests]))
            return
        taken: list[tuple[int, Request]] = []
        for key, body in message.requests:
            if key in self._ids:  # repeated by a coordinator that lost track of this engine
                continue
            try:
                request = decode_request(body)
            except msgspec.DecodeError as error:
                now_s = self._clock.monotonic_s()
                line.done(
                    message.model,
                    messages.DoneRequest(
                        key=key,
                        body=b"",
                        new_tokens=0,
                        started_s=now_s,
                        finished_s=now_s,
                        error=f"The message is not a request: {error}.",
                    ),
                )
                continue
            self._ids[key], self._held[self._next_id] = self._next_id, key
            taken.append((self._next_id, request))
            self._next_id += 1
        if taken:
            self._engine.submit(taken)

    def _recall(self, keys: Iterable[bytes]) -> list[bytes]:
        if self._engine is None:
            return []
        given = self._engine.recall([self._ids[key] for key in keys if key in self._ids])
        return [self._forget(id_) for id_ in given]

    def _forget(self, id_: int) -> bytes:
        key = self._held.pop(id_)
        del self._ids[key]
        return key

    def _report(self, finished: Sequence[Finished], line: Uplink) -> None:
        assert self._served is not None
        for one in finished:
            body, new_tokens, error = _encoded(one)
            line.done(
                self._served.model,
                messages.DoneRequest(
                    key=self._held[one.id],
                    body=body,
                    new_tokens=new_tokens,
                    started_s=one.started_s,
                    finished_s=one.finished_s,
                    error=error,
                ),
            )
            self._forget(one.id)  # last, so that other threads find the request somewhere
        if finished and not self._held:
            line.flush()


def _encoded(one: Finished) -> tuple[bytes, int, str]:
    """Return an answer's encoding, its number of tokens and its error.

    The encoding is decoded once as a check.
    """
    if one.answer is None:
        return b"", 0, one.error
    try:
        body = encode_answer(one.answer)
        return body, decode_answer(body).new_tokens, one.error
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        return b"", 0, one.error or f"The engine's answer cannot be stored: {error}."


def keep_unacked(folder: Path, journals: dict[int, str], unacked: Iterable[messages.Done]) -> int:
    """Write answers that are not committed into their models' journals in `folder`.

    Returns:
        The number of answers.
    """
    from holdfast.evaluate.wire.answer_journal import Journal

    records: dict[int, list[tuple[bytes, bytes]]] = {}
    for message in unacked:
        answers = [(done.key, done.body) for done in message.done if not done.error]
        records.setdefault(message.model, []).extend(answers)
    for model, answers in records.items():
        journal = Journal(folder, journals[model])
        journal.commit(answers)
        journal.close()
    return sum(map(len, records.values()))


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    def end(_signal: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Ended(keep=True)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_soon_after_stop(message: messages.Message) -> None:
    """End the process a few seconds after an order to stop, even during a load or a long step."""
    if isinstance(message, messages.Stop | messages.Refused):
        timer = threading.Timer(_END_WITHIN_S, os._exit, (0,))
        timer.daemon = True
        timer.start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a worker until it ends; return the exit code."""
    parser = argparse.ArgumentParser(prog="holdfast.evaluate.engines.worker")
    parser.add_argument("--name", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--spec", required=True, help="an EngineSpec as JSON")
    parser.add_argument(
        "--linger", type=float, default=60.0, help="seconds to wait for an unreachable coordinator"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder of the journals, for answers that were not fetched"
    )
    parser.add_argument(
        "--hang-after",
        type=float,
        default=HANG_AFTER_S,
        help="seconds after which a step counts as hung",
    )
    given = parser.parse_args(arguments)
    die_with_parent()  # the node's agent, which outlives the command for a while
    end_without_collecting()
    start_evaluation(given.node)

    clock = SystemClock()
    pulse = Pulse(given.hang_after, clock)
    spec = msgspec.json.decode(given.spec, type=EngineSpec)
    worker = EngineWorker(spec, clock=clock, pulse=pulse, linger_s=given.linger)

    def deliver(message: messages.Message) -> None:
        _end_soon_after_stop(message)
        worker.receive(message)

    hello = messages.Hello(
        token=os.environ[messages.ENV_TOKEN],
        role="engine",
        name=given.name,
        node=given.node,
        pid=os.getpid(),
    )
    line = Uplink(
        os.environ[messages.ENV_ADDRESS],
        hello,
        deliver=deliver,
        lives=pulse.beats,
        held=worker.held_keys,
        clock=clock,
    )
    line.start()
    end = _Ended(1, keep=True)
    try:
        with _ending_on_sigterm():
            worker.run(line)
    except _Ended as ended:
        end = ended
    finally:
        unacked = line.close(_END_WITHIN_S if end.keep else 0.0)
        if end.keep and given.keep and unacked:
            keep_unacked(given.keep, worker.journals, unacked)
        worker.close()
        stop_phases()
    return end.exit_code


if __name__ == "__main__":
    sys.exit(main())
