"""Assign job types by name, size, duration and user, if the trace has no types.

The rules are data, in `jobtypes.yaml` or in a file of the user.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from holdfast.core.errors import BadUse
from holdfast.trace.schema import TYPES
from holdfast.trace.sources.reading import Reading

if TYPE_CHECKING:
    import duckdb

DEFAULT_RULES = Path(__file__).parent / "jobtypes.yaml"

# Split the words of a name where a lower-case letter meets an upper-case one: `LlamaPretrain2`
# contains the word `pretrain`.
_NAME = "lower(regexp_replace(name, '([a-z0-9])([A-Z])', '\\1-\\2', 'g'))"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A job type, and the conditions under which a job has it; see jobtypes.yaml."""

    type: str
    words: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    min_gpus: float | None = None
    max_gpus: float | None = None
    min_run_s: float | None = None
    max_run_s: float | None = None
    guess: bool = False

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns of `jobs` that the conditions read."""
        reads = {
            # A guess is for jobs whose names do not show the type. It is not for a trace without
            # any names, so a guess also requires the column.
            "name": self.words or self.guess,
            "pool": self.pools,
            "username": self.users,
            "gpu_num": self.min_gpus is not None or self.max_gpus is not None,
            "run_s": self.min_run_s is not None or self.max_run_s is not None,
        }
        return frozenset(column for column, read in reads.items() if read)

    def condition(self) -> str:
        """Return the conditions as an SQL expression over the jobs table."""
        tests = []
        if self.words:
            tests.append(f"regexp_matches({_NAME}, '(^|[^a-z])({'|'.join(self.words)})([^a-z]|$)')")
        for column, values in (("pool", self.pools), ("username", self.users)):
            if values:
                tests.append(f"{column} IN ({', '.join(_sql(value) for value in values)})")
        for column, relation, bound in (
            ("gpu_num", ">=", self.min_gpus),
            ("gpu_num", "<=", self.max_gpus),
            ("run_s", ">=", self.min_run_s),
            ("run_s", "<=", self.max_run_s),
        ):
            if bound is not None:
                tests.append(f"{column} {relation} {bound}")
        return " AND ".join(tests)

    @property
    def rule_label(self) -> str:
        """Return how the report names the kind of this rule: `guess`, `name`, `pool` or `user`."""
        return "guess" if self.guess else "name" if self.words else "pool" if self.pools else "user"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules in order, and the conditions for adopting the type of a user's other jobs.

    If at least `habit_jobs` jobs of a user have a type, and at least `habit_share` of them the same
    type, the user's jobs of similar size get this type.
    """

    rules: tuple[Rule, ...]
    habit_jobs: int | None
    habit_share: float = 1.0


