"""HOW GOOD IT IS: the scores of a checkpoint in the shortest time the cluster permits, exactly the harness's own.

What enters is a suite (benchmarks of lm-evaluation-harness or inspect-ai, by name) and a model; what leaves is an
`Evaluation`: the harness's own scores, what each engine-second went to, and the lower bound on the time it could
have taken. The stages, in order:

| module | one idea |
|---|---|
| `suite` | which tasks, with which limits |
| `harness/` | an unmodified harness on CPU builds every request and, from the answers, computes its metrics |
| `requests` | what an engine is asked and what it answers, keyed by content |
| `coordinator/` | one light process: workers dial in, the policy decides, the journal commits |
| `policy/` | what to run where and when: a pure function; what a sample will cost; the lower bound |
| `weights/` | read once per cluster, kept in each node's shared memory, swapped into warm engines |
| `engines/` | what answers: transformers, vLLM, any OpenAI-compatible server, a simulated one |
| `metrics/` | generated code in a sandbox, model-as-judge under a quota |
| `report/` | scores as a table, as the harness's JSON and as a page |
| `planned`, `folder`, `records`, `ending` | what an evaluation is, in its folder and in the ledger, until its end |
| `session` | its processes, from the command's side (`node`: a node's agent; `known_tasks`: what is asked before) |
| `run`, `stream` | from a suite and a model, or a stream of them, to an `Evaluation` (`summary`, `realised`) |
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.evaluate.evaluation import Evaluation
    from holdfast.evaluate.options import EvaluateOptions
    from holdfast.evaluate.run import evaluate, rescore, resume
    from holdfast.evaluate.stream import watch
    from holdfast.evaluate.suite import Suite, load_suite

__all__ = [
    "EvaluateOptions",
    "Evaluation",
    "Suite",
    "evaluate",
    "load_suite",
    "rescore",
    "resume",
    "watch",
]

_HOMES = {
    "Evaluation": "evaluation",
    "EvaluateOptions": "options",
    "Suite": "suite",
    "evaluate": "run",
    "load_suite": "suite",
    "rescore": "run",
    "resume": "run",
    "watch": "stream",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.evaluate' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.evaluate.{_HOMES[name]}"), name)
