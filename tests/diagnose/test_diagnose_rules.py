"""Test that each packaged rule matches its own examples, and that errors name broken files."""

import pytest

from holdfast.core.errors import BadUse
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.rules.packaged import packaged_rules
from holdfast.diagnose.rules.rules import ROUTINE, RuleSet, parse_topic
from holdfast.diagnose.rules.taxonomy import CATEGORIES

RULES = packaged_rules()
TOPIC = """
order: 1
hot: [broken]
defaults: {kind: disk, action: restart, restart_helps: true, confidence: 0.5, source: here}
rules:
  - id: thing-broken
    pattern: 'thing broken'
    reason: OSError
    mitigation: Mend the thing.
    match: ["thing broken"]
    no_match: ["thing whole"]
"""


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda rule: rule.id)
def test_examples(rule):
    for example in rule.match:
        text = clean_line(example.encode(), 1).text
        found = RULES.find(text, rule.where)
        assert found is not None, example
        assert found[0].id == rule.id, f"{found[0].id} takes {example!r} away from {rule.id}"
        if rule.where == "line":
            assert RULES.hot.search(example.encode()), f"the prefilter drops {example!r}"
    for example in rule.no_match:
        found = RULES.find(clean_line(example.encode(), 1).text, rule.where)
        assert found is None or found[0].id != rule.id, example


def test_every_reason_is_known_and_most_have_a_rule():
    used = {rule.reason for rule in RULES.rules}
    assert used <= set(CATEGORIES)
    assert len(CATEGORIES) == 31
    assert set(CATEGORIES) - used == set()


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda rule: rule.id)
def test_what_a_restart_does_not_help_is_to_be_changed_by_someone(rule):
    if rule.kind != ROUTINE:
        assert rule.restart_helps == (rule.action not in ("change_config", "user_must_fix"))
    assert rule.mitigation.endswith((".", ")"))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("reason: OSError", "reason: Oops", "reason is 'Oops'"),
        ("kind: disk", "kind: boss", "kind is 'boss'"),
        ("action: restart,", "action: pray,", "action is 'pray'"),
        ("restart_helps: true", "restart_helps: 3", "restart_helps is 3"),
        ("confidence: 0.5", "confidence: 5", "confidence lies in 0 to 1"),
        ("'thing broken'", "'thing (broken'", "not a pattern"),
        ("'thing broken'", "'(?P<colour>thing broken)'", "unknown capture 'colour'"),
        ("mitigation: Mend the thing.", "", "'mitigation' is missing"),
        ("reason: OSError", "reason: OSError\n    colour: red", "unknown field 'colour'"),
        ('["thing whole"]', "[]", "no_match is a list"),
        ("'thing broken'", "'thing (?=broken)'", "not a pattern"),
        ("'thing broken'", "'(?P<rank>1)thing broken|(?P<rank>2)'", "a capture occurs twice"),
        ("confidence: 0.5", "confidence: high", "confidence"),
        ("pattern: 'thing broken'", "pattern: 3", "pattern is 3"),
        ("mitigation: Mend the thing.", "mitigation: 3", "mitigation is 3"),
        ("source: here", "source: here, alone: cheap", "alone"),
    ],
)
def test_a_broken_rule_is_named_with_its_file(old, new, says):
    assert old in TOPIC
    with pytest.raises(BadUse, match=r"mine\.yaml: rule thing-broken: ") as caught:
        parse_topic("mine.yaml", TOPIC.replace(old, new))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "not YAML"),
        ("rules: []", "a topic has exactly"),
        ("[]", "a topic has exactly"),
        ("", "a topic has exactly"),
        (TOPIC.replace("order: 1", "order: first"), "order"),
        (TOPIC.replace("hot: [broken]", "hot: 3"), "hot"),
        (TOPIC.partition("rules:")[0] + "rules: {a: 1}", "rules"),
        (TOPIC.partition("rules:")[0] + "rules:", "rules"),
        (TOPIC.partition("rules:")[0] + "rules: [3]", "a rule is a mapping"),
        (
            TOPIC.replace("defaults: {", "defaults: [{").replace("source: here}", "source: here}]"),
            "defaults",
        ),
    ],
)
def test_a_broken_topic_is_named(text, says):
    with pytest.raises(BadUse, match=r"^mine\.yaml: ") as caught:
        parse_topic("mine.yaml", text)
    assert says in str(caught.value)


def test_two_rules_of_one_name_are_refused():
    with pytest.raises(BadUse, match="thing-broken: two rules have this id"):
        RuleSet([parse_topic("a.yaml", TOPIC), parse_topic("b.yaml", TOPIC)])


def test_order_of_topics_decides_before_names():
    later = TOPIC.replace("order: 1", "order: 2").replace("thing-broken", "later")
    rules = RuleSet([parse_topic("a.yaml", later), parse_topic("b.yaml", TOPIC)])
    found = rules.find("a thing broken")
    assert found is not None
    assert found[0].id == "thing-broken"


def test_a_rule_without_examples_of_its_hot_words_is_never_asked():
    """Test that the prefilter drops the rule's lines: hot words are part of a rule."""
    rules = RuleSet([parse_topic("a.yaml", TOPIC.replace("hot: [broken]", "hot: [shattered]"))])
    assert rules.find("a thing broken") is None
    assert rules.find("a thing broken and shattered") is not None


def test_of_no_rules_none_matches():
    assert RuleSet([]).find("anything") is None
    assert RuleSet([]).hot.search(b"anything at all") is None


def test_captures_are_what_the_pattern_caught():
    topic = TOPIC.replace("'thing broken'", "'(?:on (?P<node>\\w+): )?thing broken'")
    rules = RuleSet([parse_topic("a.yaml", topic)])
    assert rules.find("on gn17: thing broken")[1] == {"node": "gn17"}
    assert rules.find("thing broken")[1] == {}
