"""Each source's words for states and types as the schema's."""

from collections.abc import Mapping
from typing import Final

from holdfast.trace.schema import STATES
from holdfast.trace.sources.sql import literal

SLURM_STATES: Final = {state: state for state in STATES} | {"SUSPENDED": "RUNNING"}


def state_sql(column: str, words: Mapping[str, str] = SLURM_STATES) -> str:
    """SQL of the state that a word of `column` stands for; UNKNOWN where it stands for none."""
    cases = "".join(f" WHEN {literal(word)} THEN '{state}'" for word, state in words.items())
    return f"CASE {column}{cases} ELSE 'UNKNOWN' END"


def type_sql(column: str, words: Mapping[str, str]) -> str:
    """SQL of the type that a word of `column` stands for; NULL where it stands for none."""
    cases = "".join(f" WHEN {literal(word)} THEN '{kind}'" for word, kind in words.items())
    return f"CASE {column}{cases} END"
