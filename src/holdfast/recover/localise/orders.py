"""Send the orders `check` to one node, and receive the answers."""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping
from typing import Any

ANSWER_S = 5.0
"""Seconds after the limit of a test within which the answer may arrive."""


class Orders:
    """The orders to one node that wait for an answer."""

    def __init__(self) -> None:
        # A new first number for each admitted node, so that a late answer fits no other order.
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
            None if the node's agent ended meanwhile or the node is lost: the test has no result.

        Raises:
            TimeoutError: no answer arrived in time.
        """
        if self._is_lost:
            return None  # a node that comes back has new orders
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
        """Record an answer; ignore an answer for which no order waits."""
        self._finish(number, answer)

    def end(self, *, is_lost: bool = False) -> None:
        """End all waits, since the agent is gone; `is_lost`: its node will not answer any more."""
        self._is_lost = is_lost
        for number in list(self._waiting):
            self._finish(number, None)

    def _finish(self, number: int, answer: dict[str, Any] | None) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
