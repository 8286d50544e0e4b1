"""Start a judge's proxy for an evaluation, and return the proxy's address and costs."""

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.core.child_process import end_within, first_line, release
from holdfast.core.errors import BadUse
from holdfast.evaluate.metrics.judge.config import ENV_TOKEN, JudgeConfig, JudgeStatistics
from holdfast.evaluate.types.errors import EvaluationError

__all__ = ["Judge", "JudgeConfig", "JudgeStatistics"]

_START_S = 30.0
_STOP_S = 10.0


@dataclass(frozen=True, kw_only=True)
class _Running:
    process: "subprocess.Popen[bytes]"
    port: int


class Judge:
    """Run the proxy's process inside a `with` block.

    The proxy may be restarted, and ends at the latest with the process that started it.
    """

    def __init__(self, config: JudgeConfig, folder: Path) -> None:
        """Start the proxy.

        Args:
            config: the judge and its limits.
            folder: the evaluation's folder, for the proxy's configuration file.

        Raises:
            BadUse: another evaluation uses this judge now.
            EvaluationError: the proxy does not start.
        """
        self._config = config
        self._folder = folder
        self._token = secrets.token_urlsafe(32)
        self._running = self._start()

    def _start(self) -> _Running:
        path = self._folder / "judge.json"
        write_atomic(path, msgspec.json.encode(self._config))
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.evaluate.metrics.judge.server", "--config", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, ENV_TOKEN: self._token},
        )
        line = first_line(process, _START_S)
        if not line:
            process.kill()
            _close(process)
            raise EvaluationError(
                f"The proxy of the judge {self._config.upstream} does not start; see its output above."
            )
        report = json.loads(line)
        if "error" in report:
            _close(process)
            raise BadUse(report["error"])
        return _Running(process=process, port=report["port"])

    @property
    def url(self) -> str:
        """The base URL of the API for clients."""
        return f"http://{self._config.host}:{self._running.port}/v1"

    def environment(self) -> dict[str, str]:
        """Return the environment variables that let a harness's OpenAI clients use the proxy.

        The judge's API key is not among the variables.
        """
        return {
            "OPENAI_BASE_URL": self.url,
            "OPENAI_API_BASE": self.url,
            "OPENAI_API_KEY": self._token,
        }

    def is_running(self) -> bool:
        """Return True while the proxy runs."""
        return self._running.process.poll() is None

    def restart(self) -> None:
        """Restart the proxy with the same limits.

        The port stays the same if the configuration sets the port.

        Raises:
            BadUse: another evaluation uses the judge now.
            EvaluationError: the proxy does not start.
        """
        self.stop()
        self._running = self._start()

    def statistics(self) -> JudgeStatistics:
        """Return the statistics of the proxy since its last start.

        Raises:
            EvaluationError: the proxy does not answer.
        """
        url = f"http://{self._config.host}:{self._running.port}/statistics"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._token}"})
        try:
            with urllib.request.urlopen(request, timeout=_STOP_S) as response:
                return msgspec.json.decode(response.read(), type=JudgeStatistics)
        except OSError as error:
            raise EvaluationError(
                f"The judge's proxy at {self.url} does not answer ({error}); restart it."
            ) from error

    def stop(self) -> None:
        """End the proxy."""
        process = self._running.process
        release(process)
        end_within(process, _STOP_S)
        _close(process)

    def __enter__(self) -> "Judge":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _close(process: "subprocess.Popen[bytes]") -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            pipe.close()
