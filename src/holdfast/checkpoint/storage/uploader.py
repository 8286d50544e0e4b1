"""Control the upload process from the trainer, and fetch checkpoints from object storage.

To push a checkpoint is to upload it.
"""

import contextlib
import functools
import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.checkpoint.catalog.catalog import CheckpointInfo, scan
from holdfast.checkpoint.catalog.lineage import Dated, is_abandoned, left_by_newest
from holdfast.checkpoint.catalog.staging_dir import remove_leftovers
from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.storage.catalog import RemoteCheckpoint
from holdfast.checkpoint.storage.object_store import Patience
from holdfast.checkpoint.storage.push import pushed_names
from holdfast.checkpoint.storage.remote import Remote
from holdfast.core.child_process import release
from holdfast.core.errors import (
    BadUse,
    CheckpointError,
    DamagedCheckpoint,
    NotFound,
    NoVerifiedCheckpoint,
)
from holdfast.core.link import job_link
from holdfast.core.processes import module_command

PUSHING_MODULE: Final = "holdfast.checkpoint.storage.upload_process"
_LOOK_EVERY_S: Final = 5.0
_SILENT_S: Final = 600.0
_HURRIED: Final = Patience(request_timeout_s=20.0, retry_timeout_s=20.0, tries=5, attempts=2)
"""The patience with storage if the folder already has a checkpoint to continue from."""
_logger = logging.getLogger("holdfast")


