"""Record the phases of a training step on one rank.

The phases are data, forward, backward, optimizer, communication, checkpoint stall and evaluation.

Hooks in PyTorch and in the model note when a phase starts and ends. They never synchronise with the
device. If the job uses CUDA, a hook also records a CUDA event, which is read after a later step.
This way forward, backward and optimizer get the times at which the device ran them.

A background thread writes the phases to disk every second. If the disk hangs, phases are lost but
training continues. If a hook raises an error, the recorder stops and training continues.

`communication` is only the communication that backward does not hide: the time from the last
gradient of a backward pass until DistributedDataParallel, or a similar wrapper, has finished.
"""

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec

from holdfast.core.phases import ENV_PROFILE, own_node, set_phase_sink
from holdfast.profile.captures import Captures
from holdfast.profile.device_clock import DeviceTimes, Mark, Marked
from holdfast.profile.module_hooks import first_tensor, keep_hooks_out
from holdfast.profile.trained_modules import TrainedModules
from holdfast.profile.writing import RecordingWriter

if TYPE_CHECKING:
    import torch

WRITE_EVERY_S: Final = 1.0
SHORTEST_NS: Final = 100_000
"""A shorter checkpoint stall is not recorded, because that call of `save` saved nothing."""
SPANS_A_STEP: Final = 1024
"""The most phases recorded in one step. Further ones are dropped and counted."""
WAITING_STEPS: Final = 4096
"""The most steps queued for the disk. Further ones are dropped, and their phases are counted."""
JOINED_NS: Final = 1_000_000
"""In a process without steps, spans of the same phase at most this far apart are merged."""
LONGEST_JOINED_NS: Final = 1_000_000_000
"""The longest merged span. Without merging, each generated token would be a span of its own."""
MEMORY_EVERY_NS: Final = 1_000_000_000
FLUSH_S: Final = 2.0

_P = ParamSpec("_P")
_logger = logging.getLogger("holdfast")


