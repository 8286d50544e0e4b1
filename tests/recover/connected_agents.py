"""Agents that are connections of a test, and the supervisor's side of their nodes."""

import asyncio

from holdfast.core.clock import SystemClock
from holdfast.recover.agent.rendezvous import loopback_listener
from holdfast.recover.agent.stream import Stream, proof
from holdfast.recover.channel import Peer
from holdfast.recover.nodes import Nodes

TOKEN = "token"
SHIM = Peer(role="shim", attempt=1, rank=0, local_rank=0, world_size=1, pid=11)


class Listener:
    def __init__(self):
        self.heard, self.ends, self.lost, self.stops = [], [], [], []

    def received(self, peer, message, at_monotonic_s, *, again):
        self.heard.append((message["kind"], again))

    def states(self, states):
        pass

    def launcher_ended(self, returncode):
        self.ends.append(returncode)

    def node_lost(self, node):
        self.lost.append(node.name)

    def request_stop(self, by, where, count):
        self.stops.append((by, count))


class Agent:
    """An agent, as far as the supervisor sees one."""

    def __init__(self, port, name, incarnation="1"):
        self.port, self.name, self.incarnation = port, name, incarnation
        self.launched = self.last_end = None
        self.orders_seen = self.generation = 0
        self.streams = []

    async def connect(self, token=TOKEN):
        self.stream = await Stream.connect("127.0.0.1", self.port)
        self.streams.append(self.stream)
        challenge = await self.stream.receive()
        hello = {
            "nonce": "n",
            "proof": proof(token, "agent", challenge["nonce"]),
            "node_id": self.name,
            "name": self.name,
            "incarnation": self.incarnation,
            "preferred_rank": None,
            "launched": self.launched,
            "last_end": self.last_end,
            "generation": self.generation,
            "orders_seen": self.orders_seen,
        }
        self.stream.send({"kind": "hello", **hello})
        welcome = await self.stream.receive()
        if welcome["kind"] == "welcome":
            self.generation = welcome["generation"]
            self.stream.send({"kind": "states", "states": {}})
        return welcome

    async def order(self):
        while True:
            message = await self.stream.receive()
            if message.get("seq", 0) > self.orders_seen and message["kind"] != "ack":
                self.orders_seen = message["seq"]
                return message

    def forward(self, seq, message, peer=SHIM):
        self.stream.send(
            {
                "kind": "peer",
                "seq": seq,
                "peer": vars(peer),
                "age_s": 0.0,
                "message": message,
                "again": False,
            }
        )


def with_nodes(scenario, *, adopting=None, own_node=""):
    async def run():
        listener, listening = Listener(), loopback_listener()
        port = listening.getsockname()[1]
        nodes = Nodes(
            listener, SystemClock(), run_id="r", token=TOKEN, generation=3, own_node=own_node
        )
        await nodes.start(listening, adopting=adopting)
        agents = []

        def agent(*args):
            agents.append(Agent(port, *args))
            return agents[-1]

        try:
            await scenario(nodes, listener, agent)
        finally:
            for stream in (stream for one in agents for stream in one.streams):
                stream.close()
                await stream.drained()
            await nodes.close(None)
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 30))


async def until(holds):
    while not holds():
        await asyncio.sleep(0.005)


async def launched(nodes, *agents):
    """Launch attempt 1 on all of the agents."""
    for agent in agents:
        await agent.connect()
    chosen = list(nodes._nodes.values())
    nodes.launch(1, chosen, 1, {})
    for agent in agents:
        order = await agent.order()
        assert (order["kind"], order["attempt"]) == ("launch", 1)
        agent.launched = 1
