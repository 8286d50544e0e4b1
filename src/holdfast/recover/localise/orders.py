"""The orders `check` to one node, and their answers."""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping
from typing import Any

ANSWER_S = 5.0
"""So much later than the limit of a test its answer may arrive."""


class Orders:
    """The orders to one node that wait for an answer."""

    def __init__(self) -> None:
        # A number of its own for each node that is admitted anew: late answers are of no other order.
        self._numbers = itertools.count(secrets.randbelow(2**31))
        self._is_lost = False
        self._waiting: dict[int, asyncio.Future[dict[str, Any] | None]] = {}

    async def ask(
        self,
        send: Callable[[dict[str, Any]], None],
        order: Mapping[str, Any],
        timeout_s: float,
    ) -> dict[str, Any] | None:
        """Send an order and wait for the answer.

        Returns:
            None where the node's agent ended meanwhile, or the node is lost: the test has no result.

        Raises:
            TimeoutError: no answer arrived in time.
        """
        if self._is_lost:
            return None  # a node that comes back has orders of its own
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            send({"kind": "check", "check": number, **order})
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._waiting.pop(number, None)

    def answered(self, number: int, answer: dict[str, Any]) -> None:
        """Take in an answer; one that nobody waits for is passed over."""
        self._finish(number, answer)

    def end(self, *, is_lost: bool = False) -> None:
        """Take in that the agent which was to answer is gone; `is_lost`: with its node, which answers no more."""
        self._is_lost = is_lost
        for number in list(self._waiting):
            self._finish(number, None)

    def _finish(self, number: int, answer: dict[str, Any] | None) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
