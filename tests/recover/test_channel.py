"""The control channel over real sockets, spoken to by friends and strangers."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from holdfast.core.channel import frame
from holdfast.core.errors import ChannelError
from holdfast.core.link import ENV_CONNECT
from holdfast.recover.agent.rendezvous import loopback_listener
from holdfast.recover.channel import (
    ENV_ADDRESS,
    ENV_TOKEN,
    MAX_MESSAGE_BYTES,
    ChannelClient,
    ChannelServer,
    Peer,
    decode,
    encode,
)

RANK = Peer(role="rank", attempt=1, rank=0, local_rank=0, world_size=1, pid=1)


class Server(ChannelServer):
    """A server at an address of its own."""

    def __init__(self, on_message):
        self.token, self.listening = "a-token", loopback_listener()
        super().__init__(on_message, token=self.token)

    async def start(self):
        await super().start(self.listening)

    @property
    def address(self):
        return "{}:{}".format(*self.listening.getsockname())


def with_server(scenario, timeout_s=240):
    """Run `scenario(server, heard)` beside a listening server; return the received messages."""
    heard = []

    async def run():
        server = Server(lambda peer, message: heard.append((peer, message)))
        await server.start()
        try:
            await scenario(server, heard)
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(run(), timeout_s))
    return heard


async def heard_kinds(heard, count):
    while len(heard) < count:
        await asyncio.sleep(0.005)
    return [message["kind"] for _, message in heard]


def connect(server, token=None, peer=RANK):
    return asyncio.to_thread(
        ChannelClient, server.address, token or server.token, peer, timeout_s=120
    )


def test_messages_pass_both_ways_and_the_end_is_told():
    async def scenario(server, heard):
        client = await connect(server)
        client.send({"kind": "step", "step": 1})
        await heard_kinds(heard, 2)
        server.send({"kind": "propose", "proposal": 1, "step": 5}, to="rank")
        assert await asyncio.to_thread(client.receive) == {
            "kind": "propose",
            "proposal": 1,
            "step": 5,
        }
        client.close()
        assert await heard_kinds(heard, 3) == ["hello", "step", "gone"]

    with_server(scenario)


def test_a_wrong_token_and_a_second_rank_of_the_same_number_are_turned_away():
    async def scenario(server, heard):
        with pytest.raises(ChannelError, match="refused"):
            await connect(server, token="wrong")
        client = await connect(server)
        with pytest.raises(ChannelError, match="already connected"):
            await connect(server)
        client.close()
        await heard_kinds(heard, 2)

    assert [message["kind"] for _, message in with_server(scenario)] == ["hello", "gone"]


@pytest.mark.parametrize("holder", ["attached", "watched"])
def test_a_rank_that_attached_or_reports_steps_keeps_its_place(holder):
    async def scenario(server, heard):
        client = await connect(server, peer=replace(RANK, is_attached=holder == "attached"))
        client.send({"kind": "watch"})
        await heard_kinds(heard, 2)
        with pytest.raises(ChannelError, match="already connected"):
            await connect(server, peer=replace(RANK, pid=2, is_attached=True))
        client.close()
        await heard_kinds(heard, 3)

    with_server(scenario)


EVALUATION = """
import sys, time
from holdfast.core.link import Unsupervised, connected_link, job_link
assert not isinstance(connected_link(), Unsupervised)
print("connected", flush=True)
sys.stdin.readline()
while not isinstance(job_link(), Unsupervised):
    time.sleep(0.01)
