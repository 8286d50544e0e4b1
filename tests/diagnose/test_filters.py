"""Test that filters match their examples and no cause, and that errors name broken files."""

import pytest

from holdfast.core.errors import BadUse
from holdfast.diagnose.logs.filters import Filters, packaged_filters, parse_filters
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.rules.packaged import packaged_rules
from holdfast.diagnose.rules.rules import ROUTINE

GOOD = "[{id: dots, pattern: '^\\.+$', source: mine, match: ['...']}]"


@pytest.mark.parametrize("one", packaged_filters(), ids=lambda one: one.id)
def test_each_knows_its_examples(one):
    for line in one.match:
        assert Filters([one]).routine(clean_line(line.encode(), 1).text), line


def test_ids_are_unique():
    ids = [one.id for one in packaged_filters()]
    assert len(ids) == len(set(ids))


def test_none_drops_a_line_that_a_rule_takes_for_a_cause():
    """Test all rules but those whose lines are information or a Python warning."""
    filters = Filters(packaged_filters())
    dropped = [
        (rule.id, example)
        for rule in packaged_rules().rules
        if rule.kind not in (ROUTINE, "teardown", "suspect")
        for example in rule.match
        if filters.routine(clean_line(example.encode(), 1).text)
        and "INFO" not in example
        and "Warning" not in example
    ]
    assert dropped == []


def test_no_root_of_the_labelled_cases_is_routine(dev_cases):
    filters = Filters(packaged_filters())
    for case in dev_cases:
        lines = case["noisy"].read_bytes().split(b"\n")
        roots = [clean_line(lines[number - 1], number).text for number in case["noisy_root_lines"]]
        assert not all(filters.routine(text) for text in roots), case["id"]


def test_most_of_a_noisy_log_is_routine_or_repeated(dev_cases):
    from holdfast.diagnose.logs.progress import reported_step

    filters = Filters(packaged_filters())
    case = dev_cases[0]
    texts = [clean_line(line, 1).text for line in case["noisy"].read_bytes().split(b"\n")]
    routine = [text for text in texts if filters.routine(text) or reported_step(text) is not None]
    assert len(routine) > 0.5 * len(texts)


def test_without_filters_nothing_is_routine():
    assert not Filters([]).routine("...")
    assert Filters(parse_filters("x", GOOD)).routine("...")
    assert parse_filters("x", "") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1", "not YAML"),
        ("{a: 1}", "a list of filters is wanted"),
        ("[3]", "a filter has exactly id, match, pattern, source"),
        (GOOD.replace("id: dots, ", ""), "a filter has exactly"),
        (GOOD.replace("source: mine", "source: mine, colour: red"), "a filter has exactly"),
        (GOOD.replace("['...']", "[]"), "a filter has exactly"),
        (GOOD.replace("^\\.+$", "(x"), "not a pattern of RE2"),
        (GOOD.replace("^\\.+$", "(?=x)x"), "not a pattern of RE2"),
        (GOOD.replace("['...']", "['abc']"), "does not match its own example 'abc'"),
    ],
)
def test_a_broken_file_is_named(text, says):
    with pytest.raises(BadUse, match=r"^mine\.yaml: ") as caught:
        parse_filters("mine.yaml", text)
    assert says in str(caught.value)
