"""Fill the disk or the shared memory of an evaluation: one prompt error, and no loss."""

import random
import shutil

import pytest

from evaluation.fault_injected_evaluation import (
    FaultInjectedEvaluation,
    expected_results,
    synthetic_tasks,
)

PATIENCE_S = 120.0


@pytest.mark.slow
def test_a_full_disk_ends_it_with_one_sentence_and_resume_goes_on(tmp_path, small_disk, fill):
    tasks = synthetic_tasks(random.Random(0), (50, 40, 50), metric_s=0.02)
    flags = ("--max-batch", "4", "--linger-s", "2")
    evaluation = FaultInjectedEvaluation(
        folder=tmp_path / "of", home=small_disk / "home", tasks=tasks, flags=flags
    )
    try:
        command = evaluation.start()
        assert evaluation.wait_until_finished(20, PATIENCE_S), evaluation.output()
        fill(small_disk / "fill")
        assert command.wait(PATIENCE_S) in (1, 2)  # the ledger, on the same disk, may say it
        said = evaluation.output().strip().splitlines()
        assert len(said) == 1
        assert "full" in said[0]
        assert evaluation.leftovers() == []
        (small_disk / "fill").unlink()
        kept = evaluation.committed()
        before = len(evaluation.record())
        assert evaluation.resume().wait(PATIENCE_S) == 0, evaluation.output()
        asked_again = {line.key for line in evaluation.record()[before:] if line.what == "asked"}
        assert not asked_again & kept
        assert evaluation.results() == expected_results(tasks)
    finally:
        evaluation.end()


def test_weights_that_do_not_fit_into_shared_memory_are_one_sentence(tmp_path):
    too_much = (
        2 * shutil.disk_usage("/dev/shm").total
    )  # of holes: nothing is read before it is known to fit
    tasks = synthetic_tasks(random.Random(0), (5,))
    evaluation = FaultInjectedEvaluation(
        folder=tmp_path, tasks=tasks, model_bytes=too_much, flags=("--linger-s", "2")
    )
    try:
        assert evaluation.start().wait(PATIENCE_S) == 1
        said = evaluation.output().strip().splitlines()
        assert len(said) == 1
        assert said[0].startswith("holdfast: The shared memory of this node is full")
        assert evaluation.leftovers() == []
        assert evaluation.record() == []
    finally:
        evaluation.end()
