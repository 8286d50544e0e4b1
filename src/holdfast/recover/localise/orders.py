"""Send orders for tests to one node, and match the answers to them."""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping
from typing import Any

ANSWER_S = 5.0
"""The seconds after the time limit of a test in which its answer may still arrive."""


class Orders:
    """The orders to one node that still have no answer."""

    def __init__(self) -> None:
        # Numbers begin anew at random for each connected node, so that a late answer cannot match
        # another order.
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
            The answer; None if the node's agent ended meanwhile, or if the node is lost, so that
            the test has no result.

        Raises:
            TimeoutError: no answer arrived in time.
        """
        if self._is_lost:
            return None  # a node that connects again gets new orders
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
        """End all waits, since the agent is gone; `is_lost` means that no agent will follow."""
        self._is_lost = is_lost
        for number in list(self._waiting):
            self._finish(number, None)

    def _finish(self, number: int, answer: dict[str, Any] | None) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
