"""Check against a real Prometheus, a real node-exporter, and an exporter in dcgm-exporter's form."""

import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from holdfast.core.errors import BadUse
from holdfast.testing import FakeClock
from holdfast.trace.telemetry import attach, value_counts
from holdfast.trace.telemetry.prometheus import Span, fetch
from holdfast.trace.telemetry.prometheus_http import (
    AnswerTooLarge,
    Credentials,
    Prometheus,
    PrometheusError,
)
from holdfast.trace.trace import Trace, open_scratch

PROGRAMS = ("prometheus", "promtool", "prometheus-node-exporter")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, PROGRAMS)),
        reason="Debian's prometheus and prometheus-node-exporter are not installed",
    ),
]
DAY = Span.of("2023-07-01T00:00:00Z", "2023-07-01T23:59:55Z", step_s=5)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def running(*command: str, log: Path) -> Iterator[None]:
    """Run a program in the background; end it by its own process id."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
        assert process.poll() is None, log.read_text()[-2000:]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Exporter(BaseHTTPRequestHandler):
    """An exporter of two GPUs in dcgm-exporter's form."""

    def do_GET(self) -> None:
        labels = 'Hostname="dgx-7",modelName="NVIDIA A100-SXM4-80GB",exported_namespace="",exported_pod=""'
        body = "".join(
            f'DCGM_FI_DEV_GPU_UTIL{{gpu="{gpu}",{labels}}} {97 + gpu}\n'
            f'DCGM_FI_PROF_SM_ACTIVE{{gpu="{gpu}",{labels}}} 0.25\n'
            f'DCGM_FI_DEV_MEMORY_TEMP{{gpu="{gpu}",{labels}}} {44 if gpu else 9223372036854775794}\n'
            for gpu in (0, 1)
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def util(index: int, gpu: int) -> int:
    """Return the value of GPU `gpu` in the past day at its 5-second sample `index`."""
    return (index // 7 * (gpu + 1)) % 101


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a Prometheus that holds a day of 2023 and scrapes every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    past = folder / "past.txt"
    with past.open("w") as file:
        file.write("# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n")
        for index in range(17_280):
            file.writelines(
                f'DCGM_FI_DEV_GPU_UTIL{{instance="old:9400",Hostname="old",gpu="{gpu}"}} {util(index, gpu)} '
                f"{DAY.start_s + 5 * index:.0f}\n"
                for gpu in (0, 1)
            )
        file.write("# EOF\n")
    subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", "-q", str(past), str(folder / "data")],
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    port, node_port = free_port(), free_port()
    with ExitStack() as stack:
        gpu_port = stack.enter_context(answering(Exporter))
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            "scrape_configs:\n"
            f"- {{job_name: gpus, static_configs: [{{targets: ['127.0.0.1:{gpu_port}']}}]}}\n"
            f"- {{job_name: nodes, static_configs: [{{targets: ['127.0.0.1:{node_port}']}}]}}\n"
        )
        node_exporter = [
            "prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{node_port}",
            "--collector.disable-defaults", "--collector.cpu", "--collector.meminfo",
        ]  # fmt: skip
        stack.enter_context(running(*node_exporter, log=folder / "node.log"))
        command = [
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=100y",
        ]  # fmt: skip
        stack.enter_context(running(*command, log=folder / "prometheus.log"))
        url = f"http://127.0.0.1:{port}"
        wait_for(url, folder / "prometheus.log")
        yield url


def wait_for(url: str, log: Path) -> None:
    """Wait until Prometheus has scraped both exporters five times."""
    once = Prometheus(url, Credentials(), tries=1, timeout_s=5)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            scraped = "min(sum_over_time(up[1m])) > 4 and count(up) == 2"
            if once.number_at(scraped, time.time()):
                return
        except (PrometheusError, BadUse):
            pass
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


def in_the_file() -> dict[float, int]:
    values = [float(util(index, gpu)) for index in range(17_280) for gpu in (0, 1)]
    return {value: values.count(value) for value in set(values)}


def counts_in(folder: Path, metric: str) -> dict[float, int]:
    found = value_counts(folder, metric)
    return dict(zip(found.values.tolist(), found.weights.astype(int).tolist(), strict=True))


def test_a_day_of_5_s_samples_is_read_whole(server, tmp_path):
    one = Prometheus(server, Credentials(), tries=1)
    with pytest.raises(AnswerTooLarge):  # 17,280 points are more than one answer may have
        one.range("DCGM_FI_DEV_GPU_UTIL", start_s=DAY.start_s, end_s=DAY.end_s, step_s=DAY.step_s)
    store = fetch(one, tmp_path / "store", DAY, metrics=["GPU_UTIL"])
    assert counts_in(store.folder, "GPU_UTIL") == in_the_file()
    connection, scratch = open_scratch(memory_limit_mb=300)
    with Trace(connection, scratch, [], duration="run", has_jobs=False) as trace:
        attach(trace, store.folder, cluster="old")
        assert trace.notes == []
        devices = trace.aggregate("metric_devices")
        assert sorted(devices["device"].tolist()) == ["old-0", "old-1"]
        assert devices["n"].tolist() == [17_280, 17_280]
        hours = trace.aggregate("metric_hours")
        assert len(hours) == 24
        assert set(hours["n"].tolist()) == {2 * 720}
        series = trace.query(
            "SELECT s.value FROM samples s JOIN devices d USING (cluster, device) WHERE d.name = 'old-1' ORDER BY s.at"
        )
        assert series["value"].tolist() == [util(index, 1) for index in range(17_280)]


def test_through_a_proxy_that_fails_and_cuts(server, tmp_path):
    """The client retries after a 503.

    A connection that stays cut ends the run, and the next run continues.
    """
    faults = iter(["", "503", "cut", "", "", "", "", "503", "cut", "cut", "cut"])
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.pass_on(None)

        def do_POST(self) -> None:
            self.pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def pass_on(self, data: bytes | None) -> None:
            fault = next(faults, "")
            if fault == "503":
                self.send_error(503)
                return
            with urllib.request.urlopen(f"{server}{self.path}", data=data, timeout=240) as answer:
                body = answer.read()
            if "query_range" in self.path and not fault:
                asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 3] if fault == "cut" else body)
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    clock = FakeClock()
    with answering(Proxy) as port:

        def client() -> Prometheus:
            return Prometheus(
                f"http://127.0.0.1:{port}", Credentials(), pause=clock.advance, tries=4
            )

        with pytest.raises(PrometheusError, match="fetched data is kept"):
            fetch(client(), tmp_path / "store", DAY, metrics=["GPU_UTIL"])
        assert len(asked) == 1
        store = fetch(client(), tmp_path / "store", DAY, metrics=["GPU_UTIL"])
        assert len(asked) == 2
    assert counts_in(store.folder, "GPU_UTIL") == in_the_file()
    assert clock.monotonic_s() > 5


