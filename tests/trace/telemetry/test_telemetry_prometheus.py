"""Check the Prometheus client against the test's own server: chunks, cuts, retries, secrets."""

from pathlib import Path

import duckdb
import pytest
from fake_prometheus import START, Server, serving
from killed_writing import killed_after_writing

from holdfast.core.errors import BadUse
from holdfast.testing import FakeClock
from holdfast.trace.telemetry import attach, prometheus, value_counts
from holdfast.trace.telemetry.metrics import METRICS
from holdfast.trace.telemetry.prometheus import Span, device_of, fetch
from holdfast.trace.telemetry.prometheus_http import Credentials, Prometheus, PrometheusError
from holdfast.trace.telemetry.store import Store
from holdfast.trace.trace import Trace, open_scratch


def client(url: str, clock: FakeClock | None = None, **options: object) -> Prometheus:
    clock = clock or FakeClock()
    return Prometheus(
        url, Credentials(), pause=clock.advance, chance=lambda: 1.0, timeout_s=5, **options
    )  # type: ignore[arg-type]


def expected(span: Span, gpus: int) -> dict[float, int]:
    counts: dict[float, int] = {}
    number = int((span.end_s - span.start_s) / span.step_s) + 1
    for index in range(number):
        for gpu in range(gpus):
            value = float((int(span.start_s + index * span.step_s) // 15 + gpu) % 101)
            counts[value] = counts.get(value, 0) + 1
    return counts


def counts_in(folder: Path) -> dict[float, int]:
    found = value_counts(folder, "GPU_UTIL")
    return dict(zip(found.values.tolist(), found.weights.astype(int).tolist(), strict=True))


def test_more_points_than_a_server_gives_at_once(tmp_path):
    span = Span(start_s=START, end_s=START + 25_000 * 15, step_s=15)
    server = Server()
    with serving(server) as url:
        store = fetch(client(url), tmp_path / "store", span, metrics=["GPU_UTIL"])
    assert counts_in(store.folder) == expected(span, 3)
    assert len(server.asked) == 3
    assert [asked[0] for asked in server.asked[1:]] == [
        asked[1] + 15 for asked in server.asked[:-1]
    ]
    rows = duckdb.sql(
        f"SELECT count(*), count(DISTINCT (\"at\", device)) FROM '{store.folder}/samples/*/date=*/*.parquet'"
    ).fetchall()
    assert rows == [(75_003, 75_003)]


def test_few_enough_series_an_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus, "SAMPLES_PER_ANSWER", 100)
    monkeypatch.setattr(prometheus, "INSTANCES_PER_SHARD", 2)
    span = Span(start_s=START, end_s=START + 99 * 15, step_s=15)
    server = Server(gpus=5)
    with serving(server) as url:
        store = fetch(
            client(url), tmp_path / "store", span, metrics=["GPU_UTIL"], matchers='cluster="a"'
        )
    assert counts_in(store.folder) == expected(span, 5)
    assert len(server.asked) == 2 * 3  # 50 points of the shards of 2, 2 and 1 instances
    assert all(
        query.startswith('DCGM_FI_DEV_GPU_UTIL{cluster="a",instance=~"')
        for _, _, query in server.asked
    )


def test_an_answer_too_large_is_asked_for_in_halves(tmp_path):
    span = Span(start_s=START, end_s=START + 999 * 15, step_s=15)
    server = Server()
    with serving(server) as url:
        store = fetch(
            client(url, most_bytes=20_000), tmp_path / "store", span, metrics=["GPU_UTIL"]
        )
        assert counts_in(store.folder) == expected(span, 3)
        assert len(server.asked) > 4
        with pytest.raises(BadUse, match="One point of GPU_UTIL is more than an answer may hold"):
            fetch(client(url, most_bytes=150), tmp_path / "other", span, metrics=["GPU_UTIL"])


def test_a_server_in_trouble_is_asked_again_and_waited_for(tmp_path):
    span = Span(start_s=START, end_s=START + 99 * 15, step_s=15)
    server, clock = Server(), FakeClock()
    server.faults = ["503", "cut", "", "500", "junk", "429", "", ""]
    with serving(server) as url:
        store = fetch(client(url, clock), tmp_path / "store", span, metrics=["GPU_UTIL"])
    assert counts_in(store.folder) == expected(span, 3)
    assert clock.monotonic_s() == (1 + 2) + (1 + 2 + 4)


def test_a_fetch_cut_off_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus, "SAMPLES_PER_ANSWER", 300)
    span = Span(start_s=START, end_s=START + 999 * 15, step_s=15)
    server = Server()
    with serving(server) as url:
        server.faults = [""] * (3 + 1 + 4) + ["cut"] * 3  # three counts, the instances, four chunks
        with pytest.raises(PrometheusError, match=r"failed \(.*, 3 times.*fetched data is kept"):
            fetch(client(url, tries=3), tmp_path / "store", span, metrics=["GPU_UTIL"])
        assert Store.open(tmp_path / "store").metrics() == []
        before = len(server.asked)
        with pytest.raises(BadUse, match="part of another fetch of GPU_UTIL"):
            fetch(
                client(url),
                tmp_path / "store",
                Span(start_s=START, end_s=START + 15),
                metrics=["GPU_UTIL"],
            )
        fetch(client(url), tmp_path / "store", span, metrics=["GPU_UTIL"])
        assert counts_in(tmp_path / "store") == expected(span, 3)
        assert len(server.asked) - before == 6
        fetch(client(url), tmp_path / "store", span, metrics=["GPU_UTIL"])
        assert len(server.asked) - before == 6


