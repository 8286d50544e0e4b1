"""Read the packaged rules, once per process."""

import functools
from importlib import resources

from holdfast.diagnose.rules import code_tables
from holdfast.diagnose.rules.rules import RuleSet, Topic, parse_topic


@functools.cache
def packaged_rules() -> RuleSet:
    """Return the packaged rules.

    Raises:
        BadUse: a rule file is broken; the message names the file and the rule.
    """
    return RuleSet(packaged_topics())


@functools.cache
def packaged_topics() -> tuple[Topic, ...]:
    """Return the packaged topics: one per file in `topics/`, and one for the tables."""
    folder = resources.files("holdfast.diagnose.rules") / "topics"
    files = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".yaml")),
        key=lambda entry: entry.name,
    )
    read = [parse_topic(entry.name, entry.read_text("utf-8")) for entry in files]
    made = Topic(
        name="tables",
        order=code_tables.ORDER,
        hot=code_tables.table_hot_words(),
        rules=code_tables.table_rules(),
    )
    return (*read, made)
