"""Messages of a rank that cannot be true, or are too many; and a real run with a lying rank."""

from dataclasses import replace

import pytest

from holdfast.recover.agent.trust import (
    FLOOD_MESSAGES,
    FLOOD_S,
    FUTURE_S,
    KNOWN_STEPS,
    LEAP,
    LIES,
    MAX_STEP,
    Trust,
    why_not,
)
from holdfast.recover.channel import Peer

WALL_S = 1_800_000_000.0


def step(number, at_s=WALL_S):
    return {"kind": "step", "step": number, "at_s": at_s}


def judged(messages, *, every_s=0.1, trust=None):
    """Return the first reason to cut the rank off, and the number of messages before that."""
    trust = trust or Trust()
    for count, message in enumerate(messages):
        if why := trust.judge(message, count * every_s, WALL_S):
            return why, count
    return "", None


@pytest.mark.parametrize("number", [-1, MAX_STEP + 1, 10**400, 1.5, "7", None, True])
def test_a_step_that_nobody_can_make_is_named_at_once(number):
    why, _ = judged([step(number)])
    assert why.startswith("it reports the impossible step")
    assert len(why) < 100


def test_a_leap_of_the_step_is_named():
    honest = [step(10 * number) for number in range(KNOWN_STEPS + 1)]
    last = 10 * KNOWN_STEPS
    assert judged([*honest, step(last + 10 * LEAP)]) == ("", None)
    why, count = judged([*honest, step(last + 10 * LEAP + 1)])
    assert (why, count) == (f"it reports the impossible step 10201 after step {last}", len(honest))


@pytest.mark.parametrize(
    "steps",
    [
        range(3 * FLOOD_MESSAGES),  # a loop that does nothing, at 100,000 steps a second
        [*range(100), 7, *range(8, 200)],  # it has gone back to a checkpoint
        [1000, 2000, *range(2100, 9000, 100)],
        [5_000_000, *range(5_000_001, 5_000_100)],  # it goes on from a checkpoint
    ],
)
def test_honest_steps_of_every_kind_are_taken(steps):
    assert judged(map(step, steps), every_s=1e-5) == ("", None)


def test_times_from_the_future_are_named_if_they_stay_there():
    future = WALL_S + FUTURE_S + 1
    why, count = judged([step(number, future) for number in range(LIES)])
    assert (why, count) == ("it reports steps 61 s in the future", LIES - 1)
    set_back = [step(number, WALL_S + 7200) for number in range(LIES - 1)]
    assert judged([*set_back, step(LIES)]) == ("", None), "the clock was set back meanwhile"
    assert judged([step(number, -1e9) for number in range(99)]) == ("", None)


@pytest.mark.parametrize("flood", [{"kind": "event"}, {"kind": "section"}, step(7)])
def test_a_flood_is_named_and_many_messages_in_a_long_time_are_none(flood):
    messages = [flood] * (2 * FLOOD_MESSAGES)
    why, count = judged(messages, every_s=1e-4)
    assert why.startswith(f"it floods: {FLOOD_MESSAGES + 1} messages in ")
    assert count <= FLOOD_MESSAGES + 1
    assert judged(messages, every_s=1.1 * FLOOD_S / FLOOD_MESSAGES) == ("", None)


RANK = Peer(role="rank", attempt=1, rank=0, local_rank=0, world_size=2, pid=31)
SHIMS = {10 + rank: replace(RANK, role="shim", rank=rank, pid=10 + rank) for rank in range(2)}
PARENTS = {31: 21, 21: 11, 11: 5, 30: 10, 10: 5, 5: 1, 40: 5}


def test_a_process_below_the_shim_of_another_rank_is_named():
    assert why_not(RANK, SHIMS, PARENTS.get) == "process 31 of rank 1 reports as this rank"
    assert why_not(replace(RANK, pid=30), SHIMS, PARENTS.get) == ""
    assert why_not(replace(RANK, rank=1), SHIMS, PARENTS.get) == ""


def test_where_the_tree_of_processes_does_not_show_it_a_process_is_admitted():
    assert why_not(replace(RANK, pid=40), SHIMS, PARENTS.get) == "", "below neither"
    assert why_not(replace(RANK, pid=77), SHIMS, PARENTS.get) == "", "hidden"
    assert why_not(RANK, {11: SHIMS[11]}, PARENTS.get) == "", "the rank has no shim here"
    nested = replace(RANK, world_size=8)
    assert why_not(nested, SHIMS, PARENTS.get) == "", "a launcher that the script has started"


LIAR = """
import os, pathlib, time
import holdfast

run = holdfast.attach()
rank, step = int(os.environ["RANK"]), 0
while not pathlib.Path("finish").exists():
    step += 1
    run.step(step if rank == 0 or step < 30 else 10**18)
    time.sleep(0.01)
"""


def test_a_rank_that_lies_is_cut_off_and_named_and_the_training_goes_on(place):
    command = ["run", "--name", "r", "--", *place.ranks(2, place.job(LIAR))]
    with place.start(*command) as process, place.ledger() as ledger:
        place.wait_until(lambda: ledger.events("r", kind="rank_cut_off"))
        place.wait_for_step("r", 100)
        (place.folder / "finish").touch()
        _, err = process.communicate(timeout=240)
        (event,) = ledger.events("r", kind="rank_cut_off")
        assert ledger.incidents("r") == []
        assert len(ledger.attempts("r")) == 1
    assert process.returncode == 0, err
    assert event.rank == 1
    assert "Rank 1 is cut off: it reports the impossible step 1000000000000000000." in err
