"""Watch the speed of the ranks, and record slow ranks and slower training."""

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.recover.attempt import AttemptView
from holdfast.recover.channel import Peer
from holdfast.recover.detectors.collectives import collectives_of
from holdfast.recover.detectors.slow import SlowDetector, Slower, SlowRanks, Throughput
from holdfast.recover.nodes import Nodes
from holdfast.recover.recorder import Recorder


class Speed:
    """Watches the speed of the ranks in one attempt at a time."""

    def __init__(
        self,
        nodes: Nodes,
        recorder: Recorder,
        observe: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._nodes = nodes
        self._recorder = recorder
        self._observe = observe
        self.restart()

    def restart(self) -> None:
        """Forget the previous attempt."""
        self._slow = SlowDetector()
        self._names: dict[int, str] = {}
        self._throughput = Throughput()

    def tick(self, view: AttemptView, now_s: float) -> None:
        """Request the ranks' collectives if it is time, and record the findings."""
        ranks = set(view.detector.living)
        is_due = self._slow.due(now_s, view.detector.median_step_s)
        if is_due and 1 < len(ranks) == view.world_size and not view.detector.in_section:
            self._slow.request_sent(now_s)
            self._names = self._nodes.names()
            self._nodes.send({"kind": "collectives"}, to="rank")
        try:
            found = self._slow.look(now_s, ranks)
        except (
            ArithmeticError,
            LookupError,
            ValueError,
        ) as error:  # messages of ranks come from the user's code
            self._recorder.event_soon("malformed_message", {"error": repr(error)})
            found = None
        if found is not None:
            self._recorder.event_soon("slow_ranks", found.to_json())
            self._observe("trouble", {"text": _slow_ranks(found)})

    def answered(self, peer: Peer, message: Mapping[str, Any], at_s: float) -> None:
        """Record the collectives that a rank has sent.

        Raises:
            KeyError, TypeError, ValueError, IndexError: a field is malformed.
        """
        begun = collectives_of(message["collectives"])
        self._slow.answered(peer.rank, self._names.get(peer.rank, ""), begun, at_s)

    def stepped(self, step_s: float) -> None:
        """Record the time of a step."""
        changed = self._throughput.stepped(step_s)
        if changed is not None:
            self._recorder.event_soon("step_time", changed.to_json())
            self._observe("trouble", {"text": _step_time(changed)})


def _slow_ranks(found: SlowRanks) -> str:
    if not found.shares:
        return "No rank is slow any more."
    share = max(found.shares.values())
    ranks = " and ".join(str(rank) for rank in found.shares)
    where = "" if found.node is None else f" on node {found.node}"
    one = len(found.shares) == 1
    return (
        f"{'Rank' if one else 'Ranks'} {ranks}{where} {'is' if one else 'are'} slow: "
        f"the others wait for {'it' if one else 'them'} for {share:.0%} of the time."
    )


def _step_time(changed: Slower) -> str:
    if changed.is_over:
        return f"A step takes {changed.step_s:.3g} s again."
    return f"A step takes {changed.step_s:.3g} s; it took {changed.before_s:.3g} s before."
