"""Run vLLM as a long-lived server whose weights are swapped in place.

This module has not run on a GPU yet. A server is used instead of the class `LLM` in this process,
for three reasons. A crash of CUDA ends only the server, and the worker can still report its
answers. The HTTP interface is documented and stable. The client already exists in `openai`. The
tests cover the contract with a stand-in for `vllm serve`, which runs as a separate process.

A swap follows vLLM's documentation (https://docs.vllm.ai/en/latest/features/sleep_mode/): sleep at
level 2, wake the weights, call `reload_weights`, wake the cache. The server's model folder is a
symbolic link. A swap points the link to the new weights, so that vLLM reloads from an unchanged
path. The coordinator certifies each swap (`canary`).
"""

import json
import os
import shlex
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cluster import release, start_on_leash
from holdfast.core.errors import BadUse
from holdfast.evaluate.engines.canary import canary_requests
from holdfast.evaluate.engines.openai import OpenAIEngine
from holdfast.evaluate.types.engine import Curve, EngineSpec, SwapRefused
from holdfast.evaluate.types.errors import EvaluationError

if TYPE_CHECKING:
    from subprocess import Popen

_START_LIMIT_S = 1800.0
_MAX_BATCH = 256  # vLLM's own default of max_num_seqs
_LOG_TAIL_CHARACTERS = 2000
_SERVED_NAME = "model"


class VllmEngine(OpenAIEngine):
    """Run vLLM as a server; the methods implement `Engine`.

    The options are the same as for `OpenAIEngine`, without `tokenizer` and with these:

    - `command` (vllm): the command that runs vLLM;
    - `arguments`: further arguments of `vllm serve`;
    - `start_limit_s` (1800): the seconds that a start may take.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._max_batch = spec.max_batch or _MAX_BATCH
        self._server: Popen[bytes] | None = None
        self._home: Path | None = None
        self._version = ""

    def load(self, folder: Path) -> None:
        """Start a server for the weights of a folder.

        Raises:
            BadUse: vLLM is not installed, or ends before it answers; the message includes the end
                of vLLM's output.
        """
        self.close()
        self._home = Path(tempfile.mkdtemp(prefix="holdfast-vllm-"))
        self._point_at(folder)
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}/v1"
        self._model = _SERVED_NAME
        self._vocabulary = _vocabulary_of(folder)
        command = self._command(port)
        if shutil.which(command[0]) is None:
            raise BadUse(
                f"There is no program {command[0]!r}. Install vLLM where the engines run, or name "
                "--engine hf."
            )
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self._spec.mode == "exact":
            environment["VLLM_BATCH_INVARIANT"] = "1"
        self._server = start_on_leash(command, self._home / "log", environment=environment)
        self._connect()
        self._await_start()
        self._choose_model()
        self._version = str(self._control("GET", "version").get("version", "unknown"))

    def swap(self, folder: Path) -> None:
        """See `Engine.swap`; after a refusal the server must be restarted."""
        if _shape_of(folder) != _shape_of(self._link()):
            raise SwapRefused(f"The config.json of {folder} differs from the served model's.")
        try:
            self._control("POST", "sleep?level=2")
            self._point_at(folder)
            self._control("POST", "wake_up?tags=weights")
            self._control("POST", "collective_rpc", {"method": "reload_weights"})
            self._control("POST", "wake_up?tags=kv_cache")
            self._control("POST", "reset_prefix_cache")
        except BadUse as error:
            raise SwapRefused(f"vLLM did not accept other weights: {error}") from error

    def canary(self) -> list[float]:
        """See `Engine.canary`."""
        requests = canary_requests(self._vocabulary, self._max_length)
        self.submit(list(enumerate(requests)))
        found: dict[int, float] = {}
        while len(found) < len(requests):
            for one in self.step():
                if one.answer is None or one.answer.logprob is None:
                    raise EvaluationError(f"vLLM does not answer its canaries: {one.error}")
                found[one.id] = one.answer.logprob
        return [found[place] for place in range(len(requests))]

    def numerics(self) -> str:
        """See `Engine.numerics`."""
        spec = self._spec
        return f"vllm {spec.mode} {spec.dtype} tp {spec.tensor_parallel} version {self._version} limit {self._max_length}"  # noqa: E501

    def curve(self) -> Curve:
        """Return a guess of the cost curve, which observed times will correct.

        The guess fits a model of a few billion parameters on one GPU.
        """
        return Curve(
            prefill_tokens_per_s=20_000.0,
            request_s=0.002,
            step_base_s=0.012,
            step_sequence_s=0.00008,
            max_batch=self._max_batch,
        )

    def close(self) -> None:
        """End the server and all its processes."""
        super().close()
        if self._server is not None:
            release(self._server)
            self._server = None
        if self._home is not None:
            shutil.rmtree(self._home)
            self._home = None

    def _link(self) -> Path:
        assert self._home is not None
        return self._home / "model"

    def _point_at(self, folder: Path) -> None:
        fresh = self._link().with_suffix(".new")
        fresh.symlink_to(folder.absolute())
        fresh.replace(self._link())

    def _command(self, port: int) -> list[str]:
        spec = self._spec
        command = [
            *shlex.split(str(spec.options.get("command") or "vllm")),
            "serve",
            str(self._link()),
        ]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", _SERVED_NAME]
        command += ["--tensor-parallel-size", str(spec.tensor_parallel), "--dtype", spec.dtype]
        command += ["--max-num-seqs", str(self._max_batch), "--seed", "0", "--enable-sleep-mode"]
        command += ["--max-model-len", str(spec.max_length)] if spec.max_length else []
        return command + shlex.split(str(spec.options.get("arguments") or ""))

    def _await_start(self) -> None:
        assert self._server is not None
        assert self._home is not None
        limit_s = float(self._spec.options.get("start_limit_s") or _START_LIMIT_S)
        deadline_s = time.monotonic() + limit_s
        while not self._is_healthy():
            code = self._server.poll()
            if code is not None or time.monotonic() > deadline_s:
                how = (
                    f"ended with {code}"
                    if code is not None
                    else f"did not answer within {limit_s:.0f} s"
                )
                tail = (
                    (self._home / "log").read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:].strip()
                )
                raise BadUse(f"vLLM {how}. It printed:\n{tail}")
            time.sleep(0.1)

    def _is_healthy(self) -> bool:
        import urllib.request

        try:
            with urllib.request.urlopen(f"{self._root()}/health", timeout=5.0) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def _root(self) -> str:
        return self._url.removesuffix("/v1")

    def _control(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        reply = self._call(method, f"{self._root()}/{path}", body, patience_s=0.0)
        return reply if isinstance(reply, dict) else {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _shape_of(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise SwapRefused(f"The config.json of {folder} cannot be read: {error}.") from error
    return {
        name: value
        for name, value in config.items()
        if name not in ("_name_or_path", "transformers_version")
    }


def _vocabulary_of(folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return int((config.get("text_config") or config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadUse(
            f"The config.json of {folder} states no vocabulary: {error}. Give a Hugging Face folder."
        ) from error
