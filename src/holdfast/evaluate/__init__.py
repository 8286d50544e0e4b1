"""Evaluate a checkpoint as fast as the cluster permits, with the scores of the harness itself.

The input is a suite (benchmarks of lm-evaluation-harness or inspect-ai, by name) and a model. The
result is an `Evaluation`: the harness's scores, an account of what each engine-second was spent on,
and a lower bound on the time that any schedule needs. The stages, in order:

| package | one idea |
|---|---|
| `run` | from a suite and a model, or a stream of models, to an `Evaluation` |
| `report` | scores as a table, as the harness's JSON and as a page |
| `harness` | an unmodified harness on CPU builds every request and computes its metrics from the answers |
| `engines` | answer requests: transformers, vLLM, any OpenAI-compatible server, a simulated one |
| `coordinator` | one light process: workers connect, the policy decides, the journal commits |
| `metrics` | generated code in a sandbox, model-as-judge under a quota |
| `weights` | read once per cluster, kept in each node's shared memory, swapped into warm engines |
| `policy` | which work to run where and when: a pure function; the cost of a sample; the lower bound |
| `wire` | messages between the coordinator and its workers, and the journal of answers |
| `types` | the data that all of these exchange |

Other packages import from here, from `policy` (to simulate it) and from `testing` (for stand-ins of
engines and harnesses).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.evaluate.harness.lm_eval.options import MODEL_ARGS
    from holdfast.evaluate.policy.outlook import Plan
    from holdfast.evaluate.report.compare import compare, plot
    from holdfast.evaluate.report.page import write_page
    from holdfast.evaluate.report.results import write_results
    from holdfast.evaluate.report.table import print_scores
    from holdfast.evaluate.report.why import losses, verdict, why
    from holdfast.evaluate.run.evaluate import evaluate, rescore, resume
    from holdfast.evaluate.run.forecast import PlanInputs, plan_inputs
    from holdfast.evaluate.run.ledger import state_of
    from holdfast.evaluate.run.options import EvaluateOptions, JudgeLimits
    from holdfast.evaluate.run.watch import watch
    from holdfast.evaluate.types.engine import EngineSpec
    from holdfast.evaluate.types.evaluation import BoundTerm, Evaluation, read_evaluation
    from holdfast.evaluate.types.suite import Suite, TaskEntry, load_suite
    from holdfast.evaluate.wire.messages import Status

__all__ = [
    "MODEL_ARGS",
    "BoundTerm",
    "EngineSpec",
    "EvaluateOptions",
    "Evaluation",
    "JudgeLimits",
    "Plan",
    "PlanInputs",
    "Status",
    "Suite",
    "TaskEntry",
    "compare",
    "evaluate",
    "load_suite",
    "losses",
    "plan_inputs",
    "plot",
    "print_scores",
    "read_evaluation",
    "rescore",
    "resume",
    "state_of",
    "verdict",
    "watch",
    "why",
    "write_page",
    "write_results",
]

_HOMES = {
    "BoundTerm": "types.evaluation",
    "EngineSpec": "types.engine",
    "EvaluateOptions": "run.options",
    "Evaluation": "types.evaluation",
    "JudgeLimits": "run.options",
    "MODEL_ARGS": "harness.lm_eval.options",
    "Plan": "policy.outlook",
    "PlanInputs": "run.forecast",
    "Status": "wire.messages",
    "Suite": "types.suite",
    "TaskEntry": "types.suite",
    "compare": "report.compare",
    "evaluate": "run.evaluate",
    "load_suite": "types.suite",
    "losses": "report.why",
    "plan_inputs": "run.forecast",
    "plot": "report.compare",
    "print_scores": "report.table",
    "read_evaluation": "types.evaluation",
    "rescore": "run.evaluate",
    "resume": "run.evaluate",
    "state_of": "run.ledger",
    "verdict": "report.why",
    "watch": "run.watch",
    "why": "report.why",
    "write_page": "report.page",
    "write_results": "report.results",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.evaluate' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.evaluate.{_HOMES[name]}"), name)
