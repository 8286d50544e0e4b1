"""Serve a small OpenAI-compatible API over HTTP, in tests or in place of `vllm serve`.

The answers depend on the request and on `weights`, so that a test can compute them (`logprob_of`,
`text_of`).
"""

import argparse
import hashlib
import json
import socket
import struct
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKENS = 5  # of every generation


def logprob_of(weights, tokens, place):
    """Return the log-probability of the token at `place` after the earlier ones."""
    digest = hashlib.sha256(repr((weights, list(tokens[: place + 1]))).encode()).digest()
    return -(digest[0] + 1) / 16


def text_of(prompt):
    return f"answer to {len(prompt)}"


class StandIn(ThreadingHTTPServer):
    """Serve requests; `script` replaces the next answers.

    An entry of `script` is a status, (status, headers, body), "cut", "hang", or a raw body for a
    200.
    """

    daemon_threads = True

    def __init__(self, port=0, *, model="tiny", weights=b"", key="", token_ids=True):
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.weights, self.key, self.token_ids = model, weights, key, token_ids
        self.script, self.seen, self.stopped = [], [], threading.Event()
        self.folder = None
        self.listing = 200  # the status of GET /models
        self.in_flight = self.most_in_flight = 0
        self.hold = None  # an event that answers wait for
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self):
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request, client_address):
        """Ignore clients that went away."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, *_):
        pass

    def reply(self, body, status=200, headers=()):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        match self.path:
            case "/health":
                self.reply(b"")
            case "/version":
                self.reply({"version": "0.0.stand-in"})
            case "/v1/models" if self.server.listing != 200:
                self.reply({"error": {"message": "no listing"}}, self.server.listing)
            case "/v1/models":
                if self.is_authorized():
                    self.reply({"data": [{"id": self.server.model, "max_model_len": 64}]})
            case _:
                self.reply({"error": {"message": "no such path"}}, 404)

    def is_authorized(self):
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.reply({"error": {"message": "Incorrect API key provided."}}, 401)
            return False
        return True

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"null")
        server = self.server
        with server.lock:
            server.seen.append((self.path, body))
            todo = server.script.pop(0) if server.script else None
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            if server.hold is not None:
                server.hold.wait(20)
            self.act(todo, body)
        finally:
            with server.lock:
                server.in_flight -= 1

    def act(self, todo, body):
        match todo:
            case None:
                self.answer(body)
            case "cut":
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
                self.close_connection = True
                self.connection.close()
            case "hang":
                self.server.stopped.wait(20)
                self.close_connection = True
            case int():
                self.reply({"error": {"message": f"scripted {todo}"}}, todo)
            case (status, headers, said):
                self.reply(said, status, headers)
            case bytes() | dict():
                self.reply(todo)

    def answer(self, body):
        server = self.server
        if self.path.startswith("/v1/") and not self.is_authorized():
            return
        match self.path:
            case "/v1/completions" if body["model"] != server.model:
                self.reply(
                    {"error": {"message": f"The model {body['model']} does not exist."}}, 404
                )
            case "/v1/completions":
                self.reply(
                    {"choices": [self.complete(body)], "usage": {"completion_tokens": TOKENS}}
                )
            case "/v1/chat/completions":
                content = text_of(body["messages"][-1]["content"])
                message = {"role": "assistant", "content": content}
                self.reply({"choices": [{"message": message, "finish_reason": "stop"}]})
            case "/sleep?level=2":
                server.weights = b"asleep"
                self.reply(b"")
            case "/collective_rpc" if body["method"] == "reload_weights":
                server.weights = weights_of(server.folder)
                self.reply({"results": [None]})
            case "/wake_up?tags=weights" | "/wake_up?tags=kv_cache" | "/reset_prefix_cache":
                self.reply(b"")
            case _:
                self.reply({"error": {"message": "no such path"}}, 404)

    def complete(self, body):
        prompt = body["prompt"]
        if not body.get("echo"):
            ids = {"token_ids": list(range(7, 7 + TOKENS))} if self.server.token_ids else {}
            return {"text": text_of(prompt), "finish_reason": "length", **ids}
        pieces = (
            prompt
            if isinstance(prompt, list)
            else [prompt[at : at + 3] for at in range(0, len(prompt), 3)]
        )
        values = (
            [None]
            + [logprob_of(self.server.weights, pieces, place) for place in range(1, len(pieces))]
            + [-0.5]
        )
        # A token whose value is above -4 is the likeliest there.
        tops = [None] + [
            {"a": value if value > -4 else value + 1, "b": -99.0} for value in values[1:]
        ]
        offsets = (
            [sum(len(piece) for piece in pieces[:place]) for place in range(len(pieces) + 1)]
            if isinstance(prompt, str)
            else []
        )
        return {
            "logprobs": {"token_logprobs": values, "top_logprobs": tops, "text_offset": offsets},
            "text": "",
        }


def weights_of(folder):
    return (Path(folder) / "model.safetensors").read_bytes()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("folder")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--no-reload", action="store_true")
    given, _ = parser.parse_known_args()
    if given.fail:
        sys.stderr.write("ValueError: the model's architecture is not supported\n")
        raise SystemExit(3)
    server = StandIn(given.port, model=given.served_model_name, weights=weights_of(given.folder))
    server.folder = given.folder
    if given.no_reload:
        server.script = [404]
    server.serve_forever()


if __name__ == "__main__":
    main()
