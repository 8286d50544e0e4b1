"""lm-evaluation-harness, unmodified, with its model elsewhere.

What enters is a suite's entry and a way to ask; what leaves is the results object that lm-eval itself would write, bit
for bit. `LmEval` (in `harness`) is the `Harness`; the rest, in the order in which it is used:

| module | one idea |
|---|---|
| `catalog` | which tasks there are, found once and kept on disk |
| `options` | what an entry may say to lm-eval alone |
| `model` | lm-eval's own model class, whose requests are written down and whose answers are played back |
| `text_model` | the same for engines that take text |
| `metrics` | the requests of an entry, sent at once; answers and metrics, handed to the evaluator as it calls |
| `code` | generated code is run in the sandbox |
| `results` | one results object of many, and the samples as files |

Only `results` and `options` can be imported without lm-eval.
"""