FETCH = """
from holdfast.trace.telemetry import Prometheus, Span, fetch
prometheus.SAMPLES_PER_ANSWER = 300
fetch(Prometheus(sys.argv[1]), sys.argv[2], Span(start_s=%r, end_s=%r), metrics=["GPU_UTIL"])
"""


def test_kill_9_in_the_middle_of_a_fetch(tmp_path):
    span = Span(start_s=START, end_s=START + 999 * 15, step_s=15)
    server = Server()
    with serving(server) as url:
        for step in (2, 3):
            script = FETCH % (span.start_s, span.end_s)
            assert killed_after_writing(step, "prometheus", script, url, tmp_path / "store")
            assert Store.open(tmp_path / "store").metrics() == []
        before = len(server.asked)
        fetch(client(url), tmp_path / "store", span, metrics=["GPU_UTIL"])
        assert len(server.asked) - before == 10 - (2 - 1) - (3 - 1)
    assert counts_in(tmp_path / "store") == expected(span, 3)


def test_attached_from_a_url(tmp_path):
    span = Span(start_s=START, end_s=START + 99 * 15, step_s=15)
    connection, scratch = open_scratch(memory_limit_mb=300)
    with (
        serving(Server()) as url,
        Trace(connection, scratch, [], duration="run", has_jobs=False) as trace,
    ):
        with pytest.raises(BadUse, match="without a time or a folder"):
            attach(trace, url, cluster="mine", metric="GPU_UTIL")
        attach(trace, url, cluster="mine", metric="GPU_UTIL", span=span, folder=tmp_path / "store")
        assert trace.aggregate("metric_values")["n"].sum() == 300
        assert trace.metrics == {"GPU_UTIL"}


