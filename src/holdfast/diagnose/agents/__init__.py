"""A model's opinion, where one may be asked: optional, checked, and never above the rules.

In: what the rules left open. Out: the same answer, or a better founded one, and suggestions. Without an endpoint
nothing of this is needed.

| module | from → to |
|---|---|
| `endpoint`, `exchange` | the environment → texts of a model over HTTP, in bounded time and size |
| `redact`, `untrusted` | lines of a log → lines without secrets that stay data, numbered and fenced |
| `prompts`, `answers` | fixed instructions; a text → one JSON object of exactly the fields asked for |
| `failure_agent`, `checks` | the compressed log and past incidents → votes → a finding with lines that exist |
| `consult`, `proposal` | a finding → the diagnosis, and a rule as a suggestion |
| `log_agent` | logs → lines that no one knows → filters that drop no line a rule knows |
"""

from holdfast.diagnose.agents.consult import Consultation, consult, consultation
from holdfast.diagnose.agents.endpoint import Endpoint, endpoint_from_environment
from holdfast.diagnose.agents.log_agent import (
    ProposedFilters,
    Segments,
    propose_filters,
    segments_of,
)

__all__ = [
    "Consultation",
    "Endpoint",
    "ProposedFilters",
    "Segments",
    "consult",
    "consultation",
    "endpoint_from_environment",
    "propose_filters",
    "segments_of",
]
