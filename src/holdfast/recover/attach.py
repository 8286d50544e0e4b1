"""Report a training script to its supervisor: `run = holdfast.attach()`, then `run.step(...)`.

A supervised `Run` has two threads: one sends the script's reports, and the other receives the
supervisor's orders. So the training loop never waits for the network. Without a supervisor, the
same calls work, but nothing is sent.

When a scheduler ends a job, it sends SIGTERM to every process. The ranks must then save their state
before they end. So SIGTERM does not end a supervised rank immediately, unless its script has its
own handler. Instead, the rank reports the signal to the supervisor, which has all ranks save. If
nothing can be saved, or if the run as a whole does not stop, the supervisor sends `terminate`, and
the rank ends.
"""

import atexit
import contextlib
import ctypes
import logging
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.core.errors import BadUse, ChannelError
from holdfast.core.link import (
    ENV_ATTEMPT,
    JobLink,
    Number,
    Unsupervised,
    accumulation,
    note_numbers,
    set_job_link,
    take_batches,
)
from holdfast.core.phases import phase
from holdfast.core.whole import whole_number
from holdfast.recover.channel import ENV_ADDRESS, ENV_TOKEN, ChannelClient, Peer
from holdfast.recover.detectors.collectives import STEPS, read_collectives
from holdfast.recover.stacks import thread_stacks

if TYPE_CHECKING:
    from holdfast.checkpoint import Batches

DECISION_TIMEOUT_S = 30.0
"""The seconds that a rank waits at the proposed step for the votes of the other ranks. The wait is
short, since threads send the votes, not the training loops."""
FLUSH_TIMEOUT_S = 2.0
WAITING_STEPS = 10_000
"""The largest number of unsent reports. If a loop is faster than the channel, further reports are
skipped, except for the last step."""

_N = TypeVar("_N")
_logger = logging.getLogger("holdfast")


class Run:
    """The connection of a training script to its supervisor.

    All methods return at once, and cost microseconds. Use a `Run` in one thread only, since a
    process is one rank with one training loop.
    """

    def __init__(self, link: JobLink | None) -> None:
        self._link = link
        self._fallback = Unsupervised()
        self._batches: Batches | None = None

    @property
    def supervised(self) -> bool:
        """True if a supervisor receives the reports."""
        return self._link is not None

    @property
    def accumulation(self) -> int:
        """The factor by which a step must accumulate more micro-batches than usual.

        The factor is 1, unless `holdfast run --min-nodes` has started the job on fewer nodes. With
        this factor, the global batch stays the same.
        """
        return accumulation()

    def step(self, step: int, *, loss: Number | None = None, **metrics: Number) -> None:
        """Report that the training has completed `step` steps.

        Args:
            step: the number of steps completed since the start of the training, not of this
                process.
            loss: the training loss of this step. Another thread reads a tensor later, so that the
                loop does not wait for the GPU; do not change the tensor in place.
            metrics: further numbers for the record, such as `val_loss`. If `Checkpointer.save` is
                called after this method, the checkpoint of this step also records the loss and
                these numbers.

        Raises:
            BadUse: `step` is not a whole number of at least 0.
        """
        completed = whole_number(step)
        if completed is None or completed < 0:
            raise BadUse(
                f"run.step({step!r}): give the number of steps completed, a whole number of at least 0."
            )
        # Tensors are detached here, while they hold the values of this step. Other threads read
        # them later.
        loss, metrics = _detached(loss), {name: _detached(value) for name, value in metrics.items()}
        note_numbers(completed, metrics if loss is None else {"loss": loss, **metrics})
        if self._link is not None:
            self._link.step(completed, loss, metrics)
        if _end_step is not None:
            _end_step(completed)

    @contextmanager
    def section(self, name: str, *, limit_s: float | None = None) -> Iterator[None]:
        """Mark a phase without steps, such as an evaluation, so that it does not count as a hang.

        Args:
            name: the name of the phase, which is recorded.
            limit_s: the seconds after which the phase counts as a hang nevertheless; None for the
                larger of the run's `--section-limit-s` and `--silence-limit-s`.
        """
        is_evaluation = name.startswith(("eval", "valid"))
        with (
            (self._link or self._fallback).section(name, limit_s=limit_s),
            phase("evaluation") if is_evaluation else contextlib.nullcontext(),
        ):
            yield

    def batches(self, loader: Any) -> "Batches":
        """Wrap the training's data loader, so that its position can be saved and restored.

        Put the returned `batches` into the saved state, as `{"batches": batches}`; with several
        ranks, put it under `per_rank`. After a restore, the next `for` loop continues with the
        batch after the last one of the restored step. After a broken loss, the loop leaves out the
        batches that led to the loss, on every rank the same.

        Args:
            loader: the iterable of the training loop: a DataLoader, a StatefulDataLoader, a batch
                sampler, or any other iterable.

        Raises:
            BadUse: the loader cannot be iterated, or its order of batches is not reproducible; or
                this is the second call in a supervised process, so that batches would be counted
                from 1 again.
        """
        from holdfast.checkpoint import Batches  # the module imports torch

        if self._batches is not None and self._batches.has_begun:
            again = (
                "run.batches() was called again after the training was given batches, which are counted over all "
                "epochs. Call it once, before the first epoch: batches = run.batches(loader), and loop over batches."
            )
            if self.supervised:
                raise BadUse(again)
            _logger.warning("%s", again)  # a second training in the same process is no error
        self._batches = Batches(loader)
        return self._batches

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event of the script in the run's ledger. `data` must be plain JSON values."""
        (self._link or self._fallback).emit(kind, data)


