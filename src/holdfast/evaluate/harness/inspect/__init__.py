"""Run unmodified inspect-ai with its model in engines.

The input is a suite's entry and a client of the engines. The results are inspect's own log and rows
of its scores for lm-eval's results object. `Inspect` (in `harness`) is the `Harness`; the other
modules, in the order of use:

| module | one idea |
|---|---|
| `options` | the options of an entry for inspect alone |
| `tasks` | a task by its name, refused if it needs a container |
| `text_model` | inspect's model class for engines that take messages |
| `token_model` | the same for engines that take tokens: inspect's own Hugging Face provider without its model |

Only `options` and `harness` can be imported without inspect-ai.
"""

from holdfast.evaluate.harness.inspect.harness import Inspect

__all__ = ["Inspect"]
