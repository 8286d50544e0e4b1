"""Run unmodified lm-evaluation-harness with its model in engines.

The input is a suite's entry and a client of the engines. The result is lm-eval's own results
object, bit for bit. `LmEval` (in `harness`) is the `Harness`; the rest, in the order of use:

| module | one idea |
|---|---|
| `catalog` | the index of tasks, read once and kept on disk |
| `options` | the options of an entry for lm-eval alone |
| `model` | lm-eval's own model class, with recorded requests and replayed answers |
| `text_model` | the same for engines that take text |
| `metrics` | the requests of an entry, sent at once; answers and metrics for the evaluator |
| `code` | generated code runs in the sandbox |
| `results` | one results object from many, and the samples as files |

Only `results` and `options` can be imported without lm-eval.
"""