def test_what_is_scraped_now(server, tmp_path):
    now = int(time.time())
    span = Span(start_s=now - 4, end_s=now - 1, step_s=1)
    one = Prometheus(server, Credentials())
    store = fetch(one, tmp_path / "store", span)
    found = {metric.name for metric in store.metrics()}
    assert {
        "GPU_UTIL",
        "SM_ACTIVE",
        "MEMORY_TEMP",
        "NODE_CPU_UTILIZATION",
        "NODE_MEMORY_UTILIZATION",
    } == found
    utilisation, activity = (
        value_counts(store.folder, "GPU_UTIL"),
        value_counts(store.folder, "SM_ACTIVE"),
    )
    assert utilisation.values.tolist() == [97, 98]
    assert activity.values.tolist() == [25]
    assert utilisation.total >= 4
    assert value_counts(store.folder, "MEMORY_TEMP").values.tolist() == [44]
    total, available = (
        one.number_at(f"node_memory_{name}_bytes", span.end_s)
        for name in ("MemTotal", "MemAvailable")
    )
    memory = value_counts(store.folder, "NODE_MEMORY_UTILIZATION")
    assert memory.values[-1] == pytest.approx(100 * (1 - available / total), abs=10)
    assert 0 <= value_counts(store.folder, "NODE_CPU_UTILIZATION").values[0] <= 100
    connection, scratch = open_scratch(memory_limit_mb=300)
    with Trace(connection, scratch, [], duration="run", has_jobs=False) as trace:
        attach(trace, store.folder, cluster="mine")
        gpus = trace.query(
            "SELECT name, node, gpu FROM devices WHERE gpu IS NOT NULL ORDER BY name"
        )
        assert list(gpus.rows()) == [("dgx-7-0", "dgx-7", 0), ("dgx-7-1", "dgx-7", 1)]
        assert "telemetry-sentinel" in {note.check for note in trace.notes}


def test_a_query_that_the_server_refuses(server):
    with pytest.raises(BadUse, match="refuses the query"):
        Prometheus(server, Credentials()).number_at("sum by (", 0)