_run: Run | None = None
_link: "_Link | None" = None
_end_step: Callable[[int], None] | None = None
"""The function of `holdfast.profile` that ends a step, once this process may record phases."""


def attach() -> Run:
    """Connect this process to the `holdfast run` that started it; return the process's only `Run`.

    If no `holdfast run` started this process, the methods of the `Run` do nothing.

    Raises:
        ChannelError: a supervisor started this process and cannot be reached.
    """
    global _run  # noqa: PLW0603 - one process is one rank
    if _run is not None:
        return _run
    link = _connect(is_attached=True)
    if link is not None:
        link.watch()
    _record_phases()
    _run = Run(link)
    return _run


def connect_quietly() -> None:
    """Connect this process like `attach`, but without announcing steps; ignore failures.

    The function does nothing in a child process of `multiprocessing`, such as a worker of a data
    loader, because such a process is not the rank.
    """
    if multiprocessing.parent_process() is None:
        with contextlib.suppress(ChannelError):
            _connect(is_attached=False)
            _record_phases()


def _record_phases() -> None:
    global _end_step  # noqa: PLW0603 - see `attach`
    if multiprocessing.parent_process() is None:
        # Lazy: the processes of Holdfast that import this module record no phases.
        from holdfast.profile import end_step, start_from_environment

        _end_step = end_step
        rank, attempt = os.environ.get("RANK", "0"), os.environ.get(ENV_ATTEMPT, "0")
        # If a rank has no number, or a process cannot start a thread, it trains without a profile.
        with contextlib.suppress(ValueError, RuntimeError):
            start_from_environment(int(rank), int(attempt))


def _connect(*, is_attached: bool) -> "_Link | None":
    global _link  # noqa: PLW0603 - see `attach`
    address, token = os.environ.get(ENV_ADDRESS), os.environ.get(ENV_TOKEN)
    if _link is None and address is not None and token is not None:
        peer = replace(Peer.of_this_process("rank"), is_attached=is_attached)
        _link = _Link(ChannelClient(address, token, peer))
        # The token is removed, so that programs that this rank starts cannot connect as the rank.
        del os.environ[ENV_TOKEN]
        set_job_link(_link)
        _link.hold_sigterm()
    return _link


