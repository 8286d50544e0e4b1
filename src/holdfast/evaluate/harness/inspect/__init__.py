"""Run unmodified inspect-ai with a model whose answers come from engines.

The input is a suite's entry and a client of the engines. The results are inspect's own log, and
inspect's scores in the form of lm-eval's results object. `Inspect` (in `harness`) is the `Harness`.
The other modules, in the order of use:

| module | one idea |
|---|---|
| `options` | the options of an entry that only inspect understands |
| `tasks` | finds a task by its name, and refuses a task that needs a container |
| `text_model` | inspect's model class for engines that take messages |
| `token_model` | inspect's own Hugging Face model class without its model, for engines that take tokens |

Only `options` and `harness` can be imported without inspect-ai.
"""

from holdfast.evaluate.harness.inspect.harness import Inspect

__all__ = ["Inspect"]
