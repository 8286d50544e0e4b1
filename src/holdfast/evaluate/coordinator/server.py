"""Run the coordinator's process: `python -m holdfast.evaluate.coordinator.server FOLDER`.

The command holds the other end of a pipe, which is the coordinator's standard input. While the
command lives, it restarts a coordinator that ended unexpectedly. When the pipe closes, the command
is dead. Then the coordinator waits for the requests that engines have begun, ends all other
processes, and exits. The exit codes are in `config`.
"""

import asyncio
import errno
import gc
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from holdfast.core.atomic import write_atomic
from holdfast.core.clock import SystemClock
from holdfast.evaluate.coordinator.config import (
    LEFT,
    UNWRITABLE,
    CoordinatorConfig,
    CoordinatorFiles,
    decode_config,
    task_names,
)
from holdfast.evaluate.coordinator.live import Live
from holdfast.evaluate.coordinator.timeline_writer import TimelineWriter
from holdfast.evaluate.policy.priors import Priors, decode_history
from holdfast.evaluate.policy.state import PolicyConfig, State
from holdfast.evaluate.types.timeline import TimelineFile
from holdfast.evaluate.wire.answer_journal import JournalError
from holdfast.evaluate.wire.folder_lock import at_work
from holdfast.evaluate.wire.server import listen

_TICK_S = 0.5
_LAST_WORDS_S = 0.2  # time for the last messages to the peers
_GC_THRESHOLD = 100_000  # a million open samples are live objects, and create little garbage
_DISK_FAILS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)

_log = logging.getLogger(__name__)


async def coordinate(folder: Path) -> int:
    """Run the coordinator of an evaluation until it ends; return the exit code."""
    files = CoordinatorFiles(folder)
    config, token = decode_config(files.config.read_bytes()), files.token.read_text()
    clock = SystemClock()
    started_at_s, epoch = _begin(files, clock.now_s())
    timeline = TimelineWriter(TimelineFile(folder / "timeline.jsonl"), clock, started_at_s)
    timeline.begin(
        started_at_s, config.suite.name, [entry.name for entry in config.suite.entries], epoch
    )
    state = _state(config, files)
    live = Live(config, clock, state, timeline, epoch=epoch)
    port = int(files.address.read_text().rsplit(":", 1)[1]) if files.address.exists() else 0
    server = await listen(config.listen_host, port, token, live)
    host, port = server.sockets[0].getsockname()[:2]
    write_atomic(files.address, f"{host}:{port}".encode())
    try:
        was_left = await _until_over(live)
        if was_left:
            _log.warning(
                "The command has ended. Answers in progress are kept; continue with `holdfast "
                "eval resume`."
            )
            await live.drain()
        await live.commit()
        if was_left:
            live.keep_learned()
    finally:  # also with a full disk: no peer may wait forever
        live.stop_everyone()
        await asyncio.sleep(_LAST_WORDS_S)
        server.close()
    live.close("stopped" if was_left else "failed" if live.exit_code else "done")
    return LEFT if was_left else live.exit_code


async def _until_over(live: Live) -> bool:
    """Wait until the evaluation is done, has failed, or the command is gone.

    Returns:
        True if the command is gone.

    Raises:
        OSError, JournalError: the disk is full or failing.
    """
    abandoned = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, _received_command, abandoned)
    work = [
        asyncio.create_task(live.commit_forever()),
        asyncio.create_task(_tick_forever(live)),
        live.broken,
    ]
    everything: list[asyncio.Future[Any]] = [
        *work,
        asyncio.create_task(live.ended.wait()),
        asyncio.create_task(abandoned.wait()),
    ]
    await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
    for task in everything[: len(work)]:
        if task.done():
            task.result()  # raises the cause
    return not live.ended.is_set()


def _begin(files: CoordinatorFiles, now_s: float) -> tuple[float, int]:
    """Return the time of the evaluation's first start, and the number of restarts."""
    record = files.folder / "started.json"
    if record.exists():
        before = json.loads(record.read_bytes())
        started_at_s, epoch = float(before["started_at_s"]), int(before["starts"])
    else:
        started_at_s, epoch = now_s, 0
    write_atomic(record, json.dumps({"started_at_s": started_at_s, "starts": epoch + 1}).encode())
    return started_at_s, epoch


def _state(config: CoordinatorConfig, files: CoordinatorFiles) -> State:
    # Prefer the learned history, which includes the initial one.
    known = next((path for path in (files.learned, files.history) if path.exists()), None)
    history = decode_history(known.read_bytes()) if known else []
    expected = PolicyConfig(engines=config.nodes * config.engines_per_node)
    return State(Priors.from_history(history, task_names(config.suite)), expected)


def _received_command(abandoned: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1024):
        asyncio.get_running_loop().remove_reader(sys.stdin)
        abandoned.set()


async def _tick_forever(live: Live) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        live.tick()


def main() -> None:
    """Run the coordinator of the evaluation folder named on the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    folder = Path(sys.argv[1])
    gc.set_threshold(_GC_THRESHOLD, 50, 100)
    with at_work(CoordinatorFiles(folder).folder):
        try:
            sys.exit(asyncio.run(coordinate(folder)))
        except (OSError, JournalError) as error:
            cause = error.__cause__ if isinstance(error, JournalError) else error
            if getattr(cause, "errno", None) not in _DISK_FAILS:
                raise
            _log.error("%s: answers cannot be stored.", error)
            sys.exit(UNWRITABLE)


if __name__ == "__main__":
    main()
