"""Answer after the time that a cost curve gives: for tests, and to emulate a cluster on two cores.

Prompts are read one after another, and each prompt stops the decoding. Then all sequences decode
together, one token each per step; sequences join and leave between steps. The engine computes the
time of the next event and sleeps until then, so that it does no work per token.
"""

import hashlib
import heapq
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import BadUse
from holdfast.evaluate.types.engine import Curve, EngineSpec, Finished, SwapRefused
from holdfast.evaluate.types.requests import Answer, Request, Scalar, keyed, pack_tokens

STEP_S = 0.1  # the longest that `step` waits
_NEVER = 1 << 62

# The options of `EngineSpec.options` for this engine, with their defaults.
_OPTIONS: dict[str, Scalar] = {
    "prefill_tokens_per_s": 100_000.0,
    "request_s": 0.0005,
    "step_base_s": 0.01,
    "step_sequence_s": 0.0002,
    "load_s": 0.0,
    "swap_s": 0.0,
    "new_tokens": 0,  # per generation; 0 for a number from 1 to the limit, by the request's hash
    "by_model": False,  # True if answers depend on the weights, too
    "hang_after": _NEVER,  # number of answers
    "crash_after": _NEVER,  # number of answers
    "refuse_swap": False,
    "wrong_canary": False,  # after a swap
}


@dataclass(slots=True, kw_only=True)
class _Sequence:
    id: int
    request: Request
    new_tokens: int
    started_s: float = 0.0


