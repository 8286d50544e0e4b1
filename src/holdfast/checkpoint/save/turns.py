"""Python's lock goes around quickly while a thread of ours works beside the training.

A thread that wants the lock waits 5 ms before the one that has it must give it up, and the training gives it up with
each operation of PyTorch: it would come to one operation in 5 ms.
"""

import sys
import threading
from typing import Final

_TURN_S: Final = 0.0002
_HALF_S: Final = 0.5e-6
"""Python cuts it off to whole microseconds, so that what it says of 70 of them would be put back as 69."""


class ShortTurns:
    """While some thread is in it, whoever waits for the lock gets it after a fifth of a millisecond."""

    def __init__(self) -> None:
        """Nobody is in it."""
        self._entering = threading.Lock()
        self._inside = 0
        self._before_s = self._here_s = 0.0

    def __enter__(self) -> None:
        with self._entering:
            self._inside += 1
            if self._inside == 1:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(_TURN_S, self._before_s) + _HALF_S)
                self._here_s = sys.getswitchinterval()

    def __exit__(self, *_error: object) -> None:
        with self._entering:
            self._inside -= 1
            if (
                self._inside == 0 and sys.getswitchinterval() == self._here_s
            ):  # else the training has set it meanwhile
                sys.setswitchinterval(self._before_s + _HALF_S)


short_turns: Final = ShortTurns()
"""Of this process, which has one such lock."""
