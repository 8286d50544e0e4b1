"""HOW GOOD IT IS: the scores of a checkpoint in the shortest time the cluster permits, exactly the harness's own.

What enters is a suite (benchmarks of lm-evaluation-harness or inspect-ai, by name) and a model; what leaves is an
`Evaluation`: the harness's own scores, what each engine-second went to, and the lower bound on the time it could
have taken. The stages, in order:

| package | one idea |
|---|---|
| `run` | from a suite and a model, or a stream of models, to an `Evaluation` |
| `report` | scores as a table, as the harness's JSON and as a page |
| `harness` | an unmodified harness on CPU builds every request and, from the answers, computes its metrics |
| `engines` | answer requests: transformers, vLLM, any OpenAI-compatible server, a simulated one |
| `coordinator` | one light process: workers connect, the policy decides, the journal commits |
| `metrics` | generated code in a sandbox, model-as-judge under a quota |
| `weights` | read once per cluster, kept in each node's shared memory, swapped into warm engines |
| `policy` | which work to run where and when: a pure function; the cost of a sample; the lower bound |
| `wire` | messages between the coordinator and its workers, and the journal of answers |
| `types` | the data that all of these exchange |
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.evaluate.run.evaluate import evaluate, rescore, resume
    from holdfast.evaluate.run.options import EvaluateOptions
    from holdfast.evaluate.run.watch import watch
    from holdfast.evaluate.types.evaluation import Evaluation
    from holdfast.evaluate.types.suite import Suite, load_suite

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
    "Evaluation": "types.evaluation",
    "EvaluateOptions": "run.options",
    "Suite": "types.suite",
    "evaluate": "run.evaluate",
    "load_suite": "types.suite",
    "rescore": "run.evaluate",
    "resume": "run.evaluate",
    "watch": "run.watch",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.evaluate' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.evaluate.{_HOMES[name]}"), name)