class SimulatedEngine:
    """Simulate an engine; the methods implement `Engine`.

    Tests replace `clock` and `sleep`. `sleep` may return early.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        clock: Clock | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._options = _read_options(spec)
        self._spec = spec
        self._clock = clock or SystemClock()
        self._sleep = sleep or self._sleep_awake
        self.wake = threading.Event()
        self._model = b""
        self._canary: list[float] = []
        self._drop_everything()
        self._answered = 0

    def _drop_everything(self) -> None:
        self._waiting: deque[_Sequence] = deque()
        self._reading: _Sequence | None = None
        # A heap, ordered by the last step of each sequence.
        self._decoding: list[tuple[int, int, _Sequence]] = []
        self._steps = 0  # decoding steps until `_since_s`
        self._since_s = 0.0  # the start of the present prompt, or run of steps

    def load(self, folder: Path) -> None:
        """See `Engine.load`."""
        self._pass(self._options["load_s"])
        self._serve(folder)

    def swap(self, folder: Path) -> None:
        """See `Engine.swap`."""
        if self._options["refuse_swap"]:
            raise SwapRefused("This simulated engine was told to refuse a swap.")
        self._pass(self._options["swap_s"])
        self._serve(folder)
        if self._options["wrong_canary"]:
            self._canary[0] -= 1.0

    def _serve(self, folder: Path) -> None:
        self._model = _digest(folder)
        self._canary = [-1.0 - byte / 256 for byte in self._model[:8]]
        self._drop_everything()

    def canary(self) -> list[float]:
        """See `Engine.canary`; the values are computed from the weights' files."""
        return list(self._canary)

    def numerics(self) -> str:
        """See `Engine.numerics`."""
        return f"simulated {self._spec.mode}"

    def max_length(self) -> int:
        """See `Engine.max_length`."""
        return self._spec.max_length or 32_768

    def curve(self) -> Curve:
        """See `Engine.curve`; the curve is exact, since it defines this engine's times."""
        return Curve(
            prefill_tokens_per_s=self._options["prefill_tokens_per_s"],
            request_s=self._options["request_s"],
            step_base_s=self._options["step_base_s"],
            step_sequence_s=self._options["step_sequence_s"],
            max_batch=self._spec.max_batch or 64,
        )

    def submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        """See `Engine.submit`."""
        now_s = self._clock.monotonic_s()
        for id_, request in requests:
            self._waiting.append(
                _Sequence(id=id_, request=request, new_tokens=self._length_of(request))
            )
        if self._reading is None and self._decoding:
            self._end_run_at_next_step(now_s)
        elif self._reading is None:
            self._since_s = max(self._since_s, now_s)
        self._read_next()

    def recall(self, ids: Sequence[int]) -> list[int]:
        """See `Engine.recall`."""
        wanted = set(ids)
        given = [sequence.id for sequence in self._waiting if sequence.id in wanted]
        self._waiting = deque(sequence for sequence in self._waiting if sequence.id not in wanted)
        return given

    def step(self) -> list[Finished]:
        """See `Engine.step`; waits at most 0.1 s for the next event, and returns due answers."""
        wait_s = min(self._next_event_s() - self._clock.monotonic_s(), STEP_S)
        if wait_s > 0:
            self._sleep(wait_s)
        now_s = self._clock.monotonic_s()
        finished: list[Finished] = []
        while (event_s := self._next_event_s()) <= now_s:
            finished += self._advance_to(event_s)
        return finished

    def close(self) -> None:
        """See `Engine.close`."""
        self._drop_everything()

    def _next_event_s(self) -> float:
        if self._reading is not None:
            return self._since_s + self._prefill_s(self._reading)
        if self._decoding:
            return self._since_s + (self._run_end() - self._steps) * self._step_s()
        return float("inf")

    def _run_end(self) -> int:
        return self._decoding[0][0]

    def _advance_to(self, event_s: float) -> list[Finished]:
        """Advance the engine's time to the next event, and return the requests that end there.

        The event is the end of a prompt, or the end of the shortest sequences.
        """
        done: list[_Sequence] = []
        if self._reading is not None:
            sequence, self._reading = self._reading, None
            if sequence.new_tokens:
                heapq.heappush(
                    self._decoding, (self._steps + sequence.new_tokens, sequence.id, sequence)
                )
            else:
                done.append(sequence)
        else:
            self._steps = self._run_end()
            while self._decoding and self._run_end() <= self._steps:
                done.append(heapq.heappop(self._decoding)[2])
        self._since_s = event_s
        self._read_next()
        return [self._finish(sequence, event_s) for sequence in done]

    def _read_next(self) -> None:
        room = (self._spec.max_batch or 64) - len(self._decoding)
        if self._reading is None and self._waiting and room > 0:
            self._reading = self._waiting.popleft()
            self._reading.started_s = self._since_s

    def _end_run_at_next_step(self, now_s: float) -> None:
        """Count the decoding steps so far, including the step in progress.

        A new sequence can join after this step.
        """
        if len(self._decoding) >= (self._spec.max_batch or 64):
            return
        steps = max(0, -int(-(now_s - self._since_s) // self._step_s()))
        steps = min(steps, self._run_end() - self._steps)
        self._since_s += steps * self._step_s()
        self._steps += steps

    def _prefill_s(self, sequence: _Sequence) -> float:
        return (
            self._options["request_s"]
            + sequence.request.prompt_tokens() / self._options["prefill_tokens_per_s"]
        )

    def _step_s(self) -> float:
        return self._options["step_base_s"] + len(self._decoding) * self._options["step_sequence_s"]

    def _length_of(self, request: Request) -> int:
        if request.sampling is None:
            return 0
        most = request.sampling.max_new_tokens
        wanted = int(request.sampling.extra.get("new_tokens") or self._options["new_tokens"])
        return min(most, wanted or 1 + int.from_bytes(_hash(request)[:4], "little") % max(1, most))

    def _finish(self, sequence: _Sequence, event_s: float) -> Finished:
        if self._answered >= self._options["crash_after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        while self._answered >= self._options["hang_after"]:
            time.sleep(3600.0)
        self._answered += 1
        answer = simulated_answer(
            sequence.request, sequence.new_tokens, self._model if self._options["by_model"] else b""
        )
        return Finished(
            id=sequence.id, answer=answer, started_s=sequence.started_s, finished_s=event_s
        )

    def _pass(self, seconds: float) -> None:
        until_s = self._clock.monotonic_s() + seconds
        while (wait_s := until_s - self._clock.monotonic_s()) > 0:
            self._sleep(wait_s)

    def _sleep_awake(self, seconds: float) -> None:
        if self.wake.wait(seconds):
            self.wake.clear()


def _read_options(spec: EngineSpec) -> dict[str, float]:
    unknown = sorted(spec.options.keys() - _OPTIONS.keys())
    if unknown:
        raise BadUse(
            f"A simulated engine has no option {unknown[0]!r}. It has {', '.join(_OPTIONS)}."
        )
    options = _OPTIONS | spec.options
    try:
        return {name: float(value or 0) for name, value in options.items()}
    except ValueError as error:
        raise BadUse(
            f"Options of a simulated engine are numbers: {error}. Give each as name=number."
        ) from error


def simulated_answer(request: Request, new_tokens: int, model: bytes = b"") -> Answer:
    """Return the simulated answer, which depends only on the request, and on `model` if given."""
    digest = _hash(request, model)
    number = int.from_bytes(digest[4:8], "little")
    if request.kind == "loglikelihood":
        logprob = -number / 2**28
        return Answer(
            logprob=logprob, is_greedy=bool(number & 1), prompt_tokens=request.prompt_tokens()
        )
    sampling = request.sampling
    return Answer(
        tokens=pack_tokens([3 + number % 97]) * new_tokens if request.prompt else b"",
        text="" if request.prompt else digest.hex(),
        finish="length" if sampling and new_tokens == sampling.max_new_tokens else "stop",
        prompt_tokens=request.prompt_tokens(),
        new_tokens=new_tokens,
    )


def _hash(request: Request, model: bytes = b"") -> bytes:
    return hashlib.blake2b(keyed(request).key + model, digest_size=8).digest()


def _digest(folder: Path) -> bytes:
    """Return a digest of the weights' files: their names, sizes, first and last 64 KiB."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        size_bytes = path.stat().st_size
        digest.update(f"{path.name} {size_bytes} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(65_536))
            file.seek(max(0, size_bytes - 65_536))
            digest.update(file.read())
    return digest.digest()
