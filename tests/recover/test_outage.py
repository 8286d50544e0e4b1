"""An outage is probed: a restart waits while it lasts, and begins when it is over."""

import asyncio
import os
import socket
from pathlib import Path

import pytest
from test_policy import LIMITS, crash, play

from holdfast.recover import policy
from holdfast.recover.outage import MAX_PROBED, Outage, Service, Storage, named_in


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "HTTPSConnectionPool(host='hub.example', port=443): Max retries exceeded with url: /a",
            [Service("hub.example", 443)],
        ),
        (
            'botocore: Could not connect to "http://s3.example:9000/b"',
            [Service("s3.example", 9000)],
        ),
        ("503 Server Error for url: https://hub.example/models", [Service("hub.example", 443)]),
        ("redis://[fd00::1]:7000/0 and https://[broken", [Service("fd00::1", 7000)]),
        ("OSError: [Errno 116] Stale file handle: '/mnt/c/step-7'", [Storage(Path("/mnt/c"))]),
        ("https://h.example https://h.example:443", [Service("h.example", 443)]),
        ("connect to tcp://10.0.0.1:29500 timed out; train.py:45; [10.0.0.2]:4711", []),
        ("https://h.example:99999999/", []),
        (f"HTTPConnectionPool(host='h.example', port={'9' * 5000})", []),
        ("http://localhost:8000 redis://127.0.0.1:1 http://[::1]:2 http://0.0.0.0:3", []),
    ],
)
def test_services_and_folders_are_read_from_lines(line, found):
    assert list(named_in([line])) == found


def test_a_service_of_the_job_itself_is_not_probed():
    """The service comes back only with the job."""
    lines = ["redis://node1:6379", "redis://10.0.0.7:6379", "redis://cache:6379"]
    assert named_in(lines, own={"node1", "10.0.0.7"}) == [Service("cache", 6379)]


def test_a_bounded_number_of_services_is_probed():
    assert len(named_in(f"https://h{number}.example" for number in range(100))) == MAX_PROBED


