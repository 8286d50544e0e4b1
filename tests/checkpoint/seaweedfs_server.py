"""SeaweedFS as a process: an S3 server that clusters use, with its own limits, signatures and conditions."""

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from waiting import until

WEED = Path(sys.executable).with_name("weed")
PORTS = ("s3.port", "s3.port.grpc", "filer.port", "filer.port.grpc", "volume.port", "volume.port.grpc",
         "master.port", "master.port.grpc")  # fmt: skip
STARTS = 3


@contextmanager
def serve(folder):
    """Keeps all it holds in `folder`, and knows the key `key` with the secret `secret`; gives its URL."""
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": "key", "secretKey": "secret"}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    for _ in range(STARTS):
        ports = free_ports(len(PORTS))
        url = f"http://127.0.0.1:{ports[0]}"
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command(folder, ports), stdout=log, stderr=log)
        try:
            until(lambda server=server, url=url: answers(url) or server.poll() is not None)
            if server.poll() is None:
                yield url
                return
        finally:
            server.kill()  # asked to end, it takes its time
            server.wait()
            for port in ports:
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink()
    raise AssertionError(f"SeaweedFS does not start: {(folder / 'log').read_text()[-2000:]}")


def command(folder, ports):
    """How it is started: with nothing that talks to the network."""
    return [
        WEED,
        "-logtostderr",
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=0",
        "-volume.minFreeSpace=0",
        "-s3",
        f"-s3.config={folder}/s3.json",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *(f"-{name}={port}" for name, port in zip(PORTS, ports, strict=True)),
    ]


def free_ports(count):
    """Of this moment: somebody else may take one, hence more than one start."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def answers(url):
    """Also who asks without a signature gets an answer."""
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
