"""Read a user's own rules: topic files in `$HOLDFAST_HOME/rules`, in the format of packaged topics."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from holdfast.core.errors import BadUse
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.rules.packaged import packaged_topics
from holdfast.diagnose.rules.rules import Rule, RuleSet, Topic, parse_topic

FOLDER: Final = "rules"
_SIZE_LIMIT_BYTES: Final = 4 << 20


def own_topics(home: Path | None) -> tuple[Topic, ...]:
    """Return the topics in `home/rules/*.yaml`; an empty result if the folder does not exist.

    Raises:
        BadUse: a file is broken; the message names the file and the rule.
    """
    folder = None if home is None else home / FOLDER
    if folder is None or not folder.is_dir():
        return ()
    return tuple(read_topic(path) for path in sorted(folder.glob("*.yaml")))


def read_topic(path: Path) -> Topic:
    """Read a topic from a file.

    Raises:
        BadUse: the file cannot be read, or does not have the form that `rules.py` describes.
    """
    try:
        if path.stat().st_size > _SIZE_LIMIT_BYTES:
            raise BadUse(
                f"{path} has more than {_SIZE_LIMIT_BYTES >> 20} MiB, which is too large for a file of "
                "rules. Name another."
            )
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadUse(
            f"{path} cannot be read as a file of rules ({error}). Name a YAML file in UTF-8."
        ) from error
    return parse_topic(str(path), text)


def faults_of(topic: Topic, beside: Sequence[Topic] = ()) -> Iterator[str]:
    """Yield a message for each example of a topic that the rules decide wrongly.

    The topic is tested together with the packaged rules and the topics `beside`.

    Raises:
        BadUse: a rule has the id of a packaged rule.
    """
    rules = RuleSet((*packaged_topics(), *(one for one in beside if one.name != topic.name), topic))
    for rule in topic.rules:
        for example in rule.match:
            yield from _faults_of_match(rules, rule, example)
        for example in rule.no_match:
            found = rules.find(clean_line(example.encode(), 1).text, rule.where)
            if found is not None and found[0].id == rule.id:
                yield f"rule {rule.id} matches {example!r:.120}, which it should not. Mend the pattern."


def _faults_of_match(rules: RuleSet, rule: Rule, example: str) -> Iterator[str]:
    found = rules.find(clean_line(example.encode(), 1).text, rule.where)
    if found is None:
        yield f"rule {rule.id} does not match {example!r:.120}. Mend the pattern, or add a word of the line to `hot`."
    elif found[0].id != rule.id:
        yield f"rule {found[0].id} takes {example!r:.120} away from {rule.id}. Give the file a smaller `order`."
    elif rule.where == "line" and rules.hot.search(example.encode()) is None:
        yield f"`hot` has no word of {example!r:.120}. Add one: lines without such a word are not examined."
