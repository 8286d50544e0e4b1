"""Queue events for the policy, and yield its decisions."""

from collections import deque
from collections.abc import Iterator

from holdfast.evaluate.policy.decisions import decide
from holdfast.evaluate.policy.events import Action, Event
from holdfast.evaluate.policy.state import State


class PolicyQueue:
    """Pass events to the policy in their order; `state` is the policy's state."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._events: deque[Event] = deque()
        self._is_closed = False

    def put(self, event: Event) -> None:
        """Queue an event."""
        self._events.append(event)

    def close(self) -> None:
        """Drop all queued events, and ignore events from now on."""
        self._is_closed = True

    def actions(self) -> Iterator[Action]:
        """Yield the policy's actions on each event, including events queued meanwhile."""
        while self._events:
            if self._is_closed:
                self._events.clear()
                return
            yield from decide(self.state, self._events.popleft())
