"""Test `holdfast eval` with external parts: a model server, a judge."""

import json
import os
import signal
import socket
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from end_to_end_world import TIMEOUT_S, end, entry, wait_until

sys.path.insert(0, str(Path(__file__).parent / "engines"))  # the model server of its tests
from openai_stand_in import StandIn

from holdfast.testing.harness import NAME as SYNTHETIC

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]  # the real harness

JUDGE_TOKENS = 61  # of one request and its answer, by the judge's count


def test_four_tasks_by_a_server_that_is_busy_now_and_then(e2e, tmp_path):
    with StandIn() as server:
        server.script = [
            None,
            None,
            429,
            None,
            (429, [("Retry-After", "1")], {"error": {"message": "slow"}}),
            503,
        ]
        said = e2e.json(
            "run", "--suite", e2e.suite(("t_choice", "t_score", "t_generate"), ("t_long",), name="four"),
            "--model", "tiny", "--engine", "openai", "--url", server.url, "--model-name", "tiny",
            home=tmp_path / "home",
        )  # fmt: skip
    assert said["state"] == "done"
    assert set(said["results"]["results"]) == {"t_choice", "t_score", "t_generate", "t_long"}
    assert said["results"]["results"]["t_choice"]["sample_len"] == 5
    paths = Counter(path for path, _ in server.seen)
    assert paths.keys() == {"/v1/completions", "/v1/chat/completions"}
    assert paths.total() == 5 * 3 + 5 + 5 + 5 + 3, "every request once, and thrice again"
    assert paths["/v1/chat/completions"] >= 5


@pytest.mark.parametrize("wrong", ["name", "down"])
def test_a_server_without_the_model_or_none_at_all_is_one_sentence(wrong, light, tmp_path):
    suite = tmp_path / "one.toml"
    suite.write_text(entry("a"))
    with StandIn() as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = server.url if wrong == "name" else f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        _, err = light.run(
            "run", "--suite", suite, "--model", "other", "--engine", "openai", "--url", url, "--model-name", "other",
            "--engine-option", "patience_s=2",
            code=2, home=tmp_path / "home",
        )  # fmt: skip
    said = err.splitlines()[-1]
    assert said.startswith("holdfast: ")
    assert url in said
    assert ("It has tiny" if wrong == "name" else "The engine tried for 2 s") in said


class JudgeServer(ThreadingHTTPServer):
    """Count requests to a judge that pauses after `answers_first` answers."""

    daemon_threads = True

    def __init__(self, answers_first: int) -> None:
        super().__init__(("127.0.0.1", 0), JudgeHandler)
        self.answers_first, self.asked = answers_first, 0
        self.may_go_on = threading.Event()
        self.lock = threading.Lock()

    def handle_error(self, *_) -> None:
        """Ignore clients that were killed."""

    def __enter__(self):
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *_):
        self.may_go_on.set()
        self.shutdown()
        self.server_close()


class JudgeHandler(BaseHTTPRequestHandler):
    server: JudgeServer

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked += 1
            waits = self.server.asked > self.server.answers_first
        if waits:
            self.server.may_go_on.wait(TIMEOUT_S)
        good = "cat" in body["messages"][0]["content"]
        message = {"role": "assistant", "content": "yes" if good else "no"}
        said = {
            "id": "1", "object": "chat.completion", "created": 1, "model": "judge",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": JUDGE_TOKENS - 1, "completion_tokens": 1, "total_tokens": JUDGE_TOKENS},
        }  # fmt: skip
        data = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_a_judge_never_costs_more_than_it_may_also_when_its_proxy_is_killed(light, tmp_path):
    pytest.importorskip("openai")
    count, limit, at_once = 40, 30 * JUDGE_TOKENS, 4
    suite = tmp_path / "judged.toml"
    judged = entry("judged", samples=count, metric_s=[1.0] * count)
    suite.write_text(judged.replace(SYNTHETIC, "judged_harness:JudgedHarness"))
    words = ["run", "--suite", suite, "--model", "none", "--engine", "simulated", "--json"]
    costs = [
        "--judge-cost-limit",
        limit,
        "--judge-input-price",
        1e6,
        "--judge-output-price",
        1e6,
    ]  # one a token
    where = {"home": tmp_path / "home", "OPENAI_API_KEY": "of-the-judge"}
    with JudgeServer(answers_first=5) as judge:
        url = f"http://127.0.0.1:{judge.server_address[1]}/v1"
        words += ["--judge-url", url, "--judge-concurrency", at_once, "--metric-slots", at_once]
        process = light.start(*words, *costs, **where)
        try:
            wait_until(
                lambda: judge.asked >= judge.answers_first + 3, process
            )  # these are paid for, and lost
            os.kill(_proxy_of(process.pid), signal.SIGKILL)
            before = judge.asked
            judge.may_go_on.set()
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            end(process)
        assert process.returncode == 4, err
        assert "cost limit" in json.loads(out)["errors"]["judged"]
        assert before < judge.asked <= limit / JUDGE_TOKENS
        # With enough budget, only unanswered requests are sent.
        said = light.json(*words, **where)
        assert count <= judge.asked <= count + at_once, (
            "what was under way when the proxy died may be asked again"
        )
    assert said["results"]["results"]["judged"]["good,none"] == 0.5


def _proxy_of(pid: int) -> int:
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes()
                parent = int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if b"judge.server" in line and parent == pid:
                return int(process.name)
    raise AssertionError("no proxy runs")
