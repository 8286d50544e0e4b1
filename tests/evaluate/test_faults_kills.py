"""Kill real processes of an evaluation: nothing is repeated, scores are equal, nothing is left.

`benchmarks/evaluate_faults.py` repeats this two hundred times, and measures the time.
"""

import os
import random
import time

import pytest
from end_to_end_world import HERE
from fault_injector import PATIENCE_S, FaultInjector
from gated_engine import Gate

from evaluation.fault_injected_evaluation import (
    FaultInjectedEvaluation,
    expected_results,
    redone,
    synthetic_tasks,
)

LINGER_S = 2.0


@pytest.fixture
def start(tmp_path):
    started = []

    def start(samples=(50, 40, 50), *, flags=(), **how):
        tasks = synthetic_tasks(random.Random(0), samples, metric_s=0.02)
        flags = ("--max-batch", "4", "--metric-slots", "2", "--linger-s", str(LINGER_S), *flags)
        started.append(FaultInjectedEvaluation(folder=tmp_path, tasks=tasks, flags=flags, **how))
        return started[-1], started[-1].start()

    yield start
    for evaluation in started:
        evaluation.end()


def check(injector):
    injector.check(requests=140)
    assert injector.evaluation.results() == expected_results(injector.evaluation.tasks)


def test_one_of_each_kind_dies_then_several_together_and_the_scores_are_the_same(start):
    evaluation, command = start(engine_options={"step_base_s": 0.01})
    injector = FaultInjector(evaluation, seed=1)
    for count, role in enumerate(
        ("engine", "metric", "coordinator", "client", "host", "node"), start=1
    ):
        assert evaluation.wait_until_finished(10 * count, PATIENCE_S), evaluation.output()
        injector.inject(role)
    assert evaluation.wait_until_finished(70, PATIENCE_S), evaluation.output()
    for role in ("zygote", "coordinator", "node"):  # and several together
        injector.inject(role)
    assert command.wait(PATIENCE_S) == 0, evaluation.output()
    check(injector)


@pytest.mark.slow
def test_when_the_command_dies_all_ends_by_itself_and_resume_redoes_nothing(start):
    evaluation, command = start()
    injector = FaultInjector(evaluation, seed=2)
    assert evaluation.wait_until_finished(20, PATIENCE_S), evaluation.output()
    injector.inject("command")
    command.wait()
    assert evaluation.resume().wait(PATIENCE_S) == 0, evaluation.output()
    # It waited for what the first had left, which kept what its engines had begun.
    finished = [line for line in evaluation.record() if line.what == "finished"]
    assert len(finished) == len({line.key for line in finished}) == 140
    check(injector)


@pytest.mark.slow
def test_without_its_command_everything_ends_within_the_time_stated_and_resume_redoes_nothing(
    start,
):
    evaluation, command = start()
    injector = FaultInjector(evaluation, seed=4)
    assert evaluation.wait_until_finished(20, PATIENCE_S), evaluation.output()
    injector.inject("coordinator")
    injector.inject("command")
    command.wait()
    deadline_s = time.monotonic() + PATIENCE_S
    while evaluation.leftovers():
        assert time.monotonic() < deadline_s, evaluation.leftovers()
    committed = evaluation.committed()
    assert {line.key for line in evaluation.record() if line.what == "finished"} <= committed, (
        "engines kept them"
    )
    assert evaluation.shared_memory() == []
    assert evaluation.resume().wait(PATIENCE_S) == 0, evaluation.output()
    check(injector)


@pytest.mark.slow
def test_processes_of_two_nodes_are_killed_at_random(start, tmp_path):
    gate = Gate(tmp_path, kind="simulated")
    gate.let(0)
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    evaluation, command = start(
        nodes=2, engines_per_node=1, flags=gate.flags, environment={"PYTHONPATH": path}
    )
    injector = FaultInjector(evaluation, seed=5)
    # A task whose process is killed three times is given up.
    kills = [("client", "host", "node", "zygote")] * 2 + [("engine", "metric", "coordinator")] * 5
    injector.chance.shuffle(kills)
    for count, roles in zip(sorted(injector.chance.sample(range(1, 80), 7)), kills, strict=True):
        gate.let(count)
        assert evaluation.wait_until_finished(count, PATIENCE_S), evaluation.output()
        injector.inject(*roles)
    gate.open()
    assert command.wait(PATIENCE_S) == 0, evaluation.output()
    check(injector)


def test_what_counts_as_done_again():
    """Test the measure itself: a request repeated after its answer was kept is found."""
    from holdfast.testing.engine import Recorded

    def line(what, key, pid, at_s):
        return Recorded(what=what, key=key, pid=pid, at_s=at_s)

    record = [line("asked", "a", 1, 0.0), line("finished", "a", 1, 1.0), line("asked", "a", 2, 5.0)]
    assert redone(record, {}, []) == ["a"], "an engine that lives had finished it"
    assert redone(record, {1: 1.1}, []) == [], "it died before it could say so"
    assert redone(record, {1: 1.1}, [(2.0, {"a"})]) == ["a"], "but it stood in the journal"
    assert redone(record[:2], {}, [(2.0, {"a"})]) == []
