"""Run unmodified lm-evaluation-harness with a model whose answers come from engines.

The input is a suite's entry and a client of the engines. The result is lm-eval's own results
object, bit for bit. `LmEval` (in `harness`) is the `Harness`. The other modules, in the order of
use:

| module | one idea |
|---|---|
| `catalog` | the index of tasks, built once and kept on disk |
| `options` | the options of an entry that only lm-eval understands |
| `model` | lm-eval's own model class, which records requests and replays answers |
| `text_model` | the model class for engines that take text |
| `metrics` | sends all requests of an entry at once; gives answers and metrics to the evaluator |
| `code` | runs generated code in the sandbox |
| `results` | merges results objects into one, and writes samples as files |

Only `results` and `options` can be imported without lm-eval.
"""