class PhaseRecorder:
    """Record the phases of this process.

    All methods except `close` must be called from the training thread.
    """

    def __init__(
        self,
        folder: Path,
        writer: Callable[[], RecordingWriter],
        captures: Captures,
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        device: DeviceTimes | None = None,
        has_steps: bool = True,
    ) -> None:
        """Start the background thread that writes the phases.

        Args:
            folder: the folder of the recording.
            writer: opens the rank's file; called in the background thread.
            captures: carries out capture requests on this rank.
            now_ns: returns the monotonic time in nanoseconds.
            device: measures when the device runs a phase; None to record the host's times.
            has_steps: False for a process without training steps. Its phases are then written as
                they end, and not once a step.
        """
        self._has_steps = has_steps
        self._lock = threading.Lock()
        self._open_span: tuple[str, int, int] | None = None
        """In a process without steps: the last span, which the next span of its phase extends."""
        self.folder = folder
        self._open_writer = writer
        self._captures = captures
        self._has_stepped = False
        self.now_ns = now_ns
        self.device = device
        self.has_failed = False
        self._pid = os.getpid()
        self.thread_id = threading.get_ident()
        self._marked: list[Marked] = []
        """The phases that the device ran in the current step."""
        self._spans: list[tuple[str, int, int]] = []
        """The phases that the host ran in the current step."""
        self._steps: deque[tuple[int | None, Sequence[tuple[str, int, int]]]] = deque()
        self._memory: deque[tuple[int, int | None, int, int, int]] = deque(maxlen=WAITING_STEPS)
        self._memory_due_ns = 0
        self._dropped = 0
        self._step: int | None = None
        self._is_counted = False
        """True if the script reports its steps. Otherwise each optimizer step counts as one."""
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._write_all, name="holdfast-profile", daemon=True
        )
        self._thread.start()

    # Moments

    def mark(self) -> Mark:
        """Return the current time, together with a CUDA event if the job uses a device."""
        return Mark(self.now_ns()) if self.device is None else self.device.mark()

    def ended(self, phase: str, start: Mark, end: Mark | None = None) -> None:
        """Record a phase of the device from `start` to `end`; without `end`, up to now."""
        if len(self._marked) >= SPANS_A_STEP:
            self._dropped += 1
            return
        self._marked.append(Marked(phase, start, end or self.mark()))

    def span(self, phase: str, start_ns: int, end_ns: int) -> None:
        """See `core.phases.PhaseSink.span`."""
        if self.has_failed or os.getpid() != self._pid:
            return
        if phase == "checkpoint_stall" and end_ns - start_ns < SHORTEST_NS:
            return
        if not self._has_steps:
            self._extend(phase, start_ns, end_ns)
            return
        if len(self._spans) >= SPANS_A_STEP:
            self._dropped += 1
            return
        self._spans.append((phase, start_ns, end_ns))

    def _extend(self, phase: str, start_ns: int, end_ns: int) -> None:
        with self._lock:  # an evaluation has several threads
            last = self._open_span
            if (
                last is not None
                and last[0] == phase
                and start_ns - last[2] <= JOINED_NS
                and end_ns - last[1] <= LONGEST_JOINED_NS
            ):
                self._open_span = phase, last[1], max(last[2], end_ns)
                return
            self._open_span = phase, start_ns, end_ns
            if last is not None:
                self._keep(None, [last])

    def step(self, step: int | None = None) -> None:
        """End the current step.

        Args:
            step: the number of completed steps, as reported by the script. None if an optimizer has
                stepped; this counts as a step only until the script first reports a step itself.
        """
        if is_reported := step is not None:
            self._is_counted = True
        elif self._is_counted:
            return
        else:
            step = 1 if self._step is None else self._step + 1
        self._step = step
        marked, self._marked = self._marked, []
        spans, self._spans = self._spans, []
        if self.device is None:
            spans += [(one.phase, one.start.host_ns, one.end.host_ns) for one in marked]
        else:
            self.device.end_step(step, marked)
            for earlier, phases in self.device.completed():
                self._keep(earlier, phases)
            self._note_memory()
        self._keep(step, spans)
        self._has_stepped = True
        if is_reported:
            self.between_steps()

    def between_steps(self) -> None:
        """Start, continue or stop a requested capture if a step has ended since the last call."""
        # This must not run in the optimizer's hooks, because PyTorch records their surroundings as
        # a profiler region. The end of a region writes to memory of the profiler, and stopping the
        # profiler inside the region frees this memory.
        if self._has_stepped and not self._captures.is_idle:
            self._captures.on_step()
        self._has_stepped = False

    def close(self) -> None:
        """Write the remaining phases and stop the background thread.

        A second call does nothing. In a forked child of this process, the method does nothing.
        """
        if os.getpid() != self._pid or self._closed.is_set():
            return
        if self._open_span is not None:
            self._keep(None, [self._open_span])
        if self._spans or self._marked:
            self._keep(
                None,
                [
                    *self._spans,
                    *((one.phase, one.start.host_ns, one.end.host_ns) for one in self._marked),
                ],
            )
        self._closed.set()
        self._thread.join(FLUSH_S)

    def _keep(self, step: int | None, spans: Sequence[tuple[str, int, int]]) -> None:
        if not spans:
            return
        if len(self._steps) < WAITING_STEPS:
            self._steps.append((step, spans))
        else:
            self._dropped += len(spans)

    def _note_memory(self) -> None:
        now_ns = self.now_ns()
        if now_ns < self._memory_due_ns:
            return
        self._memory_due_ns = now_ns + MEMORY_EVERY_NS
        stats = sys.modules["torch"].cuda.memory_stats()
        self._memory.append(
            (
                now_ns,
                self._step,
                stats["allocated_bytes.all.current"],
                stats["reserved_bytes.all.current"],
                stats["allocated_bytes.all.peak"],
            )
        )

    # The thread that writes

    def _write_all(self) -> None:
        writer: RecordingWriter | None = None
        while True:
            is_last = self._closed.wait(WRITE_EVERY_S)
            # While the disk fails or is full, recorded data may be lost; training continues.
            with contextlib.suppress(OSError):
                writer = writer or self._open_writer()
                self._write(writer)
                self._captures.look()
                self._captures.finish()
            if is_last:
                if writer is not None:
                    writer.close()
                return

    def _write(self, writer: RecordingWriter) -> None:
        while self._steps:
            step, spans = self._steps[0]
            writer.spans(step, spans)
            self._steps.popleft()
        while self._memory:
            at_ns, step, allocated, reserved, peak = self._memory.popleft()
            writer.memory(
                at_ns, step, allocated_bytes=allocated, reserved_bytes=reserved, peak_bytes=peak
            )
        dropped, self._dropped = self._dropped, 0
        if dropped:
            writer.dropped(dropped)


_recorder: PhaseRecorder | None = None
_hooks: "_Hooks | None" = None


def recorder() -> PhaseRecorder | None:
    """Return the phase recorder of this process; None if nothing is being recorded."""
    return _recorder


