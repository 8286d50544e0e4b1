"""Check the coordinator through its peers: the results are independent of any kills."""

import asyncio
import random

import pytest
from cluster_of_fakes import MANIFEST, World, answer_to, config, entry, samples_of

from holdfast.evaluate.coordinator.config import CoordinatorFiles
from holdfast.evaluate.policy.priors import decode_history
from holdfast.evaluate.types.timeline import read_timeline
from holdfast.evaluate.wire import messages

ENTRIES = [
    entry("choices", 30, requests=4),
    entry("generated", 20, kind="generate"),
    entry("measured", 15, metric=True, kind="generate"),
]


@pytest.fixture(autouse=True)
def everybody_is_back_soon(monkeypatch):
    """Scale the waits for a hundred processes on this one event loop."""
    monkeypatch.setattr("holdfast.evaluate.wire.client._BACK_OFF_S", (0.05, 0.1))
    monkeypatch.setattr("holdfast.evaluate.coordinator.engine_pool._CUT_GRACE_S", 3.0)


def model(number=0):
    return messages.AddModel(model=number, name=f"model {number}", manifest=MANIFEST)


def expected(task, number=0):
    return [
        [answer_to(request.key, f"weights {number}").logprob for request in sample.requests]
        for sample in samples_of(task)
    ]


def check_scores(world, models=(0,), entries=ENTRIES):
    for number in models:
        for place, task in enumerate(entries):
            outcome = world.outcomes[number, place]
            assert not outcome.error
            assert outcome.result.results["score"] == expected(task, number)
            if task.options["metric"]:
                assert all(outcome.result.results["metrics"])


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 240.0))


def test_every_sample_is_answered_once_and_measured_once(tmp_path):
    async def scenario():
        world = World(config(tmp_path, ENTRIES))
        await world.start()
        world.spawn(world.command(model()))
        world.spawn(world.node(0))
        await world.finish()
        await world.end()
        return world

    world = run(scenario())
    check_scores(world)
    assert set(world.answered.values()) == {1}
    assert len(world.answered) == 30 * 4 + 20 + 15
    assert set(world.measured.values()) == {1}
    assert len(world.measured) == 15
    assert world.models[0].error == ""
    assert world.models[0].digest == "digest 0"


def test_a_second_evaluation_of_the_same_weights_asks_nothing(tmp_path):
    async def scenario(folder):
        world = World(config(folder, ENTRIES, journals=str(tmp_path / "answers")))
        await world.start()
        world.spawn(world.command(model()))
        world.spawn(world.node(0))
        await world.finish()
        await world.end()
        return world

    run(scenario(tmp_path / "one"))
    world = run(scenario(tmp_path / "two"))
    check_scores(world)
    assert not world.answered
    assert not world.measured
    assert world.statuses[-1].reused == world.statuses[-1].requests == 155


def test_a_stream_of_models_is_swapped_through_and_never_mixed(tmp_path):
    async def scenario():
        world = World(config(tmp_path, ENTRIES, nodes=2))
        await world.start()
        world.spawn(world.command(model(0), model(1), model(2)))
        world.spawn(world.node(0))
        world.spawn(world.node(1))
        await world.finish()
        await world.end()
        return world

    world = run(scenario())
    check_scores(world, models=(0, 1, 2))
    spans = read_timeline(tmp_path / "timeline.jsonl").engines
    assert any(span.what == "swap" for span in spans)


def test_a_swap_that_changed_the_canaries_is_undone_by_a_fresh_start(tmp_path):
    async def scenario():
        world = World(config(tmp_path, ENTRIES, engines_per_node=1))
        world.bad_swaps = {"node-0/0"}
        await world.start()
        world.spawn(world.command(model(0), model(1)))
        world.spawn(world.node(0))
        await world.finish()
        await world.end()
        return world

    check_scores(run(scenario()), models=(0, 1))


def test_a_task_that_raises_says_so_and_the_others_finish(tmp_path):
    entries = [*ENTRIES, entry("raises", 3)]

    async def scenario():
        world = World(config(tmp_path, entries))
        await world.start()
        world.spawn(world.command(model()))
        world.spawn(world.node(0))
        await world.finish()
        await world.end()
        return world

    world = run(scenario())
    check_scores(world)
    assert world.outcomes[0, 3].error == "ValueError: it raises"
    assert world.models[0].error == ""


def test_an_unknown_task_ends_it_with_the_hosts_sentence(tmp_path):
    async def scenario():
        world = World(config(tmp_path, [entry("missing", 1)]))
        await world.start()
        world.spawn(world.command(model()))
        world.spawn(world.node(0))
        await world.finish()
        await world.end()
        return world

    world = run(scenario())
    assert world.models[0].error == "There is no task 'missing'."


def test_an_engine_that_hangs_is_started_anew(tmp_path):
    async def scenario():
        world = World(config(tmp_path, ENTRIES, silent_s=0.5))
        world.silent = {"node-0/0"}
        await world.start()
        world.spawn(world.command(model()))
        world.spawn(world.node(0))
        living = world.spawn(alive(world))
        await until(lambda: "node-0/0" in world.engines)
        hung = world.engines["node-0/0"]
        await until(lambda: world.engines["node-0/0"] is not hung)
        world.silent = set()
        await world.finish()
        living.cancel()
        await world.end()
        return world

    async def alive(world):
        while True:
            await asyncio.sleep(0.05)
            for name, engine in world.engines.items():
                if name not in world.silent and hasattr(engine, "line"):
                    engine.line.send(messages.Alive())

    check_scores(run(scenario()))


