"""Run lm-eval in the host's processes, over TCP: equal bits to stock lm-eval, after any kill."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from fake_coordinator import TOKEN, FakeCoordinator

from holdfast.evaluate.harness.lm_eval.results import _line, plain
from holdfast.evaluate.types.suite import TaskEntry
from holdfast.evaluate.wire import messages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # lm-eval's and its dependencies' own

NAMES = ("t_own", "t_several", "t_group")  # two with metrics elsewhere, one of several files


@pytest.fixture(scope="module")
def stock(world):
    """Return stock lm-eval's results and samples, from one process for each name."""
    import torch
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, sanitize_list

    torch.set_num_threads(1)  # as the engine has
    manager = TaskManager(include_path=str(world.tasks), include_defaults=False)
    expected = {}
    for name in NAMES:
        results = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(world.model)},
            tasks=[name],
            batch_size=1,
            device="cpu",
            bootstrap_iters=100,
            task_manager=manager,
        )
        samples = results.pop("samples")
        lines = {
            task: [_line(row, sanitize_list) for row in rows] for task, rows in samples.items()
        }
        expected[name] = plain((results["results"], lines), handle_non_serializable)
    return expected


def test_tasks_run_by_the_host_are_stock_lm_eval_whatever_is_killed(
    world, stock, environment, tmp_path
):
    entries = [
        TaskEntry(name=name, options={"bootstrap_iters": 100}) for name in (*NAMES, "t_raising")
    ]
    engine = world.engine()
    include = [str(world.tasks)]

    async def scenario():
        coordinator = FakeCoordinator(
            engine.answer, entries, world.facts, tmp_path, include_paths=include
        )
        async with asyncio.timeout(300), coordinator:
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "holdfast.evaluate.harness.host",
                    "--node",
                    "0",
                    "--slots",
                    "2",
                ),
                env={
                    **environment,
                    messages.ENV_ADDRESS: coordinator.address,
                    messages.ENV_TOKEN: TOKEN,
                },
            )
            said = await coordinator.prepared.get()
            assert said.versions == {"lm-eval": "0.4.13"}, said.error
            (zygote,) = psutil.Process(process.pid).children()
            assert zygote.num_threads() == 1
            coordinator.may_answer.clear()
            for task in range(len(entries)):
                coordinator.run(task)
            await coordinator.until(lambda: len(coordinator.asked_of) == len(entries))
            for hello in [hello for hello in coordinator.hellos if hello.role == "client"]:
                os.kill(hello.pid, signal.SIGKILL)
            coordinator.asked_of.clear()
            await coordinator.until(lambda: len(coordinator.asked_of) == len(entries))
            # The coordinator dies and comes back.
            await coordinator.hang_up()
            coordinator.forget()
            await coordinator.listen()
            await coordinator.until(lambda: len(coordinator.asked_of) == len(entries))
            coordinator.may_answer.set()
            await coordinator.until(lambda: len(coordinator.ended) == len(entries))
        assert await process.wait() == 0
        return coordinator

    coordinator = asyncio.run(scenario())
    raised = coordinator.ended.pop(len(NAMES))
    assert raised.error.startswith("ZeroDivisionError: cannot score")
    for task, ended in coordinator.ended.items():
        assert not ended.error, ended.error
        results, samples = stock[NAMES[task]]
        assert ended.result.results["results"] == results
        assert read_samples(tmp_path / ended.result.samples_file) == samples
    assert sum(bool(said.measured) for said in coordinator.measured) >= 12  # of two tasks, streamed


def read_samples(place: Path) -> dict[str, list]:
    from lm_eval.utils import get_file_task_name

    paths = [place] if place.is_file() else sorted(place.glob("*.jsonl"))
    return {
        get_file_task_name(path.name): [json.loads(line) for line in path.open()] for path in paths
    }
