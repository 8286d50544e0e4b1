"""Run stock lm-eval over many tasks in one process.

`python stock_lm_eval.py MODEL TASK_FOLDER OUT.json PLAIN CHAT DEFAULTS`

PLAIN and CHAT are task names separated by commas. lm-eval applies the chat template to all tasks or
to none, so its `simple_evaluate` is called once for each list, with the same model and the same
index of tasks. DEFAULTS is "defaults" if the index has lm-eval's own tasks, as by default, or
"none".
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    model, task_folder, out, *names, defaults = sys.argv[1:]
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable

    manager = TaskManager(include_path=task_folder, include_defaults=defaults == "defaults")
    lm: Any = lm_eval.api.registry.get_model("hf").create_from_arg_string(
        f"pretrained={model}", {"batch_size": 1, "device": "cpu"}
    )
    found: dict[str, Any] = {"results": {}}
    for tasks, chat_template in zip(names, (False, True), strict=True):
        if not tasks:
            continue
        evaluated: Any = lm_eval.simple_evaluate(
            model=lm,
            tasks=tasks.split(","),
            batch_size=1,
            task_manager=manager,
            apply_chat_template=chat_template,
            fewshot_as_multiturn=True,
            log_samples=False,
        )
        found["results"] |= evaluated["results"]
    Path(out).write_text(json.dumps(found, default=handle_non_serializable))


if __name__ == "__main__":
    main()
