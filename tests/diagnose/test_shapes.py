"""Test that a lookup by shape returns the result of the line itself, in linear time."""

import dataclasses
import random

import pytest
import re2

from holdfast.diagnose.explain import life
from holdfast.diagnose.explain.scan import scan
from holdfast.diagnose.logs.files import find_files
from holdfast.diagnose.logs.lines import clean_line, dialects
from holdfast.diagnose.rules.packaged import packaged_rules, packaged_topics
from holdfast.diagnose.rules.rules import RuleSet, Topic
from holdfast.diagnose.shapes import shape_of, with_own_digits

WHERE = ("line", "user_exception", "library_exception")


def renumbered(text, draw):
    """Return `text` with random digits."""
    return "".join(draw.choice("0123456789") if one in "0123456789" else one for one in text)


def test_a_shape_keeps_zero_and_the_length():
    assert shape_of("rank 07 of 512, 0x3f") == "rank 01 of 111, 0x1f"


def test_patterns_that_tell_texts_of_one_shape_apart():
    assert with_own_digits([r"\d{3}", r"[1-9]\d", r"[0-9a-f]+"]) == []
    assert len(with_own_digits([r"Xid 79", r"1[5-9]\d{8}"])) == 2


@pytest.mark.parametrize(
    "pattern",
    ["code [01]$", "code [^02468]$", r"code [\x31-\x35]", r"code \x37", r"code \061", r"code \Q7\E",
     r"[c\pL]ode 7", r"code\x20[0-8]", "[]1-5]$", "code a{,3}|[[:digit:]]3"],
)  # fmt: skip
def test_own_rules_match_by_their_digits_however_these_are_written(pattern):
    rule = packaged_rules().rules[0]
    rule = dataclasses.replace(rule, id="own", pattern=pattern, where="line")
    rules = RuleSet([Topic(name="own", order=0, hot=frozenset(["code"]), rules=(rule,))])
    for text in (f"code {number}" for number in [*range(100), *range(100)]):
        assert (rules.find(text) is not None) is bool(re2.search(pattern, text)), text


def test_a_known_shape_gives_the_rule_and_the_captures_of_the_line_itself():
    """Test examples of all packaged rules with other numbers, each several times."""
    draw, rules, differs = random.Random(5), packaged_rules(), 0
    for rule in rules.rules:
        for text in rule.match[:2]:
            answers = set()
            for other in (text, text, *(renumbered(text, draw) for _ in range(6)), text):
                found = rules.find(other, rule.where)
                first = rules._first(other, rule.where)
                assert (found and found[0]) is first, other
                if found is not None:
                    named = first.regex.search(other).groupdict()
                    assert found[1] == {name: value for name, value in named.items() if value}
                answers.add(first and first.id)
            differs += len(answers) > 1
    assert differs > 20  # ensures that numbers decide in some cases


def test_a_known_shape_gives_the_prefixes_of_the_line_itself():
    draw, known = random.Random(6), dialects()
    for _, prefix, rest in known.examples:
        for _ in range(8):
            text = renumbered(prefix + rest, draw)
            (end, places), _ = known._find(text)
            expected = text[end:], {name: text[begin:stop] for name, begin, stop in places}
            assert known.part(text) == expected == known.part(text)


ERRORS = (
    "[rank{n}]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum={n}) ran for 6{n} ms\n"
    "2026-03-14 02:11:{n} ERROR node{n} attempt {n}: connection reset by peer\n"
    "[rank{n}]: KeyError: 'a{n}'\n"
)


@pytest.fixture
def counted(monkeypatch):
    """Return a function that counts the calls of a method."""

    def count(owner, name):
        calls, method = [], getattr(owner, name)

        def wrapped(*given):
            calls.append(name)
            return method(*given)

        monkeypatch.setattr(owner, name, wrapped)
        return calls

    return count


def test_the_rules_are_asked_once_for_errors_that_differ_in_numbers(tmp_path, counted):
    asked = counted(Topic, "find")
    log = tmp_path / "x.log"
    calls = []
    for errors in (100, 400):
        log.write_text("".join(ERRORS.format(n=10 + at % 90) for at in range(errors)))
        scan(find_files([log]).files, RuleSet(packaged_topics()))
        calls.append(len(asked))
        asked.clear()
    assert calls[0] == calls[1] > 0


def test_counters_are_judged_once_for_each_number_however_many_there_are(monkeypatch):
    judged = []
    is_counter = life._Numbers.is_counter.fget
    monkeypatch.setattr(
        life._Numbers, "is_counter", property(lambda one: judged.append(1) or is_counter(one))
    )
    counters = life.Counters()
    for at in range(2000):
        letters = f"{at % 500:03d}".translate(str.maketrans("0123456789", "abcdefghij"))
        counters.note([b"done_%s %d" % (letters.encode(), at)])
        assert counters.newest_rise <= counters.now
    assert len(judged) <= 2000


def test_a_line_of_a_known_shape_keeps_its_own_fields():
    for rank in (3, 3, 4, 5):
        line = clean_line(b"[rank%d]: 2026-03-14 02:11:1%d KeyError: 'a'" % (rank, rank), 1)
        assert (line.rank, line.time) == (rank, f"2026-03-14 02:11:1{rank}")
