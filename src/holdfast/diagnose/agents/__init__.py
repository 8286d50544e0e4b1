"""Send cases that the rules leave open to a language model, and check its answers.

The input is a diagnosis that the rules leave open. The output is the same diagnosis or one with
better evidence, and suggestions for new rules. If a rule decides a case, no model's answer replaces
the rule's answer. The package is optional: without a configured endpoint it is not used.

| module | from → to |
|---|---|
| `endpoint`, `exchange` | environment → answers of a model over HTTP, bounded in time and size |
| `redact`, `untrusted` | log lines → lines without secrets, numbered and fenced as data |
| `prompts`, `answers` | fixed instructions; a text → one JSON object with the requested fields |
| `failure_agent`, `checks` | compressed log, past incidents → votes of the model → a finding with cited lines |
| `consult`, `proposal` | a finding → the diagnosis, and a suggested rule |
| `log_agent` | logs → unmatched lines → filters that drop no line of a rule |
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
