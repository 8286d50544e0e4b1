"""Network failures: InfiniBand, interfaces, name resolution, refused or closed connections."""

# ruff: noqa: E501  (lines of logs stand as they are printed)

from failure_lab.program import Program
from failure_lab.programs.hardware import hardware

_NETWORK = (
    hardware(
        id="network-ib-retry-exceeded",
        reason="NetworkError",
        cause="InfiniBand retries towards one peer were exceeded (status 12, vendor error 129).",
        root=r"Got completion from peer",
        accept_reasons=("NCCLRemoteError",),
        dialect="megatron",
        prints="""\
worker-1:3468:3905 [1] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.41.7.36<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv) localGid fd00:1148:9000:5000:4:200:3:ff22 remoteGidsfd00:1148:9000:5000:4:200:3:ff1f
worker-1:3468:3905 [1] NCCL INFO transport/net.cc:1302 -> 6
worker-1:3468:3905 [1] NCCL INFO proxy.cc:698 -> 6
""",
    ),
    hardware(
        id="network-ib-port-down",
        reason="NetworkError",
        cause="The port of an InfiniBand card went down.",
        root=r"Link down|port error",
        dialect="titan",
        prefix="[rank${rank}]:",
        prints="""\
[299120.118827] mlx5_core 0000:9f:00.0 ibs12: Link down
h100-22:51201:52910 [1] misc/ibvwrap.cc:203 NCCL WARN NET/IB : mlx5_3:1 Got async event : port error
""",
    ),
    Program(
        id="network-unreachable",
        reason="NetworkError",
        cause="No route leads to the tracking server.",
        root=r"Network is unreachable|No route to host",
        accept_reasons=("ConnectionError", "OSError"),
        restart_helps=True,
        dialect="lightning",
        name="fit.py",
        files={
            "tracking.py": """\
import socket


class Tracker:
    def __init__(self, host, port):
        self.address = (host, port)

    def send(self, record):
        with socket.create_connection(self.address, timeout=5) as connection:
            connection.sendall(record)
"""
        },
        script="""
        from tracking import Tracker

        tracker = Tracker("2001:db8:41::7", 8125)
        for step in training(6):
            if step % 5 == 0:
                tracker.send(f"train.step:{step}|g".encode())
        """,
    ),
    Program(
        id="network-name-resolution",
        reason="NetworkError",
        cause="The name of the rendezvous host cannot be resolved.",
        root=r"name resolution|Name or service not known|No address associated",
        accept_reasons=("ConnectionError",),
        restart_helps=True,
        launcher="python",
        environment={"MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"},
        name="launch_worker.py",
        dialect=None,
        script="""
        import logging
        import os
        import socket

        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
        log = logging.getLogger("launcher")


        def master_address(host):
            log.info("resolving %s", host)
            return socket.getaddrinfo(host, int(os.environ["MASTER_PORT"]), type=socket.SOCK_STREAM)[0][4]


        log.info("worker %s of %s starts", os.environ["RANK"], os.environ["WORLD_SIZE"])
        import torch.distributed as dist

        host, port = master_address("llm-train-master-0.llm-train.svc.invalid")
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}")
        """,
    ),
)

_CONNECTION = (
    Program(
        id="connection-store-refused",
        reason="ConnectionError",
        cause="Nobody listens on the master's port, so the store cannot be joined.",
        root=r"client socket has timed out after|client failed to connect",
        accept_reasons=("NetworkError",),
        restart_helps=True,
        launcher="python",
        environment={
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
            "RANK": "1",
            "WORLD_SIZE": "2",
        },
        script="""
        dist.init_process_group("gloo", timeout=timedelta(seconds=4))
        """,
    ),
    Program(
        id="connection-tracking-refused",
        reason="ConnectionError",
        cause="The experiment tracker's server refuses connections.",
        root=r"ConnectionRefusedError: |NewConnectionError|requests\.exceptions\.ConnectionError",
        restart_helps=True,
        faulty={"rank": 0},
        ranks=2,
        dialect="hf",
        name="finetune.py",
        script="""
        import requests


        def track(step):
            answer = requests.post("http://127.0.0.1:9/api/2.0/mlflow/runs/log-metric", json={"step": step}, timeout=3)
            answer.raise_for_status()


        for step in training(10):
            if step == 5 and RANK == 0:
                track(step)
        """,
    ),
    Program(
        id="connection-closed-by-server",
        reason="ConnectionError",
        cause="The feature server closes the connection without an answer.",
        root=r"RemoteDisconnected: ",
        restart_helps=True,
        dialect="deepspeed",
        name="train_rm.py",
        script="""
        import http.client
        import socket
        import threading

        listener = socket.create_server(("127.0.0.1", 0))


        def hang_up():
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.close()


        threading.Thread(target=hang_up, daemon=True).start()
        for step in training(5):
            if step == 3:
                reward = http.client.HTTPConnection("127.0.0.1", listener.getsockname()[1], timeout=5)
                reward.request("POST", "/v1/score", body=b"{}")
                reward.getresponse()
        """,
    ),
    Program(
        id="connection-redis-refused",
        reason="ConnectionError",
        cause="The queue of samples refuses the connection.",
        root=r"ConnectionRefusedError",
        restart_helps=True,
        ranks=2,
        dialect="megatron",
        prefix="[default${local_rank}]:",
        name="train_online.py",
        files={
            "sample_queue.py": """\
import socket


class SampleQueue:
    def __init__(self, port):
        self._connection = socket.create_connection(('127.0.0.1', port), timeout=4)

    def pop(self):
        self._connection.sendall(b'BLPOP samples 5\\r\\n')
        return self._connection.recv(65536)
"""
        },
        script="""
        from sample_queue import SampleQueue

        for step in training(4):
            if step == 2:
                queue = SampleQueue(6399)
                queue.pop()
        """,
    ),
)

PROGRAMS = (*_NETWORK, *_CONNECTION)
