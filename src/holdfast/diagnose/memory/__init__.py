"""Past incidents: remembered, found again, and learned from.

In: diagnoses with their compressed logs, a person's word on them, logs of runs that ended well. Out: `Known`, which a
diagnosis takes: learned rules and filters, and the past incidents that are like this one.

| stage | module | from → to |
|---|---|---|
| remember | `store` | a diagnosis → a row of the ledger; a person's word → a judged incident, and what it teaches |
| find | `words`, `recall`, `embeddings` | a line → its words, and the lines most like it |
| | `recall` | a root → past incidents, why they are like it, and whether one decides |
| learn | `case`, `candidates`, `profile` | a judged incident → patterns, from general to special |
| | `gate`, `learn`, `topics` | patterns → rules that leave every incident, good run and example right, in their place |
| | `good` | good runs → what is routine |
| use | `own_rules`, `known` | the user's folder, the ledger → `Known` |
"""

from holdfast.diagnose.memory.case import Case, line_at
from holdfast.diagnose.memory.good import add_good_run, keep_filters
from holdfast.diagnose.memory.known import Known
from holdfast.diagnose.memory.learn import learn
from holdfast.diagnose.memory.own_rules import faults_of, own_topics, read_topic
from holdfast.diagnose.memory.store import (
    Judged,
    judge,
    kept_of,
    memory_of,
    remember,
    remember_incident,
)
from holdfast.diagnose.memory.topics import Learned

__all__ = [
    "Case",
    "Judged",
    "Known",
    "Learned",
    "add_good_run",
    "faults_of",
    "judge",
    "keep_filters",
    "kept_of",
    "learn",
    "line_at",
    "memory_of",
    "own_topics",
    "read_topic",
    "remember",
    "remember_incident",
]
