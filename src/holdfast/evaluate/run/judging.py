"""Run the proxy of an evaluation's judge, and restart the proxy if it dies."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.core.errors import HoldfastError
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.run.options import EvaluateOptions, JudgeLimits

if TYPE_CHECKING:
    from holdfast.evaluate.metrics.judge.config import JudgeConfig

_LOOK_EVERY_S = 1.0


@contextmanager
def judging(options: EvaluateOptions, paths: EvaluationPaths) -> Iterator[Mapping[str, str]]:
    """Run the judge's proxy inside a `with` block, if the options have a judge.

    Args:
        options: the options, with the judge's limits if there is a judge.
        paths: the paths of the evaluation; the judge's journal is beside the journals of answers,
            and outlives the evaluation.

    Yields:
        The environment variables through which harness hosts reach the judge; empty without a
        judge.

    Raises:
        BadUse: another evaluation in this home folder uses the same judge now.
        EvaluationError: the proxy does not start.
    """
    if options.judge is None:
        yield {}
        return
    from holdfast.evaluate.metrics.judge.proxy import Judge

    paths.state.mkdir(parents=True, exist_ok=True)
    judge = Judge(_config(options.judge, paths, _host(options)), paths.state)
    ended = threading.Event()

    def mind() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            if not judge.is_running():
                try:
                    judge.restart()
                except HoldfastError:  # tried again at the next look; callers wait meanwhile
                    continue

    minder = threading.Thread(target=mind, name="judge", daemon=True)
    minder.start()
    try:
        yield judge.environment()
    finally:
        ended.set()
        minder.join()
        judge.stop()


def _host(options: EvaluateOptions) -> str:
    """Return the address on which the proxy listens, which all nodes must reach."""
    if options.on == "local":
        return "127.0.0.1"
    from holdfast.cluster import places

    return places(
        options.on, nodes=options.nodes, sbatch_options=options.sbatch_options
    ).address_host()


def _config(limits: JudgeLimits, paths: EvaluationPaths, host: str) -> "JudgeConfig":
    from holdfast.evaluate.metrics.judge.config import JudgeConfig
    from holdfast.evaluate.metrics.judge.journal import journal_of

    paths.answers.mkdir(parents=True, exist_ok=True)
    return JudgeConfig(
        upstream=limits.url,
        journal=str(journal_of(limits.url, paths.answers)),
        evaluation_id=paths.evaluation_id,
        api_key_env=limits.api_key_env,
        concurrency=limits.concurrency,
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        cost_limit=limits.cost_limit,
        input_price=limits.input_price,
        output_price=limits.output_price,
        host=host,
        port=_free_port(host),  # the same after a restart, since callers keep the address
    )


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
