"""Check the durable state of models and tasks, and the memory after their end."""

import pytest
from cluster_of_fakes import MANIFEST, config, entry

from holdfast.evaluate.coordinator.config import CoordinatorFiles
from holdfast.evaluate.coordinator.models import Models
from holdfast.evaluate.coordinator.tasks import Tasks
from holdfast.evaluate.types.harness import TaskResult
from holdfast.evaluate.wire import messages


@pytest.fixture
def models(tmp_path):
    models = Models(tmp_path)
    for number in range(2):
        model = models.add(messages.AddModel(model=number, name=str(number), manifest=MANIFEST))
        models.know(model, f"digest {number}")
        models.certify(model, [float(number)])
    return models


def test_what_the_weights_were_and_said_is_known_to_the_next_life(models, tmp_path):
    again = Models(tmp_path)
    assert [(model.digest, model.canary) for model in again] == [
        ("digest 0", [0.0]),
        ("digest 1", [1.0]),
    ]


def test_a_digest_that_the_command_gives_needs_no_file(tmp_path):
    """A rescore gives the digest under which its answers are kept."""
    Models(tmp_path).add(messages.AddModel(model=0, name="0", manifest=MANIFEST, digest="given"))
    assert Models(tmp_path).get(0).digest == "given"


def test_of_a_model_that_ended_the_manifest_is_on_disk_alone(models, tmp_path):
    models.end(models.get(0), messages.ModelOutcome(model=0))
    for one in (models, Models(tmp_path)):
        assert one.get(0).added == messages.AddModel(model=0, name="0")
        assert one.get(1).added.manifest == MANIFEST
        assert [model.number for model in one.open()] == [1]
    (tmp_path / "000000.ended").unlink()  # as `resume` does
    resumed = Models(tmp_path).get(0)
    assert (resumed.added.manifest, resumed.digest, resumed.canary) == (MANIFEST, "digest 0", [0.0])


def test_outcomes_of_tasks_are_read_when_they_are_asked_for(tmp_path):
    said = config(tmp_path, [entry("a", 1), entry("b", 1)])
    results = CoordinatorFiles(tmp_path).results
    lives = [Tasks(said.suite, said.spec, said.nodes, tmp_path, results)]
    outcomes = [
        messages.TaskOutcome(model=0, task=0, result=TaskResult(results={"acc": 0.5})),
        messages.TaskOutcome(model=0, task=1, error="it raises"),
        messages.TaskOutcome(model=7, task=1, error="it raises"),
    ]
    assert [lives[0].ended(one) for one in outcomes] == [True] * 3
    lives.append(Tasks(said.suite, said.spec, said.nodes, tmp_path, results))
    for tasks in lives:
        assert not tasks.ended(outcomes[1])
        assert list(tasks.of_model(0)) == outcomes[:2]
        assert list(tasks.of_model(7)) == outcomes[2:]
        assert (tasks.are_all_ended(0), tasks.are_all_ended(7)) == (True, False)