def read_rules(path: Path = DEFAULT_RULES) -> Rules:
    """Read a file of rules.

    Raises:
        BadUse: the file is not valid; the message names the rule, the field and the allowed values.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadUse(
            f"{path}: {error}. Start from the rules that come with Holdfast: {DEFAULT_RULES}."
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("rules"), list):
        raise BadUse(
            f"{path} has no list `rules`. Start from the rules that come with Holdfast: {DEFAULT_RULES}."
        )
    rules = tuple(
        _rule(path, number, entry) for number, entry in enumerate(content["rules"], start=1)
    )
    habit = content.get("habit") or {}
    if not isinstance(habit, dict) or not all(
        isinstance(habit.get(key, 1), (int, float)) for key in ("jobs", "share")
    ):
        raise BadUse(f"{path}: `habit` has `jobs` and `share`, both numbers, or is null.")
    return Rules(
        rules=rules, habit_jobs=habit.get("jobs"), habit_share=float(habit.get("share", 1.0))
    )


def add_types(connection: "duckdb.DuckDBPyConnection", reading: Reading, rules: Rules) -> Reading:
    """Add the columns `type` and `type_rule` to a table that has no types.

    `type_rule` records how the type was found: `name`, `pool` or `user` for a rule, `habit` for the
    user's other jobs, or `guess`. Both are NULL if the type is unknown.

    Returns:
        The reading with the two new columns. If no rule can be applied to its columns, the reading
        is returned unchanged.
    """
    usable = [rule for rule in rules.rules if reading.columns.issuperset(rule.needs)]
    if "type" in reading.columns or not usable:
        return reading
    sure = [rule for rule in usable if not rule.guess]
    guesses = [rule for rule in usable if rule.guess]
    connection.execute(f"ALTER TABLE {reading.table} ADD COLUMN type VARCHAR")
    connection.execute(f"ALTER TABLE {reading.table} ADD COLUMN type_rule VARCHAR")
    _apply(connection, reading.table, sure)
    if rules.habit_jobs is not None and reading.columns.issuperset({"username", "gpu_num"}):
        _apply_habits(connection, reading.table, rules.habit_jobs, rules.habit_share)
    _apply(connection, reading.table, guesses)
    return replace(reading, columns=reading.columns | {"type", "type_rule"})


def _apply(connection: "duckdb.DuckDBPyConnection", table: str, rules: list[Rule]) -> None:
    if not rules:
        return
    types = " ".join(f"WHEN {rule.condition()} THEN {_sql(rule.type)}" for rule in rules)
    cases = " ".join(f"WHEN {rule.condition()} THEN {_sql(rule.rule_label)}" for rule in rules)
    connection.execute(
        f"UPDATE {table} SET type = CASE {types} END, type_rule = CASE {cases} END WHERE type IS NULL"
    )


def _apply_habits(
    connection: "duckdb.DuckDBPyConnection", table: str, jobs: int, share: float
) -> None:
    connection.execute(
        f"""
        UPDATE {table} SET type = habit.type, type_rule = 'habit' FROM (
            SELECT cluster, username, type, low, high FROM (
                SELECT cluster, username, type, count(*) AS n, min(gpu_num) AS low, max(gpu_num) AS high,
                       sum(count(*)) OVER (PARTITION BY cluster, username) AS known
                FROM {table} WHERE type IS NOT NULL GROUP BY cluster, username, type)
            WHERE known >= {jobs} AND n >= {share} * known) AS habit
        WHERE {table}.type IS NULL AND {table}.cluster = habit.cluster AND {table}.username = habit.username
          AND {table}.gpu_num BETWEEN habit.low AND habit.high
        """
    )


def _rule(path: Path, number: int, entry: Any) -> Rule:
    place = f"{path}, rule {number}"
    if not isinstance(entry, dict):
        raise BadUse(f"{place} is not a mapping with `type` and conditions.")
    allowed = set(Rule.__dataclass_fields__)
    if unknown := set(entry) - allowed:
        raise BadUse(
            f"{place}: there is no {min(unknown)!r}. Allowed: {', '.join(sorted(allowed))}."
        )
    if entry.get("type") not in TYPES:
        raise BadUse(f"{place}: type is {entry.get('type')!r}. Allowed: {', '.join(TYPES)}.")
    for field in ("words", "pools", "users"):
        values = entry.get(field, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise BadUse(
                f"{place}: {field} is {values!r}, which must be a list of texts (quote numbers)."
            )
    for word in entry.get("words", []):
        if not (word.isascii() and word.isalnum() and word == word.lower()):
            raise BadUse(f"{place}: {word!r} is not a word: small letters and digits only.")
    for field in ("min_gpus", "max_gpus", "min_run_s", "max_run_s"):
        if not isinstance(entry.get(field, 0), (int, float)):
            raise BadUse(f"{place}: {field} is {entry[field]!r}, which must be a number.")
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
    }
    rule = Rule(**fields)
    if not rule.needs:
        raise BadUse(f"{place} has no condition, so every job would be {rule.type}.")
    return rule


def _sql(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