class Pusher:
    """Push new checkpoints of a folder to storage, in a separate process, from `start` to `close`.

    A job has one instance.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        keep: int | None,
        on_message: Callable[[dict[str, Any]], None],
    ) -> None:
        """Create the pusher without reading the folder; `start` starts the process.

        Args:
            folder: the checkpoint folder.
            url: the URL of the storage, see `Remote`.
            keep: the number of checkpoints to keep in storage; None keeps all.
            on_message: called with each message of the process about a push, see `upload_process`.

        Raises:
            BadUse, NotFound: see `Remote`.
        """
        self._url = url
        self.remote = Remote(url)
        keeping = [] if keep is None else ["--keep", str(keep)]
        self._arguments = [str(folder), url, *keeping]
        self._on_message = on_message
        self._is_needed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None
        self._responded = threading.Event()

    def start(self) -> None:
        """Start the process unless it is running; a process that has died is replaced.

        If the process cannot be started, a warning is logged and training continues; the next save
        calls this method again.
        """
        self._is_needed = True
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            _logger.warning("The process that pushes checkpoints died and is restarted.")
            release(self._process)
            self._process = None
        command, environment = module_command(PUSHING_MODULE)
        try:
            with contextlib.ExitStack() as undo:
                process = undo.enter_context(
                    subprocess.Popen(
                        [*command, str(os.getpid()), *self._arguments],
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        start_new_session=True,  # signals to the trainer's group must not end it
                    )
                )
                undo.callback(process.kill)
                listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
                listener.start()
                undo.pop_all()
        except (OSError, RuntimeError) as error:  # no process, or no thread, can be started
            _logger.warning(
                "The process that pushes checkpoints could not be started (%s). The next save tries again.",
                error,
            )
            return
        self._process, self._listener = process, listener

    def close(self, *, wait: bool) -> None:
        """Let the process end once the newest checkpoint is in storage.

        The process gives up after ten minutes of failed pushes. With `wait`, this method waits for
        the end of the process, but stops ten minutes after the last message from the process. Each
        message restarts the supervisor's time limit for this part of the job.
        """
        if not self._is_needed:
            return
        self.start()  # a process that has died may not have pushed the newest checkpoint
        self._is_needed = False
        if self._process is not None:
            release(self._process)
            if not wait:
                return
        if self._process is None or self._wait(self._process) != 0:
            _logger.error(
                "The newest checkpoint is not in %s. Push it by hand, see docs/checkpoints.md.",
                self._url,
            )

    def _wait(self, process: "subprocess.Popen[bytes]") -> int | None:
        """Wait for the process to end, and return its exit status; None if it makes no progress."""
        heard_at_s = time.monotonic()
        while time.monotonic() - heard_at_s <= _SILENT_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_LOOK_EVERY_S)
                assert self._listener is not None, "the thread starts with the process"
                self._listener.join()
                return code
            if self._responded.is_set():
                self._responded.clear()
                heard_at_s = time.monotonic()
                with job_link().section("save"):
                    pass
        return None

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:
            message = json.loads(line)
            self._responded.set()
            if "warning" in message:
                _logger.warning("%s", message["warning"])
            elif "failed" in message:
                _logger.warning("Step %d is not pushed yet: %s", message["step"], message["failed"])
            if "step" in message:
                self._on_message(message)
        process.stdout.close()
        release(process)  # the process has ended
        process.wait()  # collects the exit status if `close` has not waited


@dataclass(frozen=True)
class FetchChoice:
    """Decide which checkpoints in storage may be fetched.

    Attributes:
        run: the name of this run, or "". If the name is not empty, checkpoints of other named runs
            are not fetched.
        is_fresh: whether this run starts anew, so that only checkpoints with exactly its own name
            are fetched.
        newer: whether to fetch a checkpoint that is newer than those in the folder. If False, the
            user requested a certain step, which may belong to an abandoned line of the run.
    """

    run: str = ""
    is_fresh: bool = False
    newer: bool = True

    def offers(self, there: RemoteCheckpoint) -> bool:
        """Return True if this run may fetch the checkpoint."""
        of = "" if there.manifest is None else there.manifest.run
        return of == self.run or not (self.is_fresh or (of and self.run))


_ANY: Final = FetchChoice()


def has_any(pusher: Pusher | None, asked: FetchChoice) -> bool:
    """Return True if storage has a checkpoint that `restore` would not ignore.

    Raises:
        NotFound, StorageFailed: storage cannot be reached.
    """
    if pusher is None or (asked.is_fresh and not asked.run):
        return False
    return any(asked.offers(each) or not asked.is_fresh for each in pusher.remote.scan())


def fetch_together(
    ranks: Ranks, remote: Remote, folder: Path, asked: FetchChoice
) -> Callable[[int, int], int | None]:
    """Fetch a newer checkpoint from storage for all ranks, if `asked.newer` is True.

    Rank 0 fetches, and the other ranks wait. All ranks must call this function together, and later
    the function that this function returns.

    Returns:
        A function that fetches a replacement for a damaged checkpoint, see `fetch_instead`. Its
        arguments are the step of the damaged checkpoint, and the step above which a replacement
        must be. The function returns the step of the replacement, or None.
    """
    at_length = functools.partial(
        ranks.first_at_length, signs=lambda: remote.signs, section="restore"
    )
    if asked.newer:
        at_length(functools.partial(fetch_newer, remote, folder, asked))

    def instead(damaged: int, above: int) -> int | None:
        return at_length(functools.partial(fetch_instead, remote, folder, damaged, above, asked))

    return instead


def fetch_newer(remote: Remote, folder: Path, asked: FetchChoice = _ANY) -> None:
    """Fetch the newest undamaged checkpoint from storage if it is newer than those in `folder`.

    Checkpoints that the run has abandoned are not fetched. A checkpoint that was pushed from the
    folder and then deleted from it was deleted on purpose, so it is not fetched again, and a
    warning is logged. If the fetch fails and the folder has a checkpoint, only a warning is logged.

    Raises:
        BadUse: storage has only checkpoints of another run, and the folder has none.
        NotFound, StorageFailed: storage cannot be reached, and the folder has no checkpoint.
        CheckpointError: the disk is full, and the folder has no checkpoint.
        NoVerifiedCheckpoint: every checkpoint in storage is damaged, and the folder has none.
    """
    here = scan(folder)
    newest = next(
        (info.step for info in here if info.state == "written" and not info.abandoned), -1
    )
    passed_over: list[str] = []
    try:
        found = remote.scan(above=newest, patience=_HURRIED if newest >= 0 else None)
        offered = _offered(found, asked)
        if found and not (offered or here or asked.is_fresh):
            raise BadUse(_of_another_run(remote, folder, found[0], asked.run))
        for there in _not_taken_away(remote, folder, here, offered, above=newest):
            reason = there.reason or _fetch(remote, folder, there)
            if not reason:
                return
            _logger.warning(
                "Passed over the checkpoint of step %d in storage: %s", there.step, reason
            )
            passed_over.append(f"step {there.step}: {reason}")
    except (NotFound, CheckpointError) as error:
        if newest < 0:
            raise
        _logger.warning(
            "The checkpoint in storage was not fetched; step %d of %s is used: %s",
            newest,
            folder,
            error,
        )
    if passed_over and not here:
        raise NoVerifiedCheckpoint(
            f"No checkpoint in storage verifies ({'; '.join(passed_over)}), and {folder} has none. Put a good copy "
            "there, or give another push_to to start over."
        )


def fetch_instead(
    remote: Remote, folder: Path, step: int, above: int, asked: FetchChoice = _ANY
) -> int | None:
    """Fetch an undamaged checkpoint from storage to replace `step`, which is damaged in `folder`.

    The newest undamaged checkpoint from `above` (exclusive) to `step` (inclusive) is fetched; the
    folder itself has `above`. The folder may lack this checkpoint, because a retention policy may
    have deleted it. A checkpoint of an abandoned line is fetched only if the user requested its
    step.

    Returns:
        The fetched step; None if there is no such checkpoint, or if it could not be fetched.
    """
    try:
        found = remote.scan(above=above, patience=_HURRIED if above >= 0 else None)
        offered = _offered(found, asked)
        left = left_by_newest(each.manifest for each in offered if each.manifest and asked.newer)
        for there in offered:
            if there.step <= step and not (there.manifest and is_abandoned(there.manifest, left)):
                reason = there.reason or _fetch(remote, folder, there)
                if not reason:
                    return there.step
                _logger.warning(
                    "Step %d could not be fetched from storage either: %s", there.step, reason
                )
    except (NotFound, CheckpointError) as error:  # the caller then tries an older checkpoint
        _logger.warning("Step %d could not be fetched from storage either: %s", step, error)
    return None


def _not_taken_away(
    remote: Remote,
    folder: Path,
    here: Sequence[CheckpointInfo],
    offered: Sequence[RemoteCheckpoint],
    *,
    above: int,
) -> Iterator[RemoteCheckpoint]:
    """Yield the newer checkpoints in storage from which training may continue.

    `above` is the folder's newest step, or -1 if it has none. Checkpoints that were deleted from
    the folder on purpose are left out, and so are checkpoints of abandoned lines. If the newest
    save of a step was deleted, earlier saves of that step are left out, too.
    """
    present = {info.step for info in here}
    abandoned = {info.step for info in here if info.abandoned}
    pushed = pushed_names(folder, remote.url) if above >= 0 else []
    taken_away: set[int] = set()
    line: list[Dated] = [info for info in here if not info.abandoned]
    left = left_by_newest([*line, *(each.manifest for each in offered if each.manifest)])
    for there in offered:
        if there.name in pushed and there.step not in present:
            if not taken_away:
                _logger.warning(
                    "Step %d is in storage but was removed from %s, so it is not fetched. "
                    "To restore it: Remote(%r).fetch(%d, %r).",
                    *(there.step, folder, remote.url, there.step, str(folder)),
                )
            taken_away.add(there.step)
        if there.step not in taken_away | abandoned and not (
            there.manifest and is_abandoned(there.manifest, left)
        ):
            yield there


def _offered(found: Sequence[RemoteCheckpoint], asked: FetchChoice) -> list[RemoteCheckpoint]:
    """Return the checkpoints that this run may fetch, and log the steps of all others."""
    offered = [each for each in found if asked.offers(each)]
    if others := sorted({each.step for each in found} - {each.step for each in offered}):
        _logger.info("Not fetched from storage, as they are of another run: steps %s.", others)
    return offered


def _of_another_run(remote: Remote, folder: Path, there: RemoteCheckpoint, run: str) -> str:
    of = "" if there.manifest is None else there.manifest.run
    return (
        f"{remote.url} has only checkpoints of another run (run {of!r}, step {there.step}), and this is run {run!r}. "
        f"Go on with that run (`holdfast run --resume {of}`, or run={of!r}), or give this one another push_to, or "
        "begin anew with Checkpointer(fresh=True) or `holdfast run --fresh`, which leave them there. To go on from "
        f"them as run {run!r}: Remote({remote.url!r}).fetch({there.step}, {str(folder)!r})."
    )


def _fetch(remote: Remote, folder: Path, there: RemoteCheckpoint) -> str:
    """Fetch a checkpoint; return "", or the damage that makes the one in storage unusable."""
    remove_leftovers(folder)
    try:
        remote.fetch(there, folder)
    except DamagedCheckpoint as error:
        return str(error)
    _logger.info("Fetched %s.", step_path(folder, there.step))
    return ""