def test_a_service_behind_a_proxy_is_not_probed(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert named_in(["https://hub.example"]) == []
    assert named_in(["https://inside.example"]) == [Service("inside.example", 443)]


def test_a_service_that_listens_answers_and_one_that_is_gone_does_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        service = Service("127.0.0.1", server.getsockname()[1])
        assert asyncio.run(service.answers())
    assert not asyncio.run(service.answers())
    for host, port in (("no.such.host.invalid", 443), ("127.0.0.1", 99999), ("a\0b", 443)):
        assert not asyncio.run(Service(host, port).answers())


STAT = """#!/bin/sh
test -e {answers} && exit 0
{fails}
"""


GONE = "echo \"stat: cannot read '/mnt/c': Stale file handle\" >&2; exit 1"


@pytest.mark.parametrize("fails", ["exec sleep 1000", GONE])
def test_a_storage_that_hangs_or_is_stale_does_not_answer(tmp_path, monkeypatch, fails):
    assert asyncio.run(Storage(tmp_path).answers())
    assert asyncio.run(Storage(tmp_path / "missing").answers()), "the file system is there"
    monkeypatch.setattr("holdfast.recover.outage.PROBE_TIMEOUT_S", 0.2)
    program, answers = tmp_path / "stat", tmp_path / "answers"
    program.write_text(STAT.format(answers=answers, fails=fails))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert not asyncio.run(Storage(Path("/mnt/c")).answers())


STALE = """
import errno, os
import holdfast

run = holdfast.attach()
if os.environ["HOLDFAST_ATTEMPT"] == "1":
    run.step(1, loss=1.0)
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/mnt/c/step-1")
run.step(2, loss=1.0)
"""


def test_a_run_goes_on_once_the_storage_is_back(place, tmp_path):
    program, answers = tmp_path / "bin" / "stat", tmp_path / "answers"
    program.parent.mkdir()
    program.write_text(STAT.format(answers=answers, fails=GONE))
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{place.environment['PATH']}"
    job = place.ranks(1, place.job(STALE))
    environment = {**place.environment, "PATH": path}
    with place.start("run", "--name", "r", "--", *job, environment=environment) as process:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "does not answer" in line:
                break
        answers.touch()
        _, rest = process.communicate(timeout=240)
    text = "".join([*seen, rest])
    assert process.returncode == 0, text
    assert "/mnt/c answers again: restarting." in text
    with place.ledger() as ledger:
        (incident,) = ledger.incidents("r")
    assert "/mnt/c answered again after" in incident.explanation


class World:
    def __init__(self):
        self.events, self.seen, self.notes = [], [], []
        self.waits = True
        self.outage = Outage(self.decide, lambda _, data: self.seen.append(data["text"]), self.note)

    def decide(self, event):
        self.events.append(event)
        self.then(event)

    def then(self, event):
        pass

    def note(self, sentences):
        self.notes += sentences


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr("holdfast.recover.outage.PROBE_EVERY_S", 0.01)
    return World()


def test_the_restart_is_put_off_until_the_service_answers(world):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    servers = []

    def then(_event):
        if len(world.events) == 3:
            servers.append(socket.create_server(("127.0.0.1", port)))

    world.then = then
    asyncio.run(world.outage.probe([Service("127.0.0.1", port)], lambda: world.waits))
    servers[0].close()
    assert world.events == [policy.OutageLasts()] * 3 + [policy.OutageOver()]
    assert world.seen == [
        f"127.0.0.1:{port} does not answer; the restart waits for it.",
        f"127.0.0.1:{port} answers again: restarting.",
    ]
    assert len(world.notes) == 1


def test_a_service_that_answers_from_the_start_changes_nothing(world):
    with socket.create_server(("127.0.0.1", 0)) as server:
        service = Service("127.0.0.1", server.getsockname()[1])
        looks = iter([True] * 6)
        asyncio.run(world.outage.probe([service], lambda: next(looks, False)))
    assert world.events == []


def test_the_probes_end_with_the_wait(world):
    def then(_event):
        world.waits = False

    world.then = then
    asyncio.run(world.outage.probe([Service("127.0.0.1", 1)], lambda: world.waits))
    assert world.events == [policy.OutageLasts()]
    asyncio.run(world.outage.probe([], lambda: True))


def test_a_lasting_outage_puts_off_the_restart_up_to_a_limit():
    waiting, _ = play([(0, policy.Begin()), *crash(5, outside=True)])
    assert waiting.deadline_s == 5 + LIMITS.outside_wait_s
    put_off, actions = play([(30, policy.OutageLasts()), (36, policy.Tick())], waiting)
    assert (put_off.phase, actions) == (policy.Phase.WAITING, [])
    for at_s in range(40, 3000, 5):
        put_off, _ = play([(at_s, policy.OutageLasts()), (at_s, policy.Tick())], put_off)
        assert (put_off.phase is policy.Phase.WAITING) == (at_s < 5 + LIMITS.outage_max_s)


def test_the_end_of_an_outage_begins_the_restart():
    waiting, _ = play([(0, policy.Begin()), *crash(5, outside=True)])
    state, actions = play([(8, policy.OutageLasts()), (9, policy.OutageOver())], waiting)
    assert (state.phase, [type(one) for one in actions]) == (policy.Phase.RUNNING, [policy.Launch])


def test_another_wait_is_not_changed_by_probes():
    """The probes of an earlier failure may report late."""
    waiting, _ = play(
        [(0, policy.Begin()), *crash(5, outside=True), (6, policy.OutageOver()), *crash(7, "b")]
    )
    assert waiting.phase is policy.Phase.WAITING
    for event in (policy.OutageLasts(), policy.OutageOver()):
        assert play([(8, event)], waiting) == (waiting, [])
