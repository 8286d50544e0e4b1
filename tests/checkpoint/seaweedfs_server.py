"""Run SeaweedFS, an S3 server of production clusters, with its own limits and signatures."""

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
    """Start a server with data in `folder`, key `key` and secret `secret`; yield its URL."""
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
            server.kill()  # a request to end takes time
            server.wait()
            for port in ports:
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink()
    raise AssertionError(f"SeaweedFS does not start: {(folder / 'log').read_text()[-2000:]}")


def command(folder, ports):
    """Return the server's command line, with every outgoing connection disabled."""
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
    """Return ports that are free now; another process may take one, so a start may be repeated."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def answers(url):
    """Return True if the server answers; a request without a signature is enough."""
    try:
        urllib.request.urlopen(url, timeout=1).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
