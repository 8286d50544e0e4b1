"""Test the retention policy over random folders: protected checkpoints stay, each rule holds."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.catalog.annotations import Annotation, Annotations, ReadHold
from holdfast.checkpoint.catalog.catalog import CheckpointInfo
from holdfast.checkpoint.catalog.retention import (
    Best,
    Retention,
    deletable_for_room,
    judge,
    superfluous,
)
from holdfast.core.errors import BadUse

NOW_S = 1000.0
NOTED = Annotation(at_s=1.0, by="a")


def one(step, *, state="written", replaced=False, created_at_s=500.0, **marks):
    path = Path(f"/c/step-{step:010}" + (".replaced" if replaced else ""))
    return CheckpointInfo(
        step=step, path=path, state=state, created_at_s=created_at_s, marks=Annotations(**marks)
    )


MARKS = st.builds(
    Annotations,
    verified=st.sampled_from([None, None, NOTED]),
    healthy=st.sampled_from([None, None, NOTED]),
    damaged=st.sampled_from([None, None, None, NOTED]),
    pinned=st.sampled_from([None, None, None, NOTED]),
    wanted=st.sampled_from(
        [{}, {}, {"e": ReadHold(at_s=1.0)}, {"e": ReadHold(at_s=1.0, until_s=NOW_S - 1)}]
    ),
    metrics=st.dictionaries(st.sampled_from(["loss", "acc"]), st.floats(), max_size=2),
    unreadable=st.sampled_from([None] * 6 + ["it is damaged"]),
)


@st.composite
def folders(draw, marks=MARKS):
    """Draw a result of `scan`: newest first, a step's proper folder before its replaced one."""
    found = []
    for step in sorted(draw(st.sets(st.integers(0, 12), max_size=7)), reverse=True):
        for replaced in draw(st.sampled_from([[False], [False], [False], [True], [False, True]])):
            state = draw(st.sampled_from(["written"] * 5 + ["damaged", "incomplete"]))
            created_at_s = draw(st.sampled_from([100.0, 950.0, 1000.0, 1100.0, None]))
            info = one(step, state=state, replaced=replaced, created_at_s=created_at_s)
            found.append(replace(info, marks=draw(marks)))
    return found


POLICIES = st.builds(
    Retention,
    last=st.none() | st.integers(1, 4),
    every_steps=st.none() | st.integers(1, 5),
    within_s=st.none() | st.floats(1, 1000),
    best=st.lists(
        st.builds(
            Best,
            metric=st.sampled_from(["loss", "acc"]),
            count=st.integers(1, 3),
            mode=st.sampled_from(["min", "max"]),
        ),
        max_size=2,
    ).map(tuple),
)


def going(verdicts):
    return [verdict.info for verdict in verdicts if not verdict.stays]


def is_whole(info):
    return info.state == "written" and info.marks.damaged is None


@given(folders(), POLICIES)
def test_what_must_never_go_stays_whatever_the_rules(found, policy):
    verdicts = judge(found, policy, now_s=NOW_S)
    gone = going(verdicts)
    assert [verdict.info for verdict in verdicts] == found
    assert all(bool(verdict.stays) != bool(verdict.goes) for verdict in verdicts)
    whole = [info for info in found if is_whole(info)]
    assert all(info in whole for info in gone), "evidence stays"
    assert whole[:1] == [] or whole[0] not in gone, "the newest stays"
    good = [info for info in whole if info.marks.verified]
    assert not good or good[0] not in gone, "the newest verified one stays"
    healthy = [info for info in whole if info.marks.healthy]
    assert not healthy or healthy[0] not in gone, "the newest healthy one stays"
    for info in gone:
        assert info.marks.pinned is None
        assert info.marks.unreadable is None
        assert all(
            want.until_s is not None and want.until_s <= NOW_S
            for want in info.marks.wanted.values()
        )


@given(folders(), POLICIES)
def test_what_a_rule_names_stays(found, policy):
    gone = going(judge(found, policy, now_s=NOW_S))
    counted = {}
    for info in found:
        if is_whole(info):
            counted.setdefault(info.step, info)
    counted = list(counted.values())
    assert not [info for info in counted[: policy.last or 0] if info in gone]
    for info in counted:
        if policy.every_steps and info.step % policy.every_steps == 0:
            assert info not in gone
        if (
            policy.within_s
            and info.created_at_s is not None
            and info.created_at_s >= NOW_S - policy.within_s
        ):
            assert info not in gone
    for best in policy.best:
        kept = [
            info.marks.metrics[best.metric] for info in counted if best.metric in info.marks.metrics
        ]
        numbers = sorted((value for value in kept if value == value), reverse=best.mode == "max")[
            : best.count
        ]
        staying = [info.marks.metrics.get(best.metric) for info in counted if info not in gone]
        assert all(staying.count(value) >= numbers.count(value) for value in numbers)
    if not policy.has_rules:
        assert not [info for info in counted if info in gone]


@given(folders(), POLICIES)
def test_applying_a_policy_twice_deletes_nothing_more(found, policy):
    left = [verdict.info for verdict in judge(found, policy, now_s=NOW_S) if verdict.stays]
    assert going(judge(left, policy, now_s=NOW_S)) == []


