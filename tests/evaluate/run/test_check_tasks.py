"""Check the search for a suite's tasks on the machine of the command."""

import asyncio
import os
from pathlib import Path

import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.run.check_tasks import check_tasks
from holdfast.evaluate.types.suite import Suite, TaskEntry

HERE = f"{Path(__file__).stem}:Harness"


class Harness:
    """A harness that lacks one task, and fails for two."""

    def prepare(self, entries):
        print("noise")  # noqa: T201  as harnesses do
        for entry in entries:
            if entry.name == "typo":
                raise BadUse("There is no task 'typo'. Did you mean 'type'?")
            if entry.name == "broken":
                raise RuntimeError("no network here")
            if entry.name == "unloaded":
                try:
                    Path("data of the nodes").read_bytes()
                except FileNotFoundError as error:
                    raise BadUse("The task 'unloaded' cannot be loaded.") from error


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)

    def check(*named):
        entries = tuple(TaskEntry(name=name, harness=harness) for name, harness in named)
        asyncio.run(check_tasks(Suite(name="s", entries=entries), tmp_path / "logs" / "tasks.log"))
        return (tmp_path / "logs" / "tasks.log").read_text()

    return check


def test_what_is_there_is_fine_and_what_cannot_be_known_here_is_left_to_the_nodes(check):
    printed = check(("a", HERE), ("unloaded", HERE), ("b", "not_installed_here:Harness"))
    assert "noise" in printed
    assert "data of the nodes" in printed
    assert "not_installed_here" in printed


def test_a_wrong_name_is_refused_in_the_harness_own_words(check):
    with pytest.raises(BadUse, match=r"^There is no task 'typo'\. Did you mean 'type'\?$"):
        check(("b", "not_installed_here:Harness"), ("a", HERE), ("typo", HERE))
    with pytest.raises(BadUse, match=r"There is no harness 'lm_eval'"):
        check(("a", "lm_eval"))


def test_what_breaks_here_may_work_there(check):
    assert "no network here" in check(("broken", HERE))


@pytest.mark.slow  # the real harness
def test_a_wrong_name_of_lm_eval(check, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BadUse, match=r"has no task, group or tag 'hellaswagg'.*hellaswag"):
        check(("hellaswagg", "lm-eval"))
