"""Run judges of several evaluations of one home, each behind a proxy of its own."""

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from holdfast.core.errors import BadUse
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.run.judging import judging
from holdfast.evaluate.run.options import EvaluateOptions, JudgeLimits


@contextmanager
def judge(word: str) -> Iterator[EvaluateOptions]:
    """Serve a judge that replies with one word, and yield the options of an evaluation."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            data = json.dumps({"choices": [{"message": {"content": word}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield EvaluateOptions(
                judge=JudgeLimits(url=f"http://127.0.0.1:{server.server_address[1]}/v1")
            )
        finally:
            server.shutdown()
            thread.join()


def ask(environment) -> str:
    body = {
        "model": "judge",
        "messages": [{"role": "user", "content": "Good?"}],
        "max_tokens": 3,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{environment['OPENAI_BASE_URL']}/chat/completions",
        data=json.dumps(body).encode(),
        headers={
            "Authorization": f"Bearer {environment['OPENAI_API_KEY']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request, timeout=240) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def test_different_judges_work_side_by_side_and_each_says_its_own_words(tmp_path):
    one, other = EvaluationPaths(tmp_path, "one"), EvaluationPaths(tmp_path, "other")
    with judge("yes") as says_yes, judge("no") as says_no:
        with judging(says_yes, one) as environment, judging(says_no, other) as another:
            assert (ask(environment), ask(another)) == ("yes", "no")
            with (
                pytest.raises(BadUse, match="The evaluation one uses this judge"),
                judging(says_yes, other),
            ):
                pass
        with judging(says_yes, other) as environment:
            assert ask(environment) == "yes"
