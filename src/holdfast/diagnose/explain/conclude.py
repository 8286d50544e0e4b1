"""From events to the answer: what logs and supervisor say is put together, explained and answered."""

from collections.abc import Sequence

from holdfast.diagnose.explain.answer import answer
from holdfast.diagnose.explain.diagnosis import Diagnosis
from holdfast.diagnose.explain.explain import explain, first_end, rank_of
from holdfast.diagnose.explain.scan import Event


def conclude(events: Sequence[Event], observed: Sequence[Event] = ()) -> Diagnosis:
    """The diagnosis of `events` (of files) and `observed` (told by the supervisor, in no file)."""
    told = {(event.rule.id, rank_of(event)) for event in events}
    everything = [
        *events,
        *(event for event in observed if (event.rule.id, rank_of(event)) not in told),
    ]
    first = first_end(everything)
    return answer(explain(everything, first), everything, first)
