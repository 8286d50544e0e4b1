"""Check that engines rest while all answers are known, and start if any part of the key changed."""

import asyncio
import os
import socket

import pytest
from cluster_of_fakes import World, answer_to, config, entry, samples_of

from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.weights.describe import describe
from holdfast.evaluate.wire import messages

ENTRIES = [
    entry("choices", 6, requests=2),
    entry("measured", 4, metric=True, kind="generate"),
]
HF = EngineSpec(kind="hf", mode="exact")


@pytest.fixture(autouse=True)
def files_are_old(monkeypatch):
    monkeypatch.setattr("holdfast.evaluate.weights.stamp.SETTLED_AFTER_S", -10.0)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def evaluate(tmp_path, model):
    """Return a function that evaluates the model, in a folder of its own, and returns the world."""
    numbers = iter(range(100))

    async def scenario(added, entries, spec, changes, killed, nodes):
        folder = tmp_path / f"evaluation-{next(numbers)}"
        world = World(
            config(folder, entries, spec=spec, nodes=nodes, journals=str(tmp_path / "answers"))
        )
        world.host, world.kind = socket.gethostname(), "a kind"
        for name, value in changes.items():
            setattr(world, name, value)
        await world.start()
        world.spawn(world.command(added))
        for place in range(nodes):
            world.spawn(world.node(place))
        if killed:
            while not world.outcomes:
                await asyncio.sleep(0.005)
            world.kill_coordinator()
            await world.start()
        await world.finish()
        await world.end()
        return world

    def run(entries=ENTRIES, spec=HF, killed=False, nodes=1, **changes):
        added = messages.AddModel(
            model=0, name="model", manifest=describe(str(model)), tokenizer=str(model)
        )
        work = scenario(added, entries, spec, changes, killed, nodes)
        return asyncio.run(asyncio.wait_for(work, 240.0))

    return run


def check_scores(world, entries=ENTRIES):
    for place, task in enumerate(entries):
        outcome = world.outcomes[0, place]
        assert not outcome.error
        assert outcome.result.results["score"] == [
            [answer_to(request.key, "weights 0").logprob for request in sample.requests]
            for sample in samples_of(task)
        ]


def test_known_answers_start_no_engine_and_read_no_weights(evaluate):
    first = evaluate()
    assert first.started
    assert first.fetched == [0]
    second = evaluate()
    check_scores(second)
    assert (second.started, second.fetched, dict(second.answered)) == ([], [], {})
    assert second.models[0].digest == first.models[0].digest == "digest 0"
    assert second.models[0].numerics == "of fakes"
    assert second.statuses[-1].state == "running"
    assert second.statuses[-1].reused == second.statuses[-1].requests == 16


def test_fewer_tasks_are_known_too_and_a_new_one_starts_engines(evaluate):
    evaluate()
    assert evaluate(ENTRIES[1:]).started == []
    more = [*ENTRIES, entry("new", 3)]
    world = evaluate(more)
    check_scores(world, more)
    assert world.started
    assert world.fetched == [0]
    assert sum(world.answered.values()) == 3, "only the new samples"


def test_a_metric_that_was_not_computed_needs_no_engine(evaluate):
    evaluate([entry("one", 4, kind="generate")])
    world = evaluate([entry("one", 4, metric=True, kind="generate")])
    assert sum(world.measured.values()) == 4
    assert world.started == []


def _other_bytes(model):
    weights, seen = model / "model.safetensors", (model / "model.safetensors").stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def _other_file(model):
    (model / "new").write_bytes(b"weights")
    (model / "new").rename(model / "model.safetensors")


def _other_config(model):
    (model / "config.json").write_text("{ }")


@pytest.mark.parametrize("change", [_other_bytes, _other_file, _other_config])
def test_a_changed_model_starts_engines(evaluate, model, change):
    evaluate()
    change(model)
    world = evaluate(digests={0: "another digest"})
    assert world.started
    assert world.fetched == [0]
    assert sum(world.answered.values()) == 16, "answers of other weights are not used"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "another kind"},
        {"kind": ""},
        {"host": "another machine"},
        {"spec": EngineSpec(kind="hf", mode="exact", max_length=9)},
        {"spec": EngineSpec(kind="hf", mode="free")},
        {"spec": EngineSpec(kind="simulated", mode="exact")},
    ],
    ids=str,
)
def test_another_node_or_engine_starts_engines(evaluate, change):
    evaluate()
    assert evaluate(**change).started


def test_numerics_of_other_kinds_of_engines_are_not_remembered(evaluate):
    for _ in range(2):
        assert evaluate(spec=EngineSpec(kind="module:Class", mode="exact")).started


def test_files_that_changed_just_before_are_looked_at_again(evaluate, monkeypatch):
    monkeypatch.setattr("holdfast.evaluate.weights.stamp.SETTLED_AFTER_S", 1e9)
    for _ in range(2):
        assert evaluate().started


def test_answers_that_were_removed_are_asked_for_again(evaluate, tmp_path):
    evaluate()
    for journal in (tmp_path / "answers").rglob("*.journal"):
        journal.unlink()
    world = evaluate()
    check_scores(world)
    assert world.started


def test_a_coordinator_that_was_killed_rests_again(evaluate):
    evaluate()
    world = evaluate(killed=True)
    check_scores(world)
    assert world.started == []


def test_other_numerics_than_remembered_end_the_evaluation_and_are_right_the_next_time(evaluate):
    evaluate()
    more = [*ENTRIES, entry("new", 3)]
    world = evaluate(more, numerics="of others")
    assert "numerics changed undetected, from of fakes to of others" in world.models[0].error
    world = evaluate(more, numerics="of others")
    check_scores(world, more)
    assert sum(world.answered.values()) == 16 + 3


def test_several_nodes_rest_together_or_not_at_all(evaluate):
    evaluate(nodes=2)
    assert evaluate(nodes=2).started == []
    world = evaluate(nodes=2, other_kinds={1: "another kind"})
    check_scores(world)
    assert {name.partition("/")[0] for name in world.started} == {"node-0", "node-1"}
    assert not world.answered, "the answers of the other node's kind are known"
