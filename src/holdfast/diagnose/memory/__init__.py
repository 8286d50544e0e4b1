"""Remember past incidents, find similar ones, and learn rules from them.

The input is diagnoses with their compressed logs, people's judgements of diagnoses, and logs of
runs that ended well. The output is a `Known`: learned rules, learned filters, and the past
incidents, for the next call of `diagnose`.

| stage | module | from → to |
|---|---|---|
| remember | `store` | diagnosis → row of the ledger; judgement → judged incident, learned rules |
| find | `words`, `recall`, `embeddings` | a line → its words, and the most similar past lines |
| | `recall` | a root → past incidents with their words in common; one may decide an open case |
| learn | `case`, `candidates`, `profile` | a judged incident → patterns for its root, from general to specific |
| | `gate`, `learn`, `topics` | patterns → rules that change no correct answer for an incident, good run or example |
| | `good` | good runs → filters of routine lines |
| use | `own_rules`, `known` | the user's folder of rules, the ledger → `Known` |
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
