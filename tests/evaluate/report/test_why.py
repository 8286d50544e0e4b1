import re
from dataclasses import replace

import pytest
from sample_evaluations import made_evaluation, made_timeline

from holdfast.evaluate.policy import account
from holdfast.evaluate.report.why import PATH_SHOWN, longest_waits, losses, lost_time, verdict, why
from holdfast.evaluate.types.evaluation import PathStep


@pytest.fixture(scope="module")
def evaluation():
    return made_evaluation(made_timeline())


def test_the_verdict_names_the_ratio_and_what_sets_the_bound(evaluation):
    assert verdict(evaluation) == (
        f"nightly on /models/llama-7b/step_12000 took {said(evaluation.makespan_s)}, 1.08 times "
        "its lower bound of "
        f"{said(evaluation.makespan_s / 1.08)} (engines)."
    )
    assert verdict(replace(evaluation, bound=())).endswith("no lower bound is known.")


def test_the_verdict_says_that_all_answers_were_known(evaluation):
    reused = replace(evaluation, bound=(), requests=0, reused=12)
    assert verdict(reused).endswith(" s. Nothing had to be run: all answers were known.")
    assert losses(reused) == ""
    for other in ({"requests": 1}, {"reused": 0}, {"state": "failed"}):
        assert "had to be run" not in verdict(replace(reused, **other))


def said(seconds):
    return (
        f"{seconds:.1f} s"
        if seconds < 119.95
        else f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    )


def test_lost_time_starts_with_what_was_useful_and_adds_up(evaluation):
    rows = lost_time(evaluation)
    assert [row.cause for row in rows] == [
        account.USEFUL,
        account.START,
        account.TAIL_SAMPLE,
        account.UNDERFILLED,
        account.SWAP,
    ]
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert [row.seconds for row in rows] == [800, 80, 60, 50, 10]
    slow = lost_time(
        replace(evaluation, account={account.START: 9.0, account.USEFUL: 1.0, account.LOST: 2.0})
    )
    assert [row.cause for row in slow] == [account.USEFUL, account.START, account.LOST]


def test_the_line_on_losses_names_the_three_largest(evaluation):
    assert losses(evaluation) == (
        "Useful work was 80.0% of the engines' time. Most of the rest: starting 8.0%; tail 6.0%; "
        "batches not full 5.0%."
    )
    lost = replace(evaluation, account={account.START: 1.0, account.TAIL_METRIC: 3.0})
    assert losses(lost) == (
        "Useful work was 0.0% of the engines' time. Most of the rest: tail, metrics 75.0%; "
        "starting 25.0%."
    )
    assert [
        losses(replace(evaluation, account=its))
        for its in ({}, {account.USEFUL: 3.0, account.SWAP: 0.001})
    ] == [
        "",
        "",
    ]


def test_the_text_has_every_number_and_no_odd_spaces(evaluation):
    text = why(evaluation)
    assert "\N{NO-BREAK SPACE}" not in text
    for row in lost_time(evaluation):
        assert re.search(rf"{row.name} +.*{row.share:.1%}", text)
    assert re.search(r"Storage +6\.0 s  2 GB at 350 MB/s", text)
    assert "Where the 1,000.0 engine-seconds of 4 engines went:" in text
    assert text.index("Engines") < text.index("Sample") < text.index("Storage")
    assert re.search(r"at 8\.5 s +Answer +51\.5 s +task_1", text)


def test_what_is_not_known_is_not_told(evaluation):
    bare = replace(evaluation, bound=(), account={}, critical_path=())
    assert why(bare) == verdict(bare) + "\n"


def test_a_cause_of_the_policys_own_is_shown_as_it_is(evaluation):
    (row,) = lost_time(replace(evaluation, account={"waiting_for_judge": 3.0}))
    assert (row.name, row.meaning, row.share) == ("Waiting for judge", "", 1.0)


def test_a_long_path_keeps_its_longest_steps():
    path = [PathStep(what="answer", t0=float(t), t1=t + (0.9 if t % 3 else 0.1)) for t in range(60)]
    kept = longest_waits(path)
    assert len(kept) == PATH_SHOWN
    assert all(step.t1 - step.t0 > 0.5 for step in kept)
    assert [step.t1 for step in kept] == sorted((step.t1 for step in kept), reverse=True)
