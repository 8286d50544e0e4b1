"""Serve Prometheus' HTTP API, with faults on request."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

START = 1_688_169_600.0


class Server:
    """Serves `gpus` series of DCGM_FI_DEV_GPU_UTIL, value = (second / 15 + gpu) mod 101, with
    faults on request.
    """

    def __init__(self, gpus: int = 3) -> None:
        self.gpus = gpus
        self.asked: list[tuple[float, float, str]] = []
        self.headers: list[str] = []
        self.faults: list[str] = []
        self.only = ""
        """If not empty: the name of the only metric, DCGM's."""
        self.labels: dict[str, str] = {}
        self.value = lambda at_s, gpu: str((int(at_s) // 15 + gpu) % 101)

    def answer(self, path: str, query: dict[str, str]) -> object:
        if path == "/api/v1/query":
            gpus = self.gpus if self.only in query["query"] else 0
            return {"result": [{"metric": {}, "value": [0, str(gpus)]}]}
        if path == "/api/v1/label/instance/values":
            return [f"host{index}:9400" for index in range(self.gpus)]
        start, end, step = (float(query[name]) for name in ("start", "end", "step"))
        points = int((end - start) / step + 1e-9) + 1
        if points > 11_000:
            raise ValueError("exceeded maximum resolution of 11,000 points per timeseries")
        self.asked.append((start, end, query["query"]))
        wanted = re.search(r'instance=~"([^"]*)"', query["query"])
        hosts = [
            host
            for host in range(self.gpus)
            if not wanted or re.fullmatch(wanted[1].replace("\\\\", "\\"), f"host{host}:9400")
        ]
        return {
            "resultType": "matrix",
            "result": [
                {
                    "metric": {
                        "instance": f"host{host}:9400",
                        "Hostname": f"host{host}",
                        "gpu": "0",
                        **self.labels,
                    },
                    "values": [
                        [start + step * i, self.value(start + step * i, host)]
                        for i in range(points)
                    ],
                }
                for host in hosts
            ],
        }


@contextmanager
def serving(server: Server) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(parse_qs(urlsplit(self.path).query))

        def do_POST(self) -> None:
            self._answer(parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()))

        def _answer(self, query: dict[str, list[str]]) -> None:
            server.headers.append(self.headers.get("Authorization", ""))
            fault = server.faults.pop(0) if server.faults else ""
            status, body = 200, b""
            if fault in ("500", "503", "429", "401", "422", "302"):
                status, body = (
                    int(fault),
                    json.dumps({"status": "error", "error": f"told to say {fault}"}).encode(),
                )
            else:
                try:
                    data = server.answer(
                        urlsplit(self.path).path, {name: one[0] for name, one in query.items()}
                    )
                    body = json.dumps({"status": "success", "data": data}).encode()
                except ValueError as error:
                    status, body = (
                        400,
                        json.dumps({"status": "error", "error": str(error)}).encode(),
                    )
            self.send_response(status)
            if fault == "302":
                self.send_header("Location", "http://elsewhere.invalid/")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(
                body[: len(body) // 2]
                if fault == "cut"
                else b"not json" + body[8:]
                if fault == "junk"
                else body
            )
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