@given(folders(), POLICIES)
def test_without_the_time_no_want_ends_and_no_checkpoint_is_old(found, policy):
    known, unknown = (going(judge(found, policy, now_s=now_s)) for now_s in (NOW_S, None))
    assert all(info in known for info in unknown)
    assert not [info for info in unknown if info.marks.wanted]


def beyond_the_newest(checkpoints, committed, damaged, keep):
    """Return the checkpoints that `keep=N` deletes, equal to `Retention(last=N)` without marks."""
    whole = [info for info in checkpoints if info.state == "written" and info.path not in damaged]
    first_of_step = {}
    for info in whole:
        first_of_step.setdefault(info.step, info)
    counted = [info.path for info in first_of_step.values()]
    beyond = [] if keep is None else [path for path in counted[keep:] if path != committed]
    doubles = [info.path for info in whole if info.path.suffix and info.path not in counted]
    return [*doubles, *beyond]


@given(folders(marks=st.just(Annotations())), st.none() | st.integers(1, 4), st.data())
def test_keep_as_a_number_is_what_it_was(found, keep, data):
    if not found:
        return
    paths = [info.path for info in found]
    committed = data.draw(
        st.sampled_from([path for path in paths if not path.suffix] or [Path("/c/none")])
    )
    damaged = data.draw(st.sets(st.sampled_from(paths), max_size=2)) - {committed}
    gone = superfluous(found, committed=committed, damaged=damaged, keep=keep)
    assert [info.path for info in gone] == beyond_the_newest(found, committed, damaged, keep)


def test_every_reason_is_told():
    found = [
        one(60),
        one(50, state="damaged"),
        one(40, verified=NOTED, metrics={"loss": 2.0}),
        one(30, wanted={"eval-1": ReadHold(at_s=1.0, until_s=NOW_S + 1)}, metrics={"loss": 1.0}),
        one(20, pinned=Annotation(at_s=1.0, by="a", why="the paper's"), metrics={"loss": 3.0}),
        one(10, healthy=NOTED, metrics={"loss": float("nan")}),
        one(10, replaced=True),
        one(5, created_at_s=999.0),
        one(4),
    ]
    policy = Retention(
        last=1, every_steps=30, within_s=10.0, best=(Best(metric="loss", count=2, mode="min"),)
    )
    verdicts = judge(found, policy, now_s=NOW_S)
    assert [verdict.stays or verdict.goes for verdict in verdicts] == [
        ("one of the last 1", "every 30 steps", "the newest"),
        ("evidence: damaged",),
        ("loss 2 is number 2 (min)", "the newest verified one"),
        ("every 30 steps", "loss 1 is number 1 (min)", "wanted by eval-1"),
        ("pinned: the paper's",),
        ("the newest healthy one",),
        "its step was saved again",
        ("written within 10 s",),
        "no rule keeps it",
    ]


def test_a_checkpointer_may_be_given_a_whole_policy():
    found = [one(step) for step in range(9, 0, -1)]
    gone = superfluous(
        found, committed=found[0].path, damaged=(), keep=Retention(last=2, every_steps=4)
    )
    assert [info.step for info in gone] == [7, 6, 5, 3, 2, 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"last": 0}, "last is 0"),
        ({"last": True}, "last is True"),
        ({"every_steps": -1}, "every_steps is -1"),
        ({"within_s": 0.0}, "within_s is 0.0"),
        ({"within_s": float("nan")}, "within_s is nan"),
    ],
)
def test_values_that_are_not_allowed_are_named(wrong, said):
    with pytest.raises(BadUse, match=f"{said}; allowed is"):
        Retention(**wrong)


def test_a_metric_of_no_name_count_or_direction_is_refused():
    with pytest.raises(BadUse, match="count of 'loss' is 0"):
        Best(metric="loss", count=0, mode="min")
    with pytest.raises(BadUse, match="has a name"):
        Best(metric="", count=1, mode="min")
    with pytest.raises(BadUse, match="allowed are 'min' and 'max'"):
        Best(metric="loss", count=1, mode="least")


def test_on_a_full_disk_what_is_kept_for_its_age_alone_goes_the_oldest_first():
    found = [
        one(6),
        one(5),
        one(4, pinned=NOTED),
        one(3),
        one(3, replaced=True),
        one(2, verified=NOTED),
        one(1),
    ]
    going = deletable_for_room(found, damaged=(), keep=Retention(last=10), now_s=NOW_S)
    assert [info.path.name for info in going] == [
        "step-0000000003.replaced", "step-0000000001", "step-0000000003", "step-0000000005"
    ]  # fmt: skip
    going = deletable_for_room(
        found, damaged=(), keep=Retention(last=10, every_steps=5), now_s=NOW_S
    )
    assert [info.step for info in going] == [3, 1, 3]
    assert [
        info.step for info in deletable_for_room(found, damaged=(), keep=Retention(), now_s=NOW_S)
    ] == [3]


@given(found=folders(), policy=POLICIES)
def test_on_a_full_disk_the_newest_stays_and_what_the_rules_let_go_goes(found, policy):
    going = {info.path for info in deletable_for_room(found, damaged=(), keep=policy, now_s=NOW_S)}
    verdicts = judge(found, policy, now_s=NOW_S)
    assert {verdict.info.path for verdict in verdicts if not verdict.stays} <= going
    for verdict in verdicts:
        if any(not reason.startswith("one of the last") for reason in verdict.stays):
            assert verdict.info.path not in going
