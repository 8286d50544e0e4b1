"""Check predictions from earlier samples and from the task's observations."""

import msgspec
import pytest

from holdfast.evaluate.policy.longest_first import LongestFirst
from holdfast.evaluate.policy.priors import Priors, decode_history, encode_history


def test_the_same_sample_before_comes_first_then_the_limit():
    priors = Priors(["a", "b"])
    priors.observe_tokens(0, 3, 50.0, 70)
    priors.observe_metric(0, 3, 2.5)
    again = Priors.from_history(decode_history(encode_history(priors.history())), ["b", "a"])
    assert again.tokens(1, 3, 100).q50 == 70
    assert again.tokens(1, 3, 60) == (60, 60), "it cannot be longer than its limit"
    assert again.metric_s(1, 3) == 2.5
    assert again.tokens(1, 4, 1000) == again.tokens(0, 4, 1000), "of these nothing is known"
    assert again.tokens(1, 3, 0) == (0, 0)


def test_answers_correct_the_rest_but_the_short_ones_come_first():
    priors = Priors(["a"])
    for number in range(100):
        priors.ask(0, 100.0)
        del number
    for number in range(10):
        priors.unask(0, 100.0)
        priors.observe_tokens(0, number, 100.0, 10)
    assert 0.8 < priors.correction(0) < 1.0, (
        "90 are still out: the ten that came were the short ones"
    )
    for number in range(10, 100):
        priors.unask(0, 100.0)
        priors.observe_tokens(0, number, 100.0, 10)
    assert priors.correction(0) == pytest.approx(0.1, abs=0.05)


def test_a_history_that_is_torn_is_refused():
    with pytest.raises(msgspec.DecodeError):
        decode_history(b'[{"task":"a","numbers":"AAAAAA==","new_tokens":"","metric_s":""}]')
    with pytest.raises(msgspec.DecodeError):
        decode_history(b"[{")


def test_longest_first_over_tasks_and_what_came_back_before_all():
    queue = LongestFirst()
    for task, length_s, entry in (
        (0, 1.0, 10),
        (1, 5.0, 11),
        (0, 9.0, 12),
        (1, 5.01, 13),
        (2, 0.0, 14),
    ):
        queue.add(task, entry, length_s=length_s, prefill_s=0.0, metric_s=0.0)
    assert queue.longest_s() == pytest.approx(9.0, rel=0.1)
    queue.add_front((7, 8))
    assert [queue.pop() for _ in range(3)] == [(7, 8), 12, 13]
    queue.review(lambda task: 100.0 if task == 0 else 1.0)
    assert queue.peek() == 10
    assert [queue.pop() for _ in range(len(queue))] == [10, 11, 14]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()
