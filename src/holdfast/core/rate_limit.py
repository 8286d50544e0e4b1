"""A limit to the rate at which bytes are written or sent, from however many threads."""

import threading
import time
from collections.abc import Callable


class RateLimit:
    """Holds all threads together to `max_bytes_s`, from one file and one save to the next; None: as fast as it goes.

    What comes waits for what came before it, so that in any stretch of time the rate is exceeded by one chunk at most.
    """

    def __init__(
        self,
        max_bytes_s: float | None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.max_bytes_s = max_bytes_s
        self._now_s = now_s
        self._sleep = sleep
        self._free_at_s = 0.0
        self._taking_turns = threading.Lock()

    def wait(self, count: int) -> None:
        """Wait for one's turn with `count` more bytes."""
        if self.max_bytes_s is None:
            return
        with self._taking_turns:
            now_s = self._now_s()
            begin_s = max(self._free_at_s, now_s)
            self._free_at_s = begin_s + count / self.max_bytes_s
        if begin_s > now_s:
            self._sleep(begin_s - now_s)
