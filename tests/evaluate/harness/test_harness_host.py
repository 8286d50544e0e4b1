"""Test the host's real processes with a coordinator over TCP: kills, cuts, and orders to stop."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import toy_harness
from fake_coordinator import TOKEN, FakeCoordinator

from holdfast.evaluate.types.harness import ModelFacts
from holdfast.evaluate.types.requests import Answer
from holdfast.evaluate.types.suite import TaskEntry
from holdfast.evaluate.wire import messages

FACTS = ModelFacts(model=0, name="toy", tokenizer="", max_length=0)
LONG_S = 240  # nothing here takes long; a test that hangs is to fail


def answer(request) -> Answer:
    return Answer(tokens=request.prompt[:4], text="said")


def toy(name: str, **options) -> TaskEntry:
    return TaskEntry(name=name, harness=toy_harness.NAME, options=options)


@contextlib.asynccontextmanager
async def a_host(entries, folder, *arguments, prepared=True):
    """Run a coordinator and a prepared host during the block."""
    async with (
        asyncio.timeout(LONG_S),
        FakeCoordinator(answer, entries, FACTS, folder) as coordinator,
    ):
        environment = {
            **os.environ,
            messages.ENV_ADDRESS: coordinator.address,
            messages.ENV_TOKEN: TOKEN,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            ),
        }
        command = [
            sys.executable,
            "-m",
            "holdfast.evaluate.harness.host",
            "--node",
            "3",
            "--slots",
            "2",
            *arguments,
        ]
        with (folder / "host.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdout=log, stderr=log
            )
        try:
            if prepared:
                said = await coordinator.prepared.get()
                assert not said.error, said.error
            yield coordinator, process
        except BaseException:
            sys.stderr.write((folder / "host.log").read_text())
            if process.returncode is None:
                process.kill()
            await process.wait()
            raise
    await process.wait()


def clients(coordinator) -> list[messages.Hello]:
    return [hello for hello in coordinator.hellos if hello.role == "client"]


def test_tasks_run_and_their_metrics_come_back(tmp_path):
    entries = [toy("plain"), toy("measured", metrics=True, samples=30)]

    async def scenario():
        async with a_host(entries, tmp_path) as (coordinator, process):
            for task in range(2):
                coordinator.run(task)
            await coordinator.until(lambda: len(coordinator.ended) == 2)
            return coordinator, process

    coordinator, process = asyncio.run(scenario())
    assert process.returncode == 0  # after the coordinator's Stop
    assert [coordinator.ended[task].error for task in range(2)] == ["", ""]
    assert len(coordinator.ended[0].result.results["texts"]) == 5
    measured = [json.loads(text) for text in coordinator.ended[1].result.results["measured"]]
    assert [row[:2] for row in measured] == [[number, 2] for number in range(30)]
    assert len({row[2] for row in measured}) <= 2  # processes, kept for many samples
    assert {(hello.node, hello.model, hello.task) for hello in clients(coordinator)} == {
        (3, 0, 0),
        (3, 0, 1),
    }


def test_large_requests_come_in_several_bounded_frames(tmp_path):
    async def scenario():
        async with a_host([toy("large", samples=40, text_bytes=400_000)], tmp_path) as (
            coordinator,
            _,
        ):
            coordinator.run(0)
            await coordinator.until(lambda: coordinator.ended)
            return coordinator

    coordinator = asyncio.run(scenario())
    assert not coordinator.ended[0].error
    assert coordinator.submits[0] >= 5
    assert coordinator.asked_of[0] == 40


def test_a_client_that_is_killed_is_started_again(tmp_path):
    async def scenario():
        async with a_host([toy("once")], tmp_path) as (coordinator, _):
            coordinator.may_answer.clear()
            coordinator.run(0)
            await coordinator.until(lambda: coordinator.asked_of.get(0) == 5)
            killed = clients(coordinator)[0].pid
            os.kill(killed, signal.SIGKILL)
            await coordinator.until(lambda: coordinator.asked_of.get(0) == 10)
            coordinator.may_answer.set()
            await coordinator.until(lambda: coordinator.ended)
            return coordinator, killed

    coordinator, killed = asyncio.run(scenario())
    assert not coordinator.ended[0].error
    assert coordinator.ended[0].result.results["pid"] != killed


def test_a_client_that_dies_each_time_is_given_up_and_others_go_on(tmp_path):
    entries = [toy("deadly", kills_itself_early=True), toy("fine"), toy("broken", raises=True)]

    async def scenario():
        async with a_host(entries, tmp_path) as (coordinator, _):
            for task in range(3):
                coordinator.run(task)
            await coordinator.until(lambda: len(coordinator.ended) == 3)
            return coordinator.ended

    ended = asyncio.run(scenario())
    assert "'deadly' ended 3 times without a result, killed by SIGKILL" in ended[0].error
    assert "logs/task-0-0.log" in ended[0].error
    assert not ended[1].error
    assert ended[2].error.startswith("KeyError: 'the harness is broken' (in run, toy_harness.py:")
    assert "Traceback" in (tmp_path / "logs" / "task-0-2.log").read_text()


@pytest.mark.parametrize("how", ["forks", "starts"])
def test_what_a_killed_client_had_started_is_gone_too(how, tmp_path):
    file = tmp_path / "pid"

    async def scenario():
        async with a_host([toy("parent", **{how: str(file)})], tmp_path) as (coordinator, _):
            coordinator.may_answer.clear()
            coordinator.run(0)
            await coordinator.until(lambda: coordinator.asked_of.get(0) == 5)
            forked = psutil.Process(int(file.read_text()))
            os.kill(clients(coordinator)[0].pid, signal.SIGKILL)
            _, alive = await asyncio.to_thread(psutil.wait_procs, [forked], timeout=LONG_S)
            assert not alive or alive[0].status() == psutil.STATUS_ZOMBIE

    asyncio.run(scenario())


def test_a_metric_process_that_is_killed_is_reported_lost_and_the_metric_computed_by_another(
    tmp_path,
):
    trap = tmp_path / "trap"
    trap.touch()

    async def scenario():
        async with a_host([toy("trapped", metrics=True, trap=str(trap))], tmp_path) as (
            coordinator,
            _,
        ):
            coordinator.run(0)
            await coordinator.until(lambda: coordinator.ended)
            return coordinator

    coordinator = asyncio.run(scenario())
    assert not coordinator.ended[0].error
    lost = [said for said in coordinator.measured if said.lost]
    assert [said.error for said in lost] == ["The process that computed it was killed by SIGKILL."]
    assert [json.loads(text)[0] for text in coordinator.ended[0].result.results["measured"]] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_a_metric_that_raises_is_told_and_one_that_takes_too_long_is_stopped_once(tmp_path):
    entries = [toy("slow", metrics=True, samples=2, endless=1, raises_at=0)]

    async def scenario():
        async with a_host(entries, tmp_path, "--metric-limit-s", "10") as (coordinator, _):
            coordinator.run(0)
            await coordinator.until(lambda: len(coordinator.measured) >= 4)
            return coordinator.measured

    measured = asyncio.run(scenario())
    (raised,) = [said for said in measured if not said.lost]
    assert raised.error.startswith("ValueError: no such metric (in measure, toy_harness.py:")
    lost = [said for said in measured if said.lost]
    assert {said.error for said in lost} == {"It took longer than 10 s and was stopped."}
    assert len({said.seconds for said in lost}) == 1  # a repeated request is not computed again


def test_a_coordinator_that_dies_and_comes_back_finds_everything_going_on(tmp_path):
    entries = [toy("waiting"), toy("measured", metrics=True), toy("done before")]

    async def scenario():
        async with a_host(entries, tmp_path) as (coordinator, _):
            coordinator.run(2)
            await coordinator.until(lambda: 2 in coordinator.ended)
            coordinator.may_answer.clear()
            coordinator.run(0)
            coordinator.run(1)
            await coordinator.until(
                lambda: coordinator.asked_of.get(0) == 5 and coordinator.asked_of.get(1) == 5
            )
            before = {hello.pid for hello in clients(coordinator)}
            await coordinator.hang_up()
            coordinator.forget()
            await coordinator.listen()
            again = await coordinator.prepared.get()
            for task in range(3):  # the new coordinator has no tasks, but the host still runs them
                coordinator.run(task)
            await coordinator.until(
                lambda: coordinator.asked_of.get(0) == 5 and coordinator.asked_of.get(1) == 5
            )
            coordinator.may_answer.set()
            await coordinator.until(lambda: len(coordinator.ended) == 3)
            return coordinator, before, again

    coordinator, before, again = asyncio.run(scenario())
    assert again.versions == {toy_harness.NAME: "7"}
    assert [coordinator.ended[task].error for task in range(3)] == ["", "", ""]
    assert {hello.pid for hello in clients(coordinator)} == before - {
        coordinator.ended[2].result.results["pid"]
    }


def test_a_host_that_is_killed_leaves_nobody(tmp_path):
    async def scenario():
        async with a_host([toy("left", forks=str(tmp_path / "pid"))], tmp_path) as (
            coordinator,
            process,
        ):
            coordinator.may_answer.clear()
            coordinator.run(0)
            await coordinator.until(lambda: coordinator.asked_of.get(0) == 5)
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= 3  # the zygote, a client, and the client's own child
            process.kill()
            _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=LONG_S)
            assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
            await coordinator.until(lambda: coordinator.host is None)

    asyncio.run(scenario())


def test_a_host_whose_zygote_died_ends_for_its_node_to_start_another(tmp_path):
    async def scenario():
        async with a_host([toy("left")], tmp_path) as (coordinator, process):
            (zygote,) = psutil.Process(process.pid).children()
            zygote.kill()
            await coordinator.until(lambda: coordinator.host is None)
            return await process.wait()

    assert asyncio.run(scenario()) == 1
    assert "The parent of the harness's processes died" in (tmp_path / "host.log").read_text()


def test_a_host_whose_coordinator_stays_away_ends(tmp_path):
    async def scenario():
        async with a_host([toy("left")], tmp_path, "--away-s", "0") as (coordinator, process):
            await coordinator.hang_up()
            return await process.wait()

    assert asyncio.run(scenario()) == 1
    assert "was unreachable for" in (tmp_path / "host.log").read_text()


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (toy("x", unknown=True), "There is no task 'x'."),
        (
            TaskEntry(name="x", harness="lm-evil"),
            "There is no harness 'lm-evil'. Did you mean 'lm-eval'?",
        ),
        (
            TaskEntry(name="x", harness="toy_harness:Other"),
            "The module toy_harness has no class Other.",
        ),
        (
            TaskEntry(name="x", harness="no_such_module:Other"),
            "needs no_such_module, which is not installed.",
        ),
    ],
)
def test_what_cannot_be_prepared_is_said_in_a_sentence(entry, sentence, tmp_path):
    async def scenario():
        async with a_host([entry], tmp_path, prepared=False) as (coordinator, _):
            return await coordinator.prepared.get()

    assert sentence in asyncio.run(scenario()).error


def test_the_parent_that_forks_has_one_thread_and_imports_once(tmp_path):
    async def scenario():
        async with a_host([toy("any")], tmp_path) as (_, process):
            (zygote,) = psutil.Process(process.pid).children()
            return zygote.num_threads()

    assert asyncio.run(scenario()) == 1
    assert (
        subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys, holdfast.evaluate.harness.host; print('torch' in sys.modules)",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        == "False\n"
    )