job_link().emit("note", {})
assert isinstance(connected_link(), Unsupervised)
"""
TRAINING = """
import subprocess, sys
import holdfast
command = [sys.executable, "-c", sys.argv[1]]
evaluation = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert evaluation.stdout.readline() == "connected\\n"
run = holdfast.attach()
run.step(1)
evaluation.communicate("go on\\n", timeout=50)
assert evaluation.returncode == 0
"""


def test_a_rank_that_attaches_takes_its_place_from_a_program_that_it_started_before():
    """The program makes a Checkpointer, which connects by itself, and goes on without messages."""

    async def scenario(server, heard):
        environment = {
            **os.environ,
            ENV_ADDRESS: server.address,
            ENV_TOKEN: server.token,
            ENV_CONNECT: "holdfast.recover.attach:connect_quietly",
        }
        command = [sys.executable, "-c", TRAINING, EVALUATION]
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert (done.returncode, done.stderr) == (0, "")
        await heard_kinds(heard, 5)

    heard = with_server(scenario, timeout_s=240)
    assert [(peer.is_attached, message["kind"]) for peer, message in heard] == [
        (False, "hello"),
        (True, "hello"),
        (True, "watch"),
        (True, "step"),
        (True, "gone"),
    ]


def test_nobody_listening_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ChannelError, match="No agent answers"):
            ChannelClient(f"127.0.0.1:{taken.getsockname()[1]}", "token", RANK)


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04\x95 pickle",
        b'{"kind": "hello", "token": "TOKEN"}\n',
        b"x" * (2 * MAX_MESSAGE_BYTES),
        (1 << 31).to_bytes(4, "little"),
        b"\x10\0\0\0{",
    ],
)
def test_strangers_are_hung_up_on_and_nothing_is_heard_of_them(first):
    assert heard_of_a_stranger(lambda token: first.replace(b"TOKEN", token)) == []


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kind": "step"}',
        b'{"kind": "hello"}',
        b'{"kind": "hello", "token": "TOKEN", "role": "rank"}',
        b'{"kind":"hello","token":"TOKEN","role":"rank","attempt":1,"rank":"x","local_rank":0,"world_size":1,"pid":1}',
        b'{"kind":"hello","token":"token","role":"rank","attempt":1,"rank":0,"local_rank":0,"world_size":1,"pid":1}',
    ],
)
def test_who_says_hello_without_token_or_place_is_hung_up_on(hello):
    assert heard_of_a_stranger(lambda token: frame(hello.replace(b"TOKEN", token), 1000)) == []


def test_a_hello_with_token_and_place_is_heard():
    hello = b'{"kind":"hello","token":"TOKEN","role":"rank","attempt":1,"rank":0,"local_rank":0,"world_size":1,"pid":1}'
    assert heard_of_a_stranger(
        lambda token: frame(hello.replace(b"TOKEN", token), 1000),
        answer=encode({"kind": "welcome"}),
    )


def heard_of_a_stranger(first, answer=b""):
    """Send only `first(token)`, and expect the answer `answer`; return the received messages."""

    async def scenario(server, heard):
        host, port = server.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(first(server.token.encode()))
        writer.write_eof()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == answer
        writer.close()

    return with_server(scenario)


def test_an_admitted_rank_that_sends_rubbish_is_hung_up_on_and_then_cut_off():
    async def scenario(server, heard):
        for rubbish in (
            frame(b"x" * (MAX_MESSAGE_BYTES + 1), 2 * MAX_MESSAGE_BYTES),
            frame(b"not json", 100),
            encode({"kind": "hello"}),
        ):
            client = await connect(server)
            client._socket.sendall(rubbish)
            last = await asyncio.to_thread(client.receive)
            client.close()
        assert last == {"kind": "displaced"}, "its training goes on"
        await heard_kinds(heard, 7)
        with pytest.raises(ChannelError, match="refused"):
            await connect(server)
        other = await connect(server, peer=replace(RANK, pid=2))
        other.close()

    heard = with_server(scenario)
    kinds = [message["kind"] for _, message in heard]
    assert kinds[:7] == ["hello", "gone", "hello", "gone", "hello", "cut_off", "gone"]
    assert heard[5] == (RANK, {"kind": "cut_off", "why": "it sends invalid data"})
    assert "hello" in kinds[7:], "the rank's next process is another one"


def test_a_process_of_another_rank_is_not_admitted_and_named():
    async def scenario(server, heard):
        server._suspect = lambda peer: "process 1 of rank 3 reports as this rank"
        with pytest.raises(ChannelError, match="refused"):
            await connect(server)
        assert await heard_kinds(heard, 1) == ["cut_off"], "it is named once"
        server._suspect = lambda peer: ""
        client = await connect(server, peer=replace(RANK, pid=2))
        client.close()

    with_server(scenario)


def test_encode_bounds_a_message_and_decode_takes_objects_only():
    with pytest.raises(ChannelError, match="at most"):
        encode({"kind": "event", "data": "x" * MAX_MESSAGE_BYTES})
    encoded = encode({"kind": "a", "n": 1})
    assert frame(b'{"kind":"a","n":1}', 100) == encoded
    assert decode(encoded[4:]) == {"kind": "a", "n": 1}
    for body in (
        b"",
        b"1",
        b'"kind"',
        b'{"kind": 1}',
        json.dumps({"no": "kind"}).encode(),
        b"\xff\xfe",
    ):
        assert decode(body) is None


def test_a_rank_repeats_to_the_next_agent_what_that_must_know():
    """The socket stays open while no agent serves it; messages wait meanwhile."""
    heard = []
    listening = loopback_listener()
    address = "{}:{}".format(*listening.getsockname())

    async def serve(until):
        def note(_peer, message):
            if message["kind"] != "gone":
                heard.append(message)

        server = ChannelServer(note, token="t")
        await server.start(listening.dup())
        while not until():
            await asyncio.sleep(0.005)
        await server.close()

    def run(until):
        asyncio.run(asyncio.wait_for(serve(until), 30))

    serving = threading.Thread(target=run, args=(lambda: len(heard) == 1,))
    serving.start()
    client = ChannelClient(address, "t", RANK)
    serving.join()
    assert client.receive() is None
    connecting = threading.Thread(target=client.reconnect, args=(lambda: [{"kind": "watch"}],))
    connecting.start()
    serving = threading.Thread(target=run, args=(lambda: len(heard) == 4,))
    serving.start()
    connecting.join()
    client.send({"kind": "step", "step": 1})
    serving.join()
    assert [message["kind"] for message in heard[:4]] == ["hello", "hello", "watch", "step"]
    assert (heard[0]["again"], heard[1]["again"]) == (False, True)
    client.close()
    listening.close()


def test_without_a_node_there_is_no_other_agent():
    listening = loopback_listener()

    async def once():
        server = ChannelServer(lambda _peer, _message: None, token="t")
        await server.start(listening)
        address = "{}:{}".format(*listening.getsockname())
        client = await asyncio.to_thread(ChannelClient, address, "t", RANK)
        await server.close()
        return client

    client = asyncio.run(once())
    assert client.receive() is None
    assert not client.reconnect(list)
    assert not client.wait_until_connected()
    with pytest.raises(OSError, match="ended"):
        client.send({"kind": "step", "step": 1})