def start_phases(
    folder: Path, *, rank: int, node: str, attempt: int, modules: Sequence["torch.nn.Module"] = ()
) -> PhaseRecorder:
    """Record the phases of this process into a folder, until `stop_phases` is called.

    Args:
        folder: the folder of the recording.
        rank: the rank of this process.
        node: the name of the node.
        attempt: the number of the attempt within the run.
        modules: the modules whose forward and backward passes become phases. If empty, these are
            the modules whose parameters an optimizer updates.
    """
    global _recorder, _hooks  # noqa: PLW0603 - one process is one rank: its hooks are process-wide by nature
    stop_phases()
    open_writer = functools.partial(RecordingWriter, folder, node=node, rank=rank, attempt=attempt)
    _recorder = PhaseRecorder(folder, open_writer, Captures(folder, rank))
    _hooks = _Hooks(_recorder, modules)
    _install_hooks()
    set_phase_sink(_recorder)
    atexit.register(stop_phases)
    return _recorder


def start_from_environment(rank: int, attempt: int) -> None:
    """Start recording the phases of this process if its launcher has set `$HOLDFAST_PROFILE`."""
    if _recorder is None and (folder := os.environ.pop(ENV_PROFILE, "")):
        # Remove the variable: programs that this rank starts must not record as this rank.
        start_phases(Path(folder), rank=rank, node=own_node(), attempt=attempt)


def start_evaluation(node: int) -> None:
    """Start recording the phases of an evaluation if its launcher has set `$HOLDFAST_PROFILE`.

    Args:
        node: the number of the node, recorded in place of a rank. All engines and harness processes
            of a node share one file.
    """
    global _recorder  # noqa: PLW0603 - see `start_phases`
    if folder := os.environ.get(ENV_PROFILE):
        stop_phases()
        open_writer = functools.partial(RecordingWriter, Path(folder), node=own_node(), rank=node)
        captures = Captures(Path(folder), node)
        _recorder = PhaseRecorder(Path(folder), open_writer, captures, has_steps=False)
        set_phase_sink(_recorder)
        atexit.register(stop_phases)


def end_step(step: int) -> None:
    """End a step that the script reports; do nothing if nothing is being recorded."""
    if _recorder is None or _hooks is None or _recorder.has_failed:
        return
    _install_hooks()
    _guarded(_recorder.step)(step)


def _install_hooks() -> None:
    if _hooks is not None and not _hooks.is_installed and "torch" in sys.modules:
        _guarded_in_any_thread(_hooks.install)()


def stop_phases() -> None:
    """Stop recording: remove all hooks and write the remaining phases."""
    global _recorder, _hooks  # noqa: PLW0603 - see `start_phases`
    atexit.unregister(stop_phases)
    set_phase_sink(None)
    if _hooks is not None:
        _hooks.remove()
    if _recorder is not None:
        _recorder.close()
    _recorder = _hooks = None


def _guarded_in_any_thread(hook: Callable[_P, None]) -> Callable[_P, None]:
    """Wrap a hook so that an error in it stops the recorder and never reaches training.

    The wrapped hook works in every thread, because PyTorch runs the hooks of a backward pass on a
    CUDA device in a separate thread for that device.
    """

    @functools.wraps(hook)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        one = _recorder
        if one is None or one.has_failed or _is_traced():
            return
        try:
            hook(*args, **kwargs)
        except Exception as error:
            one.has_failed = True
            _logger.warning("The profile of this rank records no more phases: %r", error)

    return guarded


