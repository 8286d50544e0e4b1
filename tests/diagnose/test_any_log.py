"""Test that logs of any content give a consistent answer."""

import json
import math
import re
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose import LogWatcher, diagnose
from holdfast.diagnose.rules.packaged import packaged_rules
from holdfast.diagnose.rules.rules import ENDING
from holdfast.diagnose.rules.taxonomy import CATEGORIES, Action, Category

KNOWN = sorted(
    {example for rule in packaged_rules().rules for example in (*rule.match, *rule.no_match)}
)
FRAME = ["Traceback (most recent call last):", '  File "/job/t.py", line 8, in f', "    g()"]
_known = st.sampled_from(KNOWN)
_prefixed = st.builds(
    lambda rank, line: f"[rank{rank}]: {line}", st.integers(0, 9), _known | st.sampled_from(FRAME)
)
_progress = st.builds(
    lambda rank, step: f"[rank{rank}]: step {step} loss 2.1", st.integers(0, 9), st.integers(0, 50)
)
_lines = st.lists(
    _known | _prefixed | _progress | st.sampled_from(FRAME) | st.text(max_size=20), max_size=40
)


def check(found, text):
    answer = found.to_json()
    assert json.loads(json.dumps(answer)) == answer
    assert found.reason in CATEGORIES
    assert found.category in typing.get_args(Category)
    assert found.action in (*typing.get_args(Action), "none")
    assert CATEGORIES[found.reason] in (found.category, "Unknown")
    assert 0 < found.confidence < 1
    assert not math.isnan(found.confidence)
    assert all(one.confidence <= found.confidence + 0.02 for one in found.alternatives)
    assert found.reason not in {one.reason for one in found.alternatives}
    assert re.fullmatch("[0-9a-f]{16}", found.fingerprint)
    assert found.mitigation
    assert found.restart_helps or found.action in ("change_config", "user_must_fix", "none")
    count = text.count("\n") + 1
    for cited in (found.root_lines, found.evidence):
        assert all(1 <= one.line <= count for one in cited)
        assert len({(one.file, one.line) for one in cited}) == len(cited)
    assert found.root_line == (found.root_lines[0] if found.root_lines else None)
    assert [one.line for one in found.root_lines] == [
        one.line for one in found.evidence if one.role == "root"
    ]


@settings(max_examples=250, deadline=None)
@given(_lines)
def test_any_lines_that_rules_know(tmp_path_factory, lines):
    log = tmp_path_factory.mktemp("log") / "job.log"
    text = "\n".join(lines)
    log.write_text(text, encoding="utf-8")
    found = diagnose(log)
    check(found, text)
    watcher = LogWatcher()
    for at in range(0, len(text), 37):
        watcher.feed(text[at : at + 37], log=str(log))
    assert watcher.diagnosis(ended=True).to_json() == found.to_json() or found.notes


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.binary(max_size=80) | st.sampled_from(KNOWN).map(str.encode), max_size=12).map(
        b"\n".join
    )
)
def test_any_bytes(tmp_path_factory, data):
    log = tmp_path_factory.mktemp("log") / "job.log"
    log.write_bytes(data)
    check(diagnose(log), data.decode("utf-8", "replace"))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["rank-0", "rank-1", "dmesg", "x.log.1", "launcher"]), _lines, max_size=4
    )
)
def test_any_files_in_any_order(tmp_path_factory, logs):
    folder = tmp_path_factory.mktemp("job")
    paths = []
    for name, lines in logs.items():
        paths.append(folder / f"{name}.log")
        paths[-1].write_text("\n".join(lines), encoding="utf-8")
    if paths:
        assert diagnose(paths).to_json() == diagnose(paths[::-1]).to_json()


@pytest.mark.parametrize("rule", packaged_rules().rules, ids=lambda rule: rule.id)
def test_every_rule_alone_makes_an_answer(tmp_path, rule):
    log = tmp_path / "job.log"
    log.write_text(rule.match[0] + "\n")
    found = diagnose(log)
    check(found, rule.match[0] + "\n")
    if rule.kind != ENDING and found.decided_by[:1] == (rule.id,):
        assert (found.reason, found.action, found.restart_helps) == (
            rule.reason,
            rule.action,
            rule.restart_helps,
        )