async def until(condition, within_s=240.0):
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def test_what_a_model_cost_is_written_before_its_end_is_told(tmp_path):
    """A stream lasts for days, and evaluations that start meanwhile need its measured costs."""

    async def scenario():
        world = World(config(tmp_path, ENTRIES, is_stream=True))
        await world.start()
        world.spawn(world.command(model(0), finish=False))
        world.spawn(world.node(0))
        await until(lambda: 0 in world.models)
        learned = decode_history(CoordinatorFiles(tmp_path).learned.read_bytes())
        await world.end()
        return {task.task: len(task.numbers) // 4 for task in learned}

    assert run(scenario()) == {"lm-eval:generated": 20, "lm-eval:measured": 15}


def test_a_newer_model_drops_the_one_that_no_engine_has_begun(tmp_path):
    async def scenario():
        world = World(
            config(tmp_path, ENTRIES, engines_per_node=1, is_stream=True, drop_stale=True)
        )
        await world.start()
        world.silent = {"node-0/0"}  # this engine never finishes its requests
        world.spawn(world.command(model(0), finish=False))
        world.spawn(world.node(0))
        await until(lambda: "node-0/0" in world.engines and world.engines["node-0/0"].held)
        world.command_line.send(model(1))
        await until(lambda: any(number == 1 for number, _task in world.live._delivery._clients))
        world.command_line.send(model(2))
        await until(lambda: 1 in world.models)
        world.command_line.send(model(2))  # repeated after a cut
        world.command_line.send(messages.Finish())
        world.silent = set()
        world.engines["node-0/0"].gate.set()
        await world.finish()
        await world.end()
        return world

    world = run(scenario())
    check_scores(world, models=(0, 2))
    assert world.models[1].error == "a newer checkpoint came before it was begun"


def test_a_coordinator_that_was_started_anew_drops_nothing_that_it_is_told_again(tmp_path):
    async def scenario():
        world = World(
            config(tmp_path, ENTRIES, engines_per_node=1, is_stream=True, drop_stale=True)
        )
        await world.start()
        world.silent = {"node-0/0"}
        world.spawn(world.command(model(0), finish=False))
        world.spawn(world.node(0))
        await until(lambda: "node-0/0" in world.engines and world.engines["node-0/0"].held)
        world.kill_coordinator()
        world.added += [model(1)]
        await world.start()
        await until(lambda: world.live is not None and world.live._models.get(1) is not None)
        world.silent = set()
        world.engines["node-0/0"].gate.set()
        world.finishing = True
        world.command_line.send(messages.Finish())
        await world.finish()
        await world.end()
        return world

    check_scores(run(scenario()), models=(0, 1))


def test_a_model_that_a_node_cannot_have_is_read_by_the_other(tmp_path):
    async def scenario():
        world = World(config(tmp_path, ENTRIES, nodes=2, engines_per_node=1))
        world.no_route = {0}
        await world.start()
        world.spawn(world.command(model(0)))
        world.spawn(world.node(0))
        world.spawn(world.node(1))
        await world.finish()
        await world.end()
        return world

    world = run(scenario())
    check_scores(world)
    assert world.refused == [0, 0], "as owner, and from its peers"


def test_a_model_that_no_node_can_have_fails_with_the_reason_and_the_next_goes_on(tmp_path):
    async def scenario():
        world = World(config(tmp_path, ENTRIES, nodes=2, engines_per_node=1))
        world.no_route, world.lost_models = {0, 1}, {0}
        await world.start()
        world.spawn(world.command(model(0), model(1)))
        world.spawn(world.node(0))
        world.spawn(world.node(1))
        await world.finish()
        await world.end()
        return world

    world = run(scenario())
    assert world.models[0].error == "There is no route."
    check_scores(world, models=(1,))


@pytest.mark.parametrize("seed", range(8))
def test_whoever_is_killed_at_whatever_moment_the_scores_are_the_same(tmp_path, seed):
    """Cut or kill coordinator, engines, hosts and clients; no committed work may be repeated."""
    chance = random.Random(seed)
    entries = [
        entry("choices", 60, requests=4),
        entry("generated", 60, kind="generate"),
        entry("m", 40, metric=True),
    ]

    async def scenario():
        # Even on a slow machine, live engines report before their requests go to others.
        world = World(config(tmp_path, entries, nodes=2, settle_s=4.0))
        await world.start()
        world.spawn(world.command(model(0), model(1)))
        world.spawn(world.node(0))
        world.spawn(world.node(1))
        for _ in range(6):
            await asyncio.sleep(chance.uniform(0.0, 0.15))
            if world.live is None or world.live.ended.is_set():
                break
            victim = chance.choice(["coordinator", "engine", "line", "line"])
            if victim == "coordinator":
                world.kill_coordinator()
                await asyncio.sleep(chance.uniform(0.0, 0.05))
                await world.start()
            elif victim == "engine" and world.engines:
                chance.choice(list(world.engines.values())).die()
            else:
                chance.choice(world.lines).close()
        await world.finish(50.0)
        await world.end()
        return world

    world = run(scenario())
    check_scores(world, models=(0, 1), entries=entries)
    assert world.redone == []
