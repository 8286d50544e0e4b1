import asyncio
import contextlib
import json
import os
import signal
import sys

import pytest

from holdfast.evaluate.engines.simulated import simulated_answer
from holdfast.evaluate.engines.worker import Pulse, _encoded
from holdfast.evaluate.types.engine import Finished
from holdfast.evaluate.types.requests import (
    Answer,
    Request,
    Sampling,
    decode_answer,
    encode_answer,
    keyed,
    pack_tokens,
)
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.answer_journal import Journal
from holdfast.testing import FakeClock

FAST = {
    "request_s": 0.0,
    "step_base_s": 0.0005,
    "step_sequence_s": 0.0,
    "prefill_tokens_per_s": 1e9,
}
PATIENCE_S = 240.0


class Connection:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def welcome(self):
        self.hello = await messages.read(self.reader)
        self.send(messages.Welcome())
        return self

    def send(self, message):
        self.writer.write(messages.encode(message))

    async def expect(self, kind):
        """Return the next message of a kind, without `Alive` and `Holding`."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await messages.read(self.reader)
                if isinstance(message, kind):
                    return message
                assert isinstance(message, messages.Alive | messages.Holding), message

    async def end_of_life(self):
        """Read until a silence that is too long for a live worker."""
        for _ in range(10):
            await asyncio.wait_for(messages.read(self.reader), 2.5)

    async def serve(self, folder, *, model=0, digest="d0"):
        self.send(messages.Serve(model=model, folder=str(folder), digest=digest))
        return await self.expect(messages.Serving)

    def cut(self):
        self.writer.transport.abort()


class Coordinator:
    """Accept connections; `worker` starts a real worker process."""

    async def __aenter__(self):
        self._connections = asyncio.Queue()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._processes, self._writers = [], []
        return self

    async def _accept(self, reader, writer):
        self._writers.append(writer)
        await self._connections.put(Connection(reader, writer))

    async def connection(self):
        return await (await asyncio.wait_for(self._connections.get(), PATIENCE_S)).welcome()

    async def worker(self, *arguments, kind="simulated", spec=None, **options):
        spec = json.dumps(spec or {"kind": kind, "max_batch": 4, "options": FAST | options})
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *(
                "-m",
                "holdfast.evaluate.engines.worker",
                "--name",
                "0/0",
                "--node",
                "0",
                "--spec",
                spec,
                *arguments,
            ),
            env={
                **os.environ,
                messages.ENV_ADDRESS: f"127.0.0.1:{self.port}",
                messages.ENV_TOKEN: "secret",
            },
            stderr=asyncio.subprocess.PIPE,
        )
        self._processes.append(process)
        return process

    async def gone(self):
        """Stop listening."""
        self._server.close()

    async def __aexit__(self, *_):
        self._server.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def end_of(process):
    _, stderr = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return process.returncode, stderr.decode()


def generation(seed, new_tokens=3):
    sampling = Sampling(max_new_tokens=10_000, seed=seed, extra={"new_tokens": new_tokens})
    return Request(kind="generate", prompt=pack_tokens([1, 2, 3]), sampling=sampling)


def ask(*requests, model=0):
    return messages.AnswerRequests(
        model=model, requests=[(keyed(one).key, keyed(one).body) for one in requests]
    )


async def answers_of(connection, count):
    """Read `count` answers: key to answer, and the last number."""
    found, last = {}, 0
    while len(found) < count:
        done = await connection.expect(messages.Done)
        found |= {one.key: decode_answer(one.body) for one in done.done}
        last = done.number
    return found, last


def expected(*requests, new_tokens=3):
    return {keyed(one).key: simulated_answer(one, new_tokens) for one in requests}


def test_a_worker_loads_answers_swaps_and_stops(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(name.encode())

    async def scenario():
        async with Coordinator() as coordinator:
            process = await coordinator.worker()
            connection = await coordinator.connection()
            hello = connection.hello
            assert (hello.role, hello.name, hello.node, hello.pid, hello.model, hello.token) == (
                *("engine", "0/0", 0),
                *(process.pid, -1, "secret"),
            )
            loaded = await connection.serve(tmp_path / "a")
            assert (loaded.model, loaded.how, loaded.numerics) == (0, "load", "simulated exact")
            requests = [generation(seed) for seed in range(200)]
            connection.send(ask(*requests))
            found, number = await answers_of(connection, 200)
            assert found == expected(*requests)
            connection.send(messages.Acked(number=number))
            swapped = await connection.serve(tmp_path / "b", model=1, digest="d1")
            assert (swapped.model, swapped.how) == (1, "swap")
            assert swapped.canary != loaded.canary
            again = await connection.serve(tmp_path / "b", model=1, digest="d1")
            assert (again.kept, again.how, again.canary) == (True, "swap", swapped.canary)
            connection.send(ask(requests[0]))  # for a model that is no longer served
            assert (await connection.expect(messages.GivenBack)).keys == [keyed(requests[0]).key]
            connection.send(messages.Stop())
            assert await end_of(process) == (0, "")

    asyncio.run(scenario())


def test_a_cut_line_loses_nothing_and_what_is_committed_is_not_said_again(tmp_path):
    async def scenario():
        async with Coordinator() as coordinator:
            await coordinator.worker()
            first = await coordinator.connection()
            await first.serve(tmp_path)
            early, late = (
                [generation(seed) for seed in range(5)],
                [generation(seed) for seed in range(5, 10)],
            )
            first.send(ask(*early))
            _, number = await answers_of(first, 5)
            first.send(messages.Acked(number=number))
            first.send(ask(*late))
            await answers_of(first, 5)
            first.cut()  # before it was acknowledged

            second = await coordinator.connection()
            assert second.hello.model == 0
            kept = await second.expect(messages.Serving)
            assert (kept.kept, kept.how) == (True, "load")
            found, last = await answers_of(second, 5)
            assert found == expected(*late)
            assert last > number
            second.cut()
            third = await coordinator.connection()
            await third.expect(messages.Serving)
            found, last = await answers_of(third, 5)
            assert found == expected(*late)
            third.send(messages.Acked(number=last))
            third.send(
                ask(*early)
            )  # a coordinator without memory repeats them: only these are computed again
            found, _ = await answers_of(third, 5)
            assert found == expected(*early)

    asyncio.run(scenario())


def test_what_is_held_is_finished_while_the_coordinator_is_away_and_not_twice(tmp_path):
    async def scenario():
        async with Coordinator() as coordinator:
            await coordinator.worker(step_base_s=0.025)  # 5 s a request: none is done at the cut
            first = await coordinator.connection()
            await first.serve(tmp_path)
            requests = [generation(seed, 200) for seed in range(6)]
            first.send(ask(*requests))
            first.send(messages.TakeBack(keys=[]))
            await first.expect(messages.GivenBack)  # it has them
            first.cut()
            second = await coordinator.connection()
            await second.expect(messages.Serving)
            holding = await second.expect(messages.Holding)
            assert set(holding.keys) <= {keyed(one).key for one in requests}
            second.send(ask(*requests))  # held, or done: either way answered once
            found, number = await answers_of(second, 6)
            assert found == expected(*requests, new_tokens=200)
            assert number <= 6
            second.send(messages.TakeBack(keys=[keyed(one).key for one in requests]))
            assert (await second.expect(messages.GivenBack | messages.Done)).keys == []

    asyncio.run(scenario())


def test_what_is_not_begun_is_given_back(tmp_path):
    async def scenario():
        async with Coordinator() as coordinator:
            await coordinator.worker(step_base_s=0.01)
            connection = await coordinator.connection()
            await connection.serve(tmp_path)
            requests = [generation(seed, 20) for seed in range(8)]  # four fit in a batch
            connection.send(ask(*requests))
            connection.send(messages.TakeBack(keys=[keyed(one).key for one in requests]))
            given = (await connection.expect(messages.GivenBack)).keys
            assert given == [keyed(one).key for one in requests][-len(given) :]
            assert 4 <= len(given) < 8
            found, _ = await answers_of(connection, 8 - len(given))
            assert not found.keys() & set(given)

    asyncio.run(scenario())


def test_answers_that_nobody_fetches_are_kept_in_the_journal(tmp_path):
    async def scenario():
        async with Coordinator() as coordinator:
            process = await coordinator.worker(
                "--linger", "0.2", "--keep", str(tmp_path / "journals")
            )
            connection = await coordinator.connection()
            serving = await connection.serve(tmp_path)
            requests = [generation(seed, 300) for seed in range(6)]
            connection.send(ask(*requests))
            connection.send(messages.TakeBack(keys=[]))
            await connection.expect(messages.GivenBack)
            await coordinator.gone()
            connection.cut()
            assert await end_of(process) == (0, "")
            journal = Journal(tmp_path / "journals", f"d0\n{serving.numerics}")
            for request in requests:
                assert journal.get(keyed(request).key) == encode_answer(
                    simulated_answer(request, 300)
                )
            journal.close()

    asyncio.run(scenario())


def test_sigterm_ends_it_and_keeps_what_is_not_committed(tmp_path):
    async def scenario():
        async with Coordinator() as coordinator:
            process = await coordinator.worker("--keep", str(tmp_path / "journals"))
            connection = await coordinator.connection()
            await connection.serve(tmp_path)
            connection.send(ask(generation(1), generation(2, 9000)))
            await answers_of(connection, 1)
            connection.cut()
            process.send_signal(signal.SIGTERM)
            assert await end_of(process) == (0, "")
            journal = Journal(tmp_path / "journals", "d0\nsimulated exact")
            assert len(journal) == 1
            journal.close()

    asyncio.run(scenario())


def test_it_ends_with_its_parent(tmp_path):
    starter = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )

    async def scenario():
        async with Coordinator() as coordinator:
            spec = json.dumps({"kind": "simulated", "options": FAST})
            command = (
                "-m",
                "holdfast.evaluate.engines.worker",
                "--name",
                "0/0",
                "--node",
                "0",
                "--spec",
                spec,
            )
            parent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", starter, sys.executable, *command),
                env={
                    **os.environ,
                    messages.ENV_ADDRESS: f"127.0.0.1:{coordinator.port}",
                    messages.ENV_TOKEN: "secret",
                },
                stdout=asyncio.subprocess.PIPE,
            )
            connection = await coordinator.connection()
            await connection.serve(tmp_path)
            parent.kill()
            await parent.wait()
            with pytest.raises(EOFError):
                await connection.expect(messages.Done)

    asyncio.run(scenario())


def test_kill_9_leaves_the_line_closed_and_a_new_worker_takes_the_place(tmp_path):
    async def scenario():
        async with Coordinator() as coordinator:
            process = await coordinator.worker()
            connection = await coordinator.connection()
            await connection.serve(tmp_path)
            connection.send(ask(generation(1, 9000)))
            process.kill()
            with pytest.raises(EOFError):
                await connection.expect(messages.Done)
            await coordinator.worker()
            again = await coordinator.connection()
            assert (again.hello.name, again.hello.model) == ("0/0", -1)
            await again.serve(tmp_path)
            again.send(ask(generation(1)))
            found, number = await answers_of(again, 1)
            assert (found, number) == (expected(generation(1)), 1)

    asyncio.run(scenario())


def test_an_engine_that_hangs_is_not_alive(tmp_path):
    async def scenario():
        async with Coordinator() as coordinator:
            await coordinator.worker("--hang-after", "0.6", hang_after=1)
            connection = await coordinator.connection()
            await connection.serve(tmp_path)
            for _ in range(3):  # idle, it lives
                assert isinstance(
                    await asyncio.wait_for(messages.read(connection.reader), PATIENCE_S),
                    messages.Alive,
                )
            connection.send(ask(generation(1), generation(2)))
            with pytest.raises(TimeoutError):
                await connection.end_of_life()

    asyncio.run(scenario())


def test_what_cannot_be_served_is_said_with_whether_a_new_process_may(tmp_path):
    async def scenario():
        async with Coordinator() as coordinator:
            await coordinator.worker(refuse_swap=True)
            connection = await coordinator.connection()
            await connection.serve(tmp_path)
            connection.send(messages.Serve(model=1, folder=str(tmp_path), digest="d1"))
            failed = await connection.expect(messages.ServeFailed)
            assert (failed.model, failed.restart) == (1, True)
            await coordinator.worker(kind="nothing")
            connection = await coordinator.connection()
            connection.send(messages.Serve(model=0, folder=str(tmp_path), digest="d0"))
            failed = await connection.expect(messages.ServeFailed)
            assert (failed.model, failed.restart) == (0, False)
            assert "no engine kind 'nothing'" in failed.why

    asyncio.run(scenario())


def test_what_is_no_request_is_an_error_of_its_own(tmp_path):
    async def scenario():
        async with Coordinator() as coordinator:
            await coordinator.worker()
            connection = await coordinator.connection()
            await connection.serve(tmp_path)
            good = generation(1)
            connection.send(
                messages.AnswerRequests(
                    model=0, requests=[(b"bad", b"\xff"), (keyed(good).key, keyed(good).body)]
                )
            )
            said = {}
            while len(said) < 2:
                said |= {one.key: one for one in (await connection.expect(messages.Done)).done}
            assert "not a request" in said[b"bad"].error
            assert decode_answer(said[keyed(good).key].body) == simulated_answer(good, 3)

    asyncio.run(scenario())


def test_a_stranger_is_told_to_end(tmp_path):
    async def scenario():
        async with Coordinator() as coordinator:
            process = await coordinator.worker()
            connection = await asyncio.wait_for(coordinator._connections.get(), PATIENCE_S)
            await messages.read(connection.reader)
            connection.send(messages.Refused(why="The token is not this evaluation's."))
            code, said = await end_of(process)
            assert code == 1
            assert "token" in said

    asyncio.run(scenario())


def test_a_model_is_loaded_answers_and_is_swapped_through_the_line(models):
    async def scenario():
        async with Coordinator() as coordinator:
            process = await coordinator.worker(
                "--linger", "5", spec={"kind": "hf", "device": "cpu", "threads": 1}
            )
            connection = await coordinator.connection()
            loaded = await connection.serve(models["llama"])
            assert loaded.numerics.startswith("hf exact float32")
            assert (loaded.max_length, loaded.curve.max_batch, len(loaded.canary)) == (96, 1, 8)
            sampling = Sampling(max_new_tokens=5)
            good = [
                Request(kind="generate", prompt=pack_tokens([5, one]), sampling=sampling)
                for one in range(3)
            ]
            bad = Request(
                kind="loglikelihood", prompt=pack_tokens([5, 10**6]), continuation=pack_tokens([5])
            )
            connection.send(ask(good[0], bad, *good[1:]))
            said = {}
            while len(said) < 4:
                said |= {one.key: one for one in (await connection.expect(messages.Done)).done}
            assert "IndexError" in said[keyed(bad).key].error
            assert all(decode_answer(said[keyed(one).key].body).new_tokens for one in good)
            swapped = await connection.serve(models["llama-2"], model=1, digest="d1")
            assert swapped.how == "swap"
            assert swapped.canary != loaded.canary
            connection.send(messages.Serve(model=2, folder=str(models["gpt2"]), digest="d2"))
            failed = await connection.expect(messages.ServeFailed)
            assert failed.restart
            assert "running model" in failed.why
            connection.send(messages.Stop())
            assert (await end_of(process))[0] == 0

    asyncio.run(scenario())


def test_a_pulse_knows_a_long_load_from_a_hang():
    clock = FakeClock()
    pulse = Pulse(10.0, clock)
    clock.advance(9.0)
    assert pulse.beats()
    clock.advance(2.0)
    assert not pulse.beats()
    with pulse.held(100.0):
        clock.advance(90.0)
        assert pulse.beats()
        clock.advance(20.0)
        assert not pulse.beats()
    assert pulse.beats()
    clock.advance(11.0)
    assert not pulse.beats()


def test_an_answer_that_nobody_could_read_again_is_an_error_of_its_request():
    text = Answer(text=[{"type": "text", "text": "a"}])  # what a server sent, taken as it was
    body, new_tokens, error = _encoded(Finished(id=0, answer=text, started_s=0, finished_s=1))
    assert (body, new_tokens) == (b"", 0)
    assert "cannot be stored" in error
    good = Finished(id=0, answer=Answer(text="a", new_tokens=3), started_s=0, finished_s=1)
    assert _encoded(good) == (encode_answer(good.answer), 3, "")
