"""The states that Slurm gives the nodes, in recorded output, as signals and notices."""

import asyncio

import pytest

from holdfast.cluster.slurm_nodes import parse_nodes
from holdfast.core.errors import HoldfastError
from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.slurm import NAME, facts_of, slurm_states

LINE = "NodeName=n1 Arch=x86_64 CoresPerSocket=1 State={state} ThreadsPerCore=1 {rest}"


def node(state, rest=""):
    return parse_nodes(LINE.format(state=state, rest=rest))["n1"]


@pytest.mark.parametrize("state", ["ALLOCATED", "MIXED", "IDLE+COMPLETING", "IDLE+PLANNED"])
def test_a_node_that_serves_has_no_facts(state):
    assert facts_of(node(state)) == []


@pytest.mark.parametrize(
    ("state", "rest", "kind", "text"),
    [
        ("MIXED+DRAIN", "Reason=fan 3 broken [root@2026-11-27T03:00:00]", "drain", "drain: fan 3 broken"),
        ("ALLOCATED+MAINT", "ReservationName=m1", "maintenance", "maint"),
        ("MIXED+DRAIN+REBOOT_REQUESTED", "", "maintenance", "drain+reboot_requested"),
    ],
)  # fmt: skip
def test_a_node_that_is_drained_or_maintained_has_a_notice(state, rest, kind, text):
    (notice,) = facts_of(node(state, rest))
    assert (notice.kind, notice.text, notice.until_s) == (kind, text, None)


def test_a_node_that_is_down_has_a_signal_and_a_drain_of_our_own_is_nothing_new():
    (signal,) = facts_of(node("DOWN*", "Reason=Not responding [slurm@2026-11-27T03:00:00]"))
    assert (signal.source, signal.name) == (NAME, "scheduler-down")
    assert facts_of(node("MIXED+DRAIN", "Reason=holdfast: bad [me@2026-11-27T03:00:00]")) == []


def test_a_controller_that_is_away_says_nothing_of_the_nodes():
    def away(_names):
        raise HoldfastError("slurmctld does not answer")

    with pytest.raises(CannotSee, match="does not answer"):
        slurm_states(["n1"], away)
    drained = node("MIXED+DRAIN")
    assert list(slurm_states(["n1"], lambda _names: {"n1": drained})) == ["n1"]


def test_the_states_are_read_in_a_thread_when_due_and_their_ends_are_taken_in(make):
    answers = [{"n2": facts_of(node("MIXED+DRAIN"))}, CannotSee("away"), {}]

    def states(_names):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    place = make(states=states)

    async def look():
        left = len(answers)
        while len(answers) == left or place.health._reading is not None:
            place.look()
            await asyncio.sleep(0)
        place.clock.advance(31.0)

    asyncio.run(look())
    assert [kind for kind, _ in place.recorded] == ["notice", "node_set_aside"]
    assert place.told == []
    asyncio.run(look())
    assert f"{NAME} on all nodes: away" in place.health.coverage()["not_seen"]
    assert place.health.aside()
    asyncio.run(look())
    assert f"{NAME} on all nodes" in place.health.coverage()["looked_at"]
    assert not place.health.aside()


def test_while_slurmctld_is_away_for_a_minute_the_job_is_not_touched(make):
    """Its nodes are down for Slurm meanwhile and afterwards, too, but one sign is not two."""
    away, asked = [True], []

    def read(names):
        asked.append(tuple(names))
        if away[0]:
            raise HoldfastError("scontrol failed: Unable to contact slurm controller")
        return {"n2": node("DOWN+NOT_RESPONDING")}

    place = make(states=lambda names: slurm_states(names, read))

    async def pass_seconds(seconds):
        for _ in range(seconds):
            place.clock.advance(1.0)
            place.look()
            while place.health._reading is not None and not place.health._reading.done():
                await asyncio.sleep(0)

    async def play():
        await pass_seconds(60)
        known = place.health.coverage()["not_seen"]
        away[0] = False
        await pass_seconds(60)
        return known

    known = asyncio.run(play())
    assert any("Unable to contact slurm controller" in text for text in known)
    assert len(asked) >= 4
    assert (place.told, place.health.aside(), place.nodes.cordoned) == ([], {}, frozenset())
    assert "node_signal" in place.kinds()
