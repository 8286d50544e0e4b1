"""Test the least accuracy on the labelled development cases, clean and noisy."""

import pytest

both = pytest.mark.parametrize("kind", ["clean", "noisy"])


@both
def test_reason(dev_answers, kind):
    wrong = [
        (case["id"], answer.reason)
        for case, answer in dev_answers[kind]
        if answer.reason not in case["accept_reasons"]
    ]
    assert len(wrong) <= 0.05 * len(dev_answers[kind]), wrong


def test_reason_where_the_cascade_is_printed_first(dev_answers):
    late = [
        (case, answer) for case, answer in dev_answers["noisy"] if case["noisy_cascade_before_root"]
    ]
    wrong = [
        (case["id"], answer.reason)
        for case, answer in late
        if answer.reason not in case["accept_reasons"]
    ]
    assert len(late) > 5
    assert len(wrong) <= 0.1 * len(late), wrong


def test_root_line(dev_answers):
    missed = [
        (case["id"], [line.line for line in answer.root_lines], case["noisy_root_lines"])
        for case, answer in dev_answers["noisy"]
        if not {line.line for line in answer.root_lines} & set(case["noisy_root_lines"])
    ]
    assert len(missed) <= 0.05 * len(dev_answers["noisy"]), missed


@both
def test_restart_decision(dev_answers, kind):
    wrong = [
        (case["id"], answer.restart_helps, answer.decided_by)
        for case, answer in dev_answers[kind]
        if case["recoverable_by_restart"] in (True, False)
        and answer.restart_helps != case["recoverable_by_restart"]
    ]
    assert len(wrong) <= 0.08 * len(dev_answers[kind]), wrong


@both
def test_no_recoverable_infrastructure_failure_is_laid_at_the_users_door(dev_answers, kind):
    blamed = [
        case["id"]
        for case, answer in dev_answers[kind]
        if case["category"] == "Infrastructure"
        and case["recoverable_by_restart"]
        and answer.action == "user_must_fix"
    ]
    assert blamed == []


@both
def test_it_is_seldom_sure_and_wrong(dev_answers, kind):
    sure = [(case, answer) for case, answer in dev_answers[kind] if answer.confidence >= 0.8]
    wrong = [case["id"] for case, answer in sure if answer.reason not in case["accept_reasons"]]
    assert len(sure) > 0.3 * len(dev_answers[kind])
    assert len(wrong) <= 0.03 * len(sure), wrong


@both
def test_every_answer_is_whole(dev_answers, kind):
    for case, answer in dev_answers[kind]:
        assert answer.mitigation.endswith((".", ")", "?")), case["id"]
        assert answer.decided_by or answer.reason == "Unknown"
        lines = case[kind].read_text(errors="replace").split("\n")
        for one in answer.evidence:
            assert one.text[:30] in lines[one.line - 1] or "\x1b" in lines[one.line - 1], (
                case["id"],
                one,
            )
