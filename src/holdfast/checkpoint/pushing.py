"""The trainer's side of the process that pushes checkpoints to object storage, and what is fetched from there."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.catalog import scan
from holdfast.checkpoint.folders import remove_leftovers, step_path
from holdfast.checkpoint.remote import Remote
from holdfast.core.errors import DamagedCheckpoint, NotFound, StorageFailed

PUSHING_MODULE: Final = "holdfast.checkpoint.pushing_process"
_logger = logging.getLogger("holdfast")


class Pusher:
    """Keeps storage in step with a folder from `start` to `close`; one a job."""

    def __init__(self, folder: Path, url: str, *, keep: int | None, told: Callable[[dict[str, Any]], None]) -> None:
        """Nothing is started before `start`, and nothing looked at.

        Args:
            folder: of the checkpoints.
            url: see `Remote`.
            keep: how many stay there; None: all.
            told: hears of every push, see `pushing_process`.

        Raises:
            BadUse, NotFound: see `Remote`.
        """
        self._url = url
        self.remote = Remote(url)
        keeping = [] if keep is None else ["--keep", str(keep)]
        self._command = [sys.executable, "-m", PUSHING_MODULE, str(folder), url, *keeping]
        self._told = told
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None

    def start(self) -> None:
        """Start the process, or another where it has died."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            _logger.warning("The process that pushes checkpoints is started again: it died.")
            self._let_go(self._process)
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # what ends the trainer's group must not end it
        )
        self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
        self._listener.start()

    def close(self, *, wait: bool) -> None:
        """End the process once the newest checkpoint is there, or could not be pushed for ten minutes.

        Without `wait` that is left to it.
        """
        if self._process is None or self._listener is None:
            return
        self.start()  # what died may have left something
        self._let_go(self._process)
        if not wait:
            return
        code = self._process.wait()
        self._listener.join()
        self._process = None
        if code:
            _logger.error("The newest checkpoint is not in %s. Push it by hand, see docs/checkpoints.md.", self._url)

    @staticmethod
    def _let_go(process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            told = json.loads(line)
            if "failed" in told:
                _logger.warning("Step %d is not pushed yet: %s", told["step"], told["failed"])
            self._told(told)
        process.stdout.close()


def fetch_newer(remote: Remote, folder: Path) -> None:
    """Fetch the newest whole checkpoint of storage, where `folder` has none as new.

    Where storage cannot be reached and the folder has a checkpoint, that one is good enough, and it is said.

    Raises:
        NotFound, StorageFailed: storage cannot be reached, and there is nothing else.
        CheckpointError: there is no room for it.
    """
    newest = next((info.step for info in scan(folder) if info.state == "written"), -1)
    try:
        there = [each.step for each in remote.scan() if each.state == "written" and each.step > newest]
        for step in there:
            if fetch_from(remote, folder, step):
                return
    except (NotFound, StorageFailed) as error:
        if newest < 0:
            raise
        _logger.warning("What storage has was not looked at, step %d of %s is taken: %s", newest, folder, error)


def fetch_from(remote: Remote, folder: Path, step: int) -> bool:
    """Fetch one step into `folder`, in the place of what it has of it; whether storage has it whole."""
    remove_leftovers(folder)
    try:
        remote.fetch(step, folder)
    except DamagedCheckpoint as error:
        _logger.warning("Passed over the checkpoint of step %d in storage: %s", step, error)
        return False
    _logger.info("Fetched %s.", step_path(folder, step))
    return True
