"""Check that each sample is complete once, with its last answer, for shared requests too."""

import os
from pathlib import Path

import pytest

from holdfast.evaluate.coordinator.open_requests import OpenRequests, measured_key
from holdfast.evaluate.types.requests import Request, keyed, pack_tokens
from holdfast.evaluate.wire.answer_journal import Journal
from holdfast.evaluate.wire.messages import KeyedSample


def request(*tokens):
    return keyed(
        Request(kind="loglikelihood", prompt=pack_tokens(tokens), continuation=pack_tokens([1]))
    )


def sample(number, *requests, metric_key=b""):
    return KeyedSample(sample=number, requests=list(requests), metric_key=metric_key)


@pytest.fixture
def book(tmp_path):
    book = OpenRequests(tmp_path)
    yield book
    book.close()


@pytest.fixture
def answers(tmp_path):
    journal = Journal(tmp_path, "weights A")
    yield journal
    journal.close()


def test_a_sample_is_complete_with_its_last_answer(book, answers):
    opened = book.add(0, 0, sample(5, request(1), request(2)), answers)
    first, second = opened.missing_requests
    assert book.answered(first) == []
    assert book.answered(second) == [opened]
    assert (opened.place, opened.error) == (5, "")


def test_an_engine_gets_what_the_client_sent(book, answers):
    asked = request(1, 2, 3)
    book.add(0, 0, sample(0, request(9)), answers)
    opened = book.add(0, 0, sample(1, asked), answers)
    assert book.body(opened.missing_requests[0]) == asked.body


def test_a_question_of_two_samples_is_asked_once(book, answers):
    one = book.add(0, 0, sample(0, request(1)), answers)
    other = book.add(0, 1, sample(0, request(1), request(2)), answers)
    assert one.missing_requests[0] is other.missing_requests[0]
    assert book.answered(one.missing_requests[0]) == [one]
    assert other.missing == 1
    assert book.answered(other.missing_requests[1]) == [other]


def test_a_question_twice_in_one_sample_counts_once(book, answers):
    opened = book.add(0, 0, sample(0, request(1), request(1)), answers)
    assert opened.missing == 1
    assert book.answered(opened.missing_requests[0]) == [opened]


def test_models_do_not_share_questions(book, answers):
    one = book.add(0, 0, sample(0, request(1)), answers)
    other = book.add(1, 0, sample(0, request(1)), answers)
    assert one.missing_requests[0] is not other.missing_requests[0]


def test_what_the_journal_has_is_not_asked(book, answers):
    answers.commit([(request(1).key, b"answer")])
    opened = book.add(0, 0, sample(0, request(1), request(2)), answers)
    assert [one.key for one in opened.missing_requests] == [request(2).key]


def test_a_client_that_says_it_again_adds_nothing(book, answers):
    assert book.add(0, 0, sample(0, request(1)), answers)
    assert book.add(0, 0, sample(0, request(1)), answers) is None
    assert book.add(0, 0, sample(0, request(2)), answers)  # the next turn of the same sample


def test_an_error_is_that_of_every_sample_that_waits(book, answers):
    one = book.add(0, 0, sample(0, request(1)), answers)
    other = book.add(0, 0, sample(1, request(1)), answers)
    assert book.answered(one.missing_requests[0], error="too long") == [one, other]
    assert {one.error, other.error} == {"too long"}


def test_dropping_a_task_leaves_the_others_questions(book, answers):
    one = book.add(0, 0, sample(0, request(1), request(2)), answers)
    other = book.add(0, 1, sample(0, request(1)), answers)
    shared, own = one.missing_requests
    book.drop(0, 0)
    assert book.sample(one.number) is None
    assert book.request(own.number) is None
    assert book.answered(shared) == [other]


def test_what_nobody_waits_for_any_more_is_another_request_when_it_is_asked_again(book, answers):
    first = book.add(0, 0, sample(0, request(1)), answers).missing_requests[0]
    book.drop(0, 0)
    again = book.add(0, 1, sample(0, request(1)), answers).missing_requests[0]
    assert again.number != first.number
    assert book.body(again) == request(1).body


def test_nothing_of_a_model_that_ended_stays_on_the_disk(book, answers, tmp_path):
    bodies = lambda: sum(  # noqa: E731
        entry.stat().st_size for entry in os.scandir("/proc/self/fd") if _is_in(entry, tmp_path)
    )
    book.add(0, 0, sample(0, request(*range(1000))), answers)
    kept = book.add(1, 0, sample(0, request(1)), answers).missing_requests[0]
    before = bodies()
    book.drop(0)
    assert bodies() < before - 1000
    assert book.body(kept) == request(1).body


def _is_in(descriptor, folder):
    try:
        return str(Path(descriptor.path).readlink()).startswith(str(folder))
    except OSError:
        return False


def test_a_metric_is_kept_under_its_key_and_its_answers():
    assert measured_key(b"m", [b"a", b"b"]) == measured_key(b"m", [b"a", b"b"])
    different = [
        measured_key(b"m", [b"ab"]),
        measured_key(b"m", [b"a", b"c"]),
        measured_key(b"n", [b"a", b"b"]),
    ]
    assert measured_key(b"m", [b"a", b"b"]) not in different
    assert len(set(different)) == 3