def _guarded(hook: Callable[_P, None]) -> Callable[_P, None]:
    """Wrap a hook as in `_guarded_in_any_thread`, and ignore calls from other threads.

    Only calls from the training thread reach the hook.
    """
    guarded = _guarded_in_any_thread(hook)

    @functools.wraps(hook)
    def in_training_thread(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if _is_traced() or _recorder is None or threading.get_ident() != _recorder.thread_id:
            return
        guarded(*args, **kwargs)

    return in_training_thread


def _is_traced() -> bool:
    """Return True while PyTorch compiles a program or captures a CUDA graph.

    Hooks must do nothing at that time, because they would become part of the program or the graph.
    Compiling with `fullgraph=True` fails on the calls in a hook, and querying a CUDA event makes a
    graph capture fail.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return bool(
        torch.compiler.is_compiling()
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


class _Hooks:
    """The hooks that record phases, in PyTorch and in the modules of the model."""

    def __init__(self, recorder: PhaseRecorder, modules: Sequence["torch.nn.Module"]) -> None:
        self._recorder = recorder
        self._given = [weakref.ref(one) for one in modules]
        self._removals: list[Callable[[], None]] = []
        self.modules = TrainedModules(_forward_begins, _forward_ends)
        self.is_installed = False
        self.depth = 0
        self.forward: Mark | None = None
        self.backward: Mark | None = None
        self.optimizer: Mark | None = None

    def install(self) -> None:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self.is_installed = True
        self._removals += [
            register_optimizer_step_pre_hook(_optimizer_begins).remove,
            register_optimizer_step_post_hook(_optimizer_ends).remove,
            keep_hooks_out(),
        ]
        self._time_data()
        if self._given:
            self.modules.hook_given([one for ref in self._given if (one := ref()) is not None])

    def remove(self) -> None:
        for removal in (*self._removals, self.modules.remove):
            removal()
        self._removals.clear()

    def _time_data(self) -> None:
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        original = _BaseDataLoaderIter.__next__

        @functools.wraps(original)
        def timed(self: Any) -> Any:
            start_ns = time.monotonic_ns()
            batch = original(self)
            if _recorder is not None and threading.get_ident() == _recorder.thread_id:
                _recorder.span("data", start_ns, time.monotonic_ns())
            return batch

        _BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign]

        def restore() -> None:
            if _BaseDataLoaderIter.__next__ is timed:  # else wrapped again by other code
                _BaseDataLoaderIter.__next__ = original  # type: ignore[method-assign]

        self._removals.append(restore)

    def use_device(self) -> None:
        """Switch to the device's times as soon as the job uses CUDA."""
        torch = sys.modules["torch"]
        if self._recorder.device is None and torch.cuda.is_initialized():
            make_event = functools.partial(torch.cuda.Event, enable_timing=True)
            self._recorder.device = DeviceTimes(make_event, self._recorder.now_ns)


# Module functions instead of methods: a copy of a hooked model then contains no recorder.


@_guarded
def _forward_begins(_module: Any, _args: Any) -> None:
    assert _hooks is not None
    assert _recorder is not None
    _hooks.depth += 1
    if _hooks.depth == 1:
        _recorder.between_steps()
        _hooks.use_device()
        _hooks.backward = None  # left by a backward pass that raised
        _hooks.forward = _mark()


@_guarded
def _forward_ends(module: Any, _args: Any, output: Any) -> None:
    assert _hooks is not None
    assert _recorder is not None
    _hooks.modules.note_forward(module)
    _hooks.depth = max(0, _hooks.depth - 1)
    start, _hooks.forward = _hooks.forward, None if _hooks.depth == 0 else _hooks.forward
    if _hooks.depth > 0 or start is None:
        return
    is_training = sys.modules["torch"].is_grad_enabled()
    _recorder.ended("forward" if is_training else "evaluation", start)
    if is_training and (first := first_tensor(output)) is not None:
        first.register_hook(_backward_begins)


@_guarded_in_any_thread
def _backward_begins(_gradient: Any) -> None:
    assert _hooks is not None
    if _hooks.backward is None:
        _hooks.backward = _mark()
        _after_backward(_gradients_end)


@_guarded_in_any_thread
def _gradients_end() -> None:
    assert _hooks is not None
    assert _recorder is not None
    start, _hooks.backward = _hooks.backward, None
    if start is None:
        return
    end = _mark()
    _recorder.ended("backward", start, end)
    if _is_distributed():
        # A callback that is queued now comes after those of DistributedDataParallel.
        _after_backward(functools.partial(_communication_ends, end))


@_guarded_in_any_thread
def _communication_ends(start: Mark) -> None:
    assert _recorder is not None
    _recorder.ended("communication", start)


def _after_backward(callback: Callable[[], None]) -> None:
    sys.modules["torch"].autograd.Variable._execution_engine.queue_callback(callback)


@_guarded
def _optimizer_begins(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    assert _hooks is not None
    _hooks.depth = 0
    _hooks.modules.note_step(optimizer)
    _hooks.use_device()
    _hooks.optimizer = _mark()


@_guarded
def _optimizer_ends(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    assert _hooks is not None
    assert _recorder is not None
    start, _hooks.optimizer = _hooks.optimizer, None
    if start is not None:
        _recorder.ended("optimizer", start)
        _recorder.step()


def _is_distributed() -> bool:
    distributed = sys.modules["torch"].distributed
    return bool(distributed.is_available() and distributed.is_initialized())


def _mark() -> Mark:
    assert _recorder is not None
    return _recorder.mark()


def timed_data(batches: Any) -> Iterator[Any]:
    """Yield the batches of an iterable, and record the wait for each batch as the phase `data`.

    A PyTorch DataLoader does not need this function, because its waits are recorded automatically.
    """
    iterator = iter(batches)
    while True:
        start_ns = time.monotonic_ns()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        if _recorder is not None:
            _recorder.span("data", start_ns, time.monotonic_ns())
        yield batch
