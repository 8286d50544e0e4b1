"""Model an inference engine under virtual time, with the same arithmetic as `engines.simulated`.

While the batch has a free place, an engine reads prompts one after another. No sequence in the
batch advances during this time. Then all sequences take steps together. The state changes only at
events, so the model computes the time of the next event and skips the time before it.
"""

from collections import deque
from heapq import heappop, heappush

from holdfast.evaluate.policy import Curve

NEVER_S = float("inf")


class VirtualEngine:
    """One engine. The caller must call `advance` at `next_s`, the time of the engine's next event."""

    __slots__ = (
        "_curve",
        "_decoding",
        "_reading",
        "_since_s",
        "_slowness",
        "_steps",
        "_waiting",
        "begun_s",
        "next_s",
    )

    def __init__(self, curve: Curve, slowness: float = 1.0) -> None:
        self._curve = curve
        self._slowness = slowness
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._reading: tuple[int, int, int] | None = None
        self._decoding: list[tuple[float, int]] = []
        self._steps = 0.0
        self._since_s = 0.0
        self.begun_s: dict[int, float] = {}
        self.next_s = NEVER_S

    @property
    def held(self) -> int:
        """The number of requests without an answer yet."""
        return len(self._waiting) + len(self._decoding) + (self._reading is not None)

    def submit(self, now_s: float, requests: list[tuple[int, int, int]]) -> None:
        """Queue requests.

        Args:
            now_s: the time of the call.
            requests: tuples of an id, the number of prompt tokens and the number of new tokens.
        """
        self._waiting.extend(requests)
        if self._reading is None:
            self._go_on_to(now_s)
            self._read_next()
            self._plan()

    def recall(self, wanted: set[int]) -> list[int]:
        """Withdraw those of the requests in `wanted` that have not begun; return their ids."""
        given = [request[0] for request in self._waiting if request[0] in wanted]
        if given:
            self._waiting = deque(request for request in self._waiting if request[0] not in wanted)
        return given

    def advance(self) -> list[tuple[int, float]]:
        """Process the event at `next_s`; return the id and the begin time of each finished request."""
        now_s = self.next_s
        done: list[int] = []
        if self._reading is not None:
            request, _, new_tokens = self._reading
            self._reading = None
            self._since_s = now_s
            if new_tokens:
                heappush(self._decoding, (self._steps + new_tokens, request))
            else:
                done.append(request)
        else:
            self._steps = self._decoding[0][0]
            self._since_s = now_s
            while self._decoding and self._decoding[0][0] <= self._steps:
                done.append(heappop(self._decoding)[1])
        self._read_next()
        self._plan()
        return [(request, self.begun_s.pop(request)) for request in done]

    def _go_on_to(self, now_s: float) -> None:
        """Advance all sequences to the first end of a step at or after `now_s`.

        A prompt can be read only between two steps.
        """
        if self._decoding:
            if len(self._decoding) >= self._curve.max_batch:
                return
            step_s = self._step_s()
            steps = -((self._since_s - now_s) // step_s)
            steps = min(max(steps, 0.0), self._decoding[0][0] - self._steps)
            self._steps += steps
            self._since_s += steps * step_s
        else:
            self._since_s = max(self._since_s, now_s)

    def _read_next(self) -> None:
        if self._waiting and self._reading is None and len(self._decoding) < self._curve.max_batch:
            self._reading = self._waiting.popleft()
            self.begun_s[self._reading[0]] = self._since_s

    def _step_s(self) -> float:
        return (
            self._curve.step_base_s + len(self._decoding) * self._curve.step_sequence_s
        ) * self._slowness

    def _plan(self) -> None:
        if self._reading is not None:
            curve = self._curve
            prefill_s = curve.request_s + self._reading[1] / curve.prefill_tokens_per_s
            self.next_s = self._since_s + prefill_s * self._slowness
        elif self._decoding:
            self.next_s = self._since_s + (self._decoding[0][0] - self._steps) * self._step_s()
        else:
            self.next_s = NEVER_S
