"""Events on their way to the policy, and its decisions on them."""

from collections import deque
from collections.abc import Iterator

from holdfast.evaluate.policy.decisions import decide
from holdfast.evaluate.policy.events import Action, Event
from holdfast.evaluate.policy.state import State


class PolicyQueue:
    """Hands events to the policy in the order in which they were put. `state` is the policy's."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._events: deque[Event] = deque()
        self._is_closed = False

    def put(self, event: Event) -> None:
        """Queue an event."""
        self._events.append(event)

    def close(self) -> None:
        """Decide nothing more: what is queued, or still comes, is dropped."""
        self._is_closed = True

    def actions(self) -> Iterator[Action]:
        """Yield the actions on each event; events that an action causes are decided on after it."""
        while self._events:
            if self._is_closed:
                self._events.clear()
                return
            yield from decide(self.state, self._events.popleft())
