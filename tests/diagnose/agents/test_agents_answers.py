"""Test that a model's text counts only if it is one JSON object with the requested fields."""

import json

import pytest

from holdfast.diagnose.agents.answers import (
    Malformed,
    choice_field,
    json_object,
    line_number,
    list_field,
    text_field,
    with_fields,
)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        ' \n{"a": 1}\n',
        '```json\n{"a": 1}\n```',
        '```\n{"a": 1}```',
        '<think>{"a": 2} or so</think>\n{"a": 1}',
        '<think>x</think>```json\n{"a": 1}\n```',
    ],
)
def test_an_object_is_read(text):
    assert json_object(text) == {"a": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[1]",
        '"a"',
        "restart",
        'Sure! {"a": 1}',
        '{"a": 1} I hope this helps',
        '{"a": 1}{"a": 2}',
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1',
        "{'a': 1}",
        '{"a": ' + "[" * 100_000,
        '{"a": ' + "[" * 20 + "]" * 20 + "}",
        '{"a": ' + "9" * 5000 + "}",
        '<think>{"a": 1}',
        "```json\n```",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(Malformed):
        json_object(text)


def test_fields_are_exactly_those_asked_for():
    assert with_fields({"a": 1}, ("a",)) == {"a": 1}
    for given in ({}, {"a": 1, "b": 2}, {"b": 1}, [], None, "a"):
        with pytest.raises(Malformed, match="fields"):
            with_fields(given, ("a",))


@pytest.mark.parametrize("value", [None, 3, "", "   ", "x" * 11, ["x"], True])
def test_texts_are_bounded(value):
    with pytest.raises(Malformed):
        text_field({"a": value}, "a", most=10)
    assert text_field({"a": " yes "}, "a", most=10) == "yes"


@pytest.mark.parametrize("value", ["Restart", "restart ", "", None, 1, ["restart"], {"restart": 1}])
def test_words_are_on_the_list(value):
    with pytest.raises(Malformed):
        choice_field({"a": value}, "a", ("restart",))
    assert choice_field({"a": "restart"}, "a", ("restart",)) == "restart"


@pytest.mark.parametrize("value", [None, "x", {}, [1, 2, 3], []])
def test_lists_are_bounded(value):
    with pytest.raises(Malformed):
        list_field({"a": value}, "a", most=2, least=1)


@pytest.mark.parametrize("value", [0, -1, 4, True, 1.0, "1", None, [1]])
def test_lines_exist(value):
    with pytest.raises(Malformed):
        line_number(json.loads(json.dumps(value)), 3)
    assert line_number(3, 3) == 3