class _Link:
    """The `JobLink` of a supervised process: one thread sends from a queue, another one receives."""

    def __init__(self, client: ChannelClient) -> None:
        self._client = client
        self._has_reported_imports = False
        self._outgoing: queue.SimpleQueue[dict[str, Any] | threading.Event] = queue.SimpleQueue()
        self._stop = _StopAgreement()
        self._mark_s = time.monotonic()
        self._sections_s = 0.0
        self._skipped: dict[str, Any] | None = None
        self._steps_s: deque[float] = deque(maxlen=STEPS + 1)
        """The Unix times, in seconds, at which the last steps were completed."""
        self._last_step: dict[str, Any] | None = None
        """The report of the newest step that was sent."""
        self._pid = os.getpid()
        self._open_sections: list[tuple[str, float | None]] = []
        self._is_watched = False
        self._got_sigterm = False
        self._acts_on_sigterm = False
        """True if SIGTERM ends this process at once: after `terminate`, or without a supervisor."""
        threading.Thread(target=self._send_all, name="holdfast-send", daemon=True).start()
        threading.Thread(target=self._receive_all, name="holdfast-receive", daemon=True).start()
        os.register_at_fork(after_in_child=self._give_back_sigterm)
        atexit.register(self._flush)

    def watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._outgoing.put({"kind": "watch"})

    def hold_sigterm(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._sigterm)

    def take_back_sigterm(self, replaced: Collection[Any]) -> None:
        if self._sigterm in replaced and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._sigterm)

    def _sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._got_sigterm = True
        if (
            self._acts_on_sigterm or os.getpid() != self._pid
        ):  # a handler of the script may call this handler
            self._end_by_sigterm()
        else:
            self._outgoing.put({"kind": "sigterm"})

    def _give_back_sigterm(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _terminate(self) -> None:
        self._acts_on_sigterm = True
        if self._got_sigterm or signal.getsignal(signal.SIGTERM) == self._sigterm:
            self._end_by_sigterm()

    def _end_by_sigterm(self) -> None:
        _reset_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)

    def _leave_the_place(self) -> None:
        """Continue without a supervisor, since a later process has attached as the same rank."""
        set_job_link(Unsupervised())
        self._acts_on_sigterm = True
        if self._got_sigterm:
            self._end_by_sigterm()
        elif signal.getsignal(signal.SIGTERM) == self._sigterm:
            _reset_sigterm()

    def step(self, step: int, loss: Number | None, metrics: Mapping[str, Number]) -> None:
        now_s = time.monotonic()
        step_s = now_s - self._mark_s - self._sections_s
        self._mark_s, self._sections_s = now_s, 0.0
        at_s = time.time()
        self._steps_s.append(at_s)
        batches = take_batches()
        if self._skipped is not None and (earlier := self._skipped["batches"]) is not None:
            batches = earlier if batches is None else (earlier[0], batches[1])
        report = {
            "kind": "step",
            "step": step,
            "step_s": step_s,
            "at_s": at_s,
            "loss": loss,
            "batches": batches,
            "metrics": metrics,
        }
        if self._outgoing.qsize() < WAITING_STEPS:
            self._skipped = None
            self._outgoing.put(report)
        else:
            self._skipped = report

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        self._outgoing.put({"kind": "event", "event": kind, "data": dict(data)})

    @contextmanager
    def section(self, name: str, *, limit_s: float | None = None) -> Iterator[None]:
        began_s = time.monotonic()
        self._open_sections.append((name, limit_s))
        self._report_section(name, limit_s, is_open=True)
        try:
            yield
        finally:
            self._open_sections.pop()
            if self._open_sections:  # a save within an evaluation: the outer section continues
                self._report_section(*self._open_sections[-1], is_open=True)
            else:
                self._sections_s += time.monotonic() - began_s
                self._report_section(name, None, is_open=False)

    def _report_section(self, name: str, limit_s: float | None, *, is_open: bool) -> None:
        self._outgoing.put({"kind": "section", "name": name, "open": is_open, "limit_s": limit_s})

    def stop_due(self, step: int) -> bool:
        return self._stop.reached(step)

    def leave(self, step: int) -> None:
        self._outgoing.put({"kind": "stopped", "step": step})
        raise SystemExit(0)

    def _send_all(self) -> None:
        while True:
            item = self._outgoing.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._send_once(item)
            if not self._has_reported_imports and _is_at_work(item):
                self._has_reported_imports = True
                # This runs in a separate thread, since a disk that hangs must not delay the
                # reports.
                with contextlib.suppress(RuntimeError):  # no thread can be started
                    threading.Thread(target=self._report_imports, daemon=True).start()

    def _send_once(self, item: dict[str, Any]) -> None:
        while True:
            try:
                self._send(item)
            except OSError:
                # The receiving thread connects again, ends this process, or lets it continue
                # unsupervised.
                if self._client.wait_until_connected():
                    continue
            return

    def _report_imports(self) -> None:
        from holdfast.recover.shim.imports import Imports, imports_path

        # Other threads may import modules at the same time, and a module can be any object, so this
        # may fail. Without the list, only the next start is slower.
        with contextlib.suppress(Exception):
            Imports.of_this_process().write(imports_path(int(os.environ.get("RANK", "0"))))
            self._outgoing.put({"kind": "imported"})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._client.send(_plain(message))
            if message["kind"] == "step":
                self._last_step = message
        except OSError:
            raise
        except Exception as error:
            # The user's values can be any objects, and must not end the supervision. If they cannot
            # be read, the step is reported without them, since a silent rank counts as frozen.
            if message["kind"] == "step":
                self._client.send({**message, "loss": None, "metrics": {}})
            refused = {"kind": message["kind"], "error": str(error)[:500]}
            self._client.send({"kind": "event", "event": "not_sent", "data": refused})

    def _receive_all(self) -> None:
        while True:
            if self._receive_until_closed():
                return
            if not self._client.reconnect(self._repeated):
                break
        # Without the node's process, nothing could end or restart this job. So a rank must not
        # outlive its supervision.
        os.kill(os.getpid(), signal.SIGKILL)

    def _repeated(self) -> list[dict[str, Any]]:
        """Return the messages that must be repeated for a newly started agent."""
        repeated: list[dict[str, Any]] = [{"kind": "watch"}] if self._is_watched else []
        if self._last_step is not None:
            repeated.append(self._last_step)
        for name, limit_s in self._open_sections[-1:]:
            section = {"kind": "section", "name": name, "open": True, "limit_s": limit_s}
            repeated.append(section)
        return [{**message, "again": True} for message in repeated]

    def _receive_until_closed(self) -> bool:
        """Carry out the supervisor's orders; return True if this process must continue unsupervised."""
        try:
            while (message := self._client.receive()) is not None:
                if message["kind"] == "propose":
                    vote = self._stop.vote(int(message["proposal"]), int(message["step"]))
                    self._outgoing.put({"kind": "vote", "proposal": message["proposal"], **vote})
                elif message["kind"] == "decide":
                    self._stop.decide(int(message["proposal"]), commit=bool(message["commit"]))
                elif message["kind"] == "look":
                    self._answer_look()
                    self._report_collectives("begun")  # the last message of the answer
                elif message["kind"] == "collectives":
                    self._report_collectives("collectives")
                elif message["kind"] == "terminate":
                    self._terminate()
                elif message["kind"] == "displaced":
                    self._client.give_up()
                    self._leave_the_place()
                    return True
        except OSError:
            pass
        return False

    def _report_collectives(self, kind: str) -> None:
        try:
            collectives = read_collectives(list(self._steps_s))
        except Exception:  # the format is internal to PyTorch and may change
            collectives = None
        # Only this thread answers, so its CPU time shows the cost of all answers.
        cpu_s = time.thread_time()
        self._client.send({"kind": kind, "collectives": collectives, "cpu_s": cpu_s})

    def _answer_look(self) -> None:
        # The receiving thread sends this, since the sending thread may wait for a device that
        # hangs.
        try:
            self._client.send({"kind": "stacks", "threads": thread_stacks()})
        except OSError:
            raise
        except (
            Exception
        ) as error:  # stacks contain the user's code, which must not end the supervision
            self._client.send(
                {
                    "kind": "event",
                    "event": "not_sent",
                    "data": {"kind": "stacks", "error": str(error)[:500]},
                }
            )

    def _flush(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has the queue, but not the sending thread
        if self._skipped is not None:
            self._outgoing.put(self._skipped)
        sent = threading.Event()
        self._outgoing.put(sent)
        sent.wait(FLUSH_TIMEOUT_S)


class _StopAgreement:
    """A rank's part in the vote by which all ranks save and stop at the same step.

    An order reaches the ranks at different times. So the supervisor proposes a step that is a
    little ahead. A rank that has not passed this step votes yes, and then waits at the step for the
    decision. If all ranks vote yes, each rank stops at its first save at that step or later. This
    is the same save on all ranks, since saves are collective. If any rank votes no, no rank stops
    there, and the supervisor proposes a later step.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last_save_step: int | None = None
        self._proposal: int | None = None
        self._stop_step = 0
        self._decided: bool | None = None

    def vote(self, proposal: int, step: int) -> dict[str, Any]:
        with self._changed:
            last = self._last_save_step
            yes = last is None or last < step
            if yes:
                self._proposal, self._stop_step, self._decided = proposal, step, None
                self._changed.notify_all()
            return {"yes": yes, "saves": last is not None, "step": last}

    def decide(self, proposal: int, *, commit: bool) -> None:
        with self._changed:
            if proposal == self._proposal:
                self._decided = commit
                self._changed.notify_all()

    def reached(self, step: int) -> bool:
        with self._changed:
            if self._proposal is None or step < self._stop_step:
                self._last_save_step = step
                return False
            # Meanwhile a new supervisor may have made another proposal: the same step, or a later
            # step than the step of this save.
            self._changed.wait_for(
                lambda: self._decided is not None or step < self._stop_step, DECISION_TIMEOUT_S
            )
            self._last_save_step = step
            if step < self._stop_step:
                return False
            agreed, self._proposal = bool(self._decided), None
            return agreed


def _reset_sigterm() -> None:
    # The handler is changed through the C library, since Python changes handlers only in the main
    # thread, which a collective may block.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)


def _is_at_work(message: Mapping[str, Any]) -> bool:
    """Return True if a message shows that the training loop has completed an iteration."""
    return message["kind"] == "step" or message.get("event") == "checkpoint"


def _detached(value: _N) -> _N:
    detach = getattr(value, "detach", None)
    return detach() if detach is not None else value


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["kind"] == "step":
        message["loss"] = _number(message["loss"])
        message["metrics"] = {name: _number(value) for name, value in message["metrics"].items()}
    return message


def _number(value: Number | None) -> float | str | None:
    """Convert a float for JSON, which has no NaN and no infinities; these become strings."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else str(number)