def test_blanks_and_garbage_are_dropped_and_counted(tmp_path):
    server = Server(gpus=2)
    words = ["9223372036854775794", "NaN", "+Inf", "644245923", "50"]
    server.value = lambda at_s, gpu: words[int(at_s - START) // 15 % 5] if gpu == 0 else "7"
    span = Span(start_s=START, end_s=START + 99 * 15, step_s=15)
    with serving(server) as url:
        store = fetch(client(url), tmp_path / "store", span, metrics=["GPU_UTIL"])
    assert counts_in(store.folder) == {50.0: 20, 7.0: 100}
    notes = {note["check"]: note["rows"] for note in store.manifest(METRICS["GPU_UTIL"])["notes"]}
    assert notes["telemetry-sentinel"] == 40  # infinity also exceeds an int64
    assert notes["telemetry-out-of-range"] == 20


def test_no_message_shows_a_secret(tmp_path, monkeypatch):
    secret = "s3cr3t-t0ken"
    monkeypatch.setenv("HOLDFAST_PROMETHEUS_TOKEN", secret)
    server = Server()
    with serving(server) as url:
        for fault, error in (
            ("401", BadUse),
            ("422", BadUse),
            ("302", BadUse),
            ("503", PrometheusError),
        ):
            server.faults = [fault] * 2
            with pytest.raises(error) as caught:
                Prometheus(url, pause=lambda _: None, tries=2).number_at("up", START)
            assert secret not in str(caught.value)
            assert server.headers[-1] == f"Bearer {secret}"
            server.faults = []
        with_user = url.replace("http://", "http://alice:wond%40r@")
        one = Prometheus(with_user, pause=lambda _: None, tries=1)
        one.number_at("up", START)
        assert server.headers[-1] == "Basic YWxpY2U6d29uZEBy"
        assert one.url == url
        (tmp_path / "token").write_text("from-file\n")
        Prometheus(url, Credentials.found(token_file=tmp_path / "token")).number_at("up", START)
        assert server.headers[-1] == "Bearer from-file"
    assert secret not in repr(Credentials.found())
    with pytest.raises(BadUse, match="cannot be read"):
        Credentials.found(token_file=tmp_path / "none")
    for wrong in ("ftp://host", "file:///etc/passwd", "host:9090"):
        with pytest.raises(BadUse, match="http:// or https://"):
            Prometheus(wrong)


def test_a_metric_that_the_server_lacks(tmp_path):
    server = Server(gpus=0)
    span = Span(start_s=START, end_s=START + 15)
    with serving(server) as url:
        store = fetch(client(url), tmp_path / "store", span)  # the server has no metric
        assert store.metrics() == []
        with pytest.raises(BadUse, match="has no samples of GPU_UTIL in that time"):
            fetch(client(url), tmp_path / "store", span, metrics=["GPU_UTIL"])
        with pytest.raises(BadUse, match="no metric 'GPU_NOISE'"):
            fetch(client(url), tmp_path / "store", span, metrics=["GPU_NOISE"])


def test_what_is_no_prometheus_is_said_at_once(tmp_path):
    server = Server()
    server.answer = lambda path, query: {"result": [{"metric": {}, "values": []}]}
    with (
        serving(server) as url,
        pytest.raises(PrometheusError, match="not like the API of Prometheus"),
    ):
        client(url).number_at("up", START)
    for wrong in ("http://no host/", "ftp://host/", "http:///"):
        with pytest.raises(BadUse, match="Give its URL"):
            Prometheus(wrong)


def test_devices_of_series():
    gpu, node = METRICS["GPU_UTIL"], METRICS["NODE_CPU_UTILIZATION"]
    labels = {"Hostname": "n-1", "instance": "10.0.0.1:9400", "gpu": "3"}
    assert (
        device_of(labels, gpu).name,
        device_of(labels, gpu).node,
        device_of(labels, gpu).gpu,
    ) == ("n-1-3", "n-1", 3)
    assert device_of({**labels, "GPU_I_ID": "7"}, gpu).name == "n-1-3/7"
    assert device_of({"instance": "10.0.0.1:9100"}, node).name == "10.0.0.1"
    assert device_of({"instance": "10.0.0.1:9100"}, node).gpu is None


def test_spans():
    span = Span.of("2023-07-01T08:00:00+08:00", "2023-07-01 01:00:00", step_s=15)
    assert (span.start_s, span.end_s) == (START, START + 3600)
    chunks = span.chunks(100)
    assert sum(round((chunk.end_s - chunk.start_s) / 15) + 1 for chunk in chunks) == 241
    with pytest.raises(BadUse, match="not a span of time"):
        Span.of("2023-07-02", "2023-07-01")
    with pytest.raises(BadUse, match="Give times like"):
        Span.of("yesterday", "today")


def test_a_server_that_is_down_is_tried_a_few_times_aloud_and_leaves_nothing(tmp_path):
    with serving(Server()) as url:
        pass  # The server is closed.
    said: list[str] = []
    clock = FakeClock()
    with pytest.raises(PrometheusError) as caught:
        fetch(
            client(url, clock, waiting=said.append),
            tmp_path / "store",
            Span(start_s=START, end_s=START + 15),
        )
    assert f"{url} cannot be reached (Connection refused), 3 times. Check that" in str(caught.value)
    assert clock.monotonic_s() == 1 + 2
    assert said == [
        f"{url} cannot be reached (Connection refused); trying again in {pause_s} s"
        for pause_s in (1, 2)
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_has_nothing_is_noted(tmp_path):
    connection, scratch = open_scratch(memory_limit_mb=300)
    span = Span(start_s=START, end_s=START + 15)
    with (
        serving(Server(gpus=0)) as url,
        Trace(connection, scratch, [], duration="run", has_jobs=False) as trace,
    ):
        attach(trace, url, cluster="mine", span=span, folder=tmp_path / "store")
        assert [(note.check, note.cluster) for note in trace.notes] == [("telemetry-empty", "mine")]
