"""Each packaged rule says of its own examples what it says it does; broken rule files are named."""

import pytest

from holdfast.core.errors import BadUse
from holdfast.diagnose.diagnosis import CATEGORIES
from holdfast.diagnose.lines import clean_line
from holdfast.diagnose.rules import load_rules, packaged_rules

RULES = packaged_rules()
TOPIC = """
order: 1
hot: [broken]
defaults: {role: root, action: restart, restart_helps: true, confidence: 0.5, source: here, depth: 50}
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


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("reason: OSError", "reason: Oops", "reason is 'Oops'"),
        ("role: root", "role: boss", "role is 'boss'"),
        ("action: restart,", "action: pray,", "action is 'pray'"),
        ("restart_helps: true", "restart_helps: 3", "restart_helps is 3"),
        ("confidence: 0.5", "confidence: 5", "confidence in 0 to 1"),
        ("'thing broken'", "'thing (broken'", "not a pattern"),
        ("'thing broken'", "'(?P<colour>thing broken)'", "unknown capture 'colour'"),
        ("mitigation: Mend the thing.", "", "'mitigation' is missing"),
        ("reason: OSError", "reason: OSError\n    colour: red", "unknown field 'colour'"),
        ('["thing whole"]', "[]", "no_match is a list"),
    ],
)
def test_a_broken_rule_is_named_with_its_file(old, new, says):
    assert old in TOPIC
    with pytest.raises(BadUse, match=r"mine\.yaml: rule thing-broken: ") as caught:
        load_rules({"mine.yaml": TOPIC.replace(old, new)})
    assert says in str(caught.value)


def test_broken_files_are_named():
    with pytest.raises(BadUse, match=r"mine\.yaml: not YAML"):
        load_rules({"mine.yaml": "a: [1"})
    with pytest.raises(BadUse, match=r"mine\.yaml: a topic has exactly"):
        load_rules({"mine.yaml": "rules: []"})
    with pytest.raises(BadUse, match="two rules have this id"):
        load_rules({"a.yaml": TOPIC, "b.yaml": TOPIC})


def test_order_of_topics_decides_before_names():
    later = TOPIC.replace("order: 1", "order: 2").replace("thing-broken", "later")
    rules = load_rules({"a.yaml": later, "b.yaml": TOPIC})
    found = rules.find("a thing broken")
    assert found is not None
    assert found[0].id == "thing-broken"
