"""Run the trainer's side of object storage: control the pushing process, and fetch checkpoints."""

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
"""The patience with storage if the folder has a checkpoint to continue from."""
_logger = logging.getLogger("holdfast")


class Pusher:
    """Keep storage up to date with a folder, from `start` to `close`; one instance for each job."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        keep: int | None,
        on_message: Callable[[dict[str, Any]], None],
    ) -> None:
        """Create the pusher, without a look at the folder; `start` starts its process.

        Args:
            folder: the checkpoint folder.
            url: the storage, see `Remote`.
            keep: the most checkpoints in storage; None for all.
            on_message: called with each message of the pushing process, see `upload_process`.

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
        """Start the process if it does not run, also after it has died.

        If the process cannot be started, a warning is logged and training continues; the next save
        calls this method again.
        """
        self._is_needed = True
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            _logger.warning("The process that pushes checkpoints is started again: it died.")
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
        """End the process once the newest checkpoint is in storage.

        The process gives up after ten minutes of failed pushes. This method waits for the end only
        with `wait`, and at most ten minutes after the process's last message. While messages come,
        the time limit of the job's section starts anew.
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
        """Return the exit status of the process; None if it makes no progress."""
        heard_at_s = time.monotonic()
        while time.monotonic() - heard_at_s <= _SILENT_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_LOOK_EVERY_S)
                assert self._listener is not None, "it is started with the process"
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
class Asked:
    """Decide which checkpoints of the storage may be fetched.

    Attributes:
        run: the name of this run. If it is not empty, checkpoints of runs with another name are not
            fetched.
        is_fresh: whether checkpoints of runs without a name are not fetched either.
        newer: whether newer checkpoints are fetched. Otherwise one step is requested, which may be
            of an abandoned line.
    """

    run: str = ""
    is_fresh: bool = False
    newer: bool = True

    def offers(self, there: RemoteCheckpoint) -> bool:
        """Return True if the checkpoint may be fetched."""
        of = "" if there.manifest is None else there.manifest.run
        return of == self.run or not (self.is_fresh or (of and self.run))


_ANY: Final = Asked()


def has_any(pusher: Pusher | None, asked: Asked) -> bool:
    """Return True if storage has a checkpoint that `restore` would take or refuse.

    Raises:
        NotFound, StorageFailed: storage cannot be reached.
    """
    if pusher is None or (asked.is_fresh and not asked.run):
        return False
    return any(asked.offers(each) or not asked.is_fresh for each in pusher.remote.scan())


def fetch_together(
    ranks: Ranks, remote: Remote, folder: Path, asked: Asked
) -> Callable[[int, int], int | None]:
    """Fetch a newer checkpoint, if `asked.newer`, and return `fetch_instead` for all ranks.

    This function and the returned one are collective.
    """
    at_length = functools.partial(
        ranks.first_at_length, signs=lambda: remote.signs, section="restore"
    )
    if asked.newer:
        at_length(functools.partial(fetch_newer, remote, folder, asked))

    def instead(damaged: int, above: int) -> int | None:
        return at_length(functools.partial(fetch_instead, remote, folder, damaged, above, asked))

    return instead


def fetch_newer(remote: Remote, folder: Path, asked: Asked = _ANY) -> None:
    """Fetch the newest whole checkpoint of the line in storage, unless `folder` has one as new.

    A checkpoint that was pushed from the folder and deleted there was removed on purpose. It is not
    fetched again, and a warning is logged. If the fetch fails and the folder has a checkpoint, a
    warning is logged, too.

    Raises:
        BadUse: storage has checkpoints of another run only, and the folder has none.
        NotFound, StorageFailed: storage cannot be reached, and the folder has no checkpoint.
        CheckpointError: the disk is full, and the folder has no checkpoint.
        NoVerifiedCheckpoint: no checkpoint in storage is whole, and the folder has none.
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
            "What storage has was not fetched, step %d of %s is taken: %s", newest, folder, error
        )
    if passed_over and not here:
        raise NoVerifiedCheckpoint(
            f"No checkpoint in storage verifies ({'; '.join(passed_over)}), and {folder} has none. Put a good copy "
            "there, or give another push_to to start over."
        )


def fetch_instead(
    remote: Remote, folder: Path, step: int, above: int, asked: Asked = _ANY
) -> int | None:
    """Fetch a whole checkpoint from storage in place of `step`, which is damaged in `folder`.

    The newest checkpoint of `step`, or of an older step above `above`, is fetched; the folder has
    `above` itself. A retention policy may have deleted checkpoints in this range, so a checkpoint
    that is missing in the folder is fetched, too. A checkpoint of an abandoned line is fetched only
    if its step is requested.

    Returns:
        The fetched step; None if there is none, or it could not be fetched.
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
                    "Step %d was not to be had from storage either: %s", there.step, reason
                )
    except (NotFound, CheckpointError) as error:  # the caller then tries an older checkpoint
        _logger.warning("Step %d was not to be had from storage either: %s", step, error)
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

    `above` is the folder's newest step, -1 if there is none. Checkpoints that were deleted from the
    folder on purpose are left out, and so are those of abandoned lines. If the newest save of a
    step was deleted, the saves that it replaced are left out, too.
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
                    "Step %d is in storage and was taken away from %s, so it is not fetched. "
                    "To go on from it: Remote(%r).fetch(%d, %r).",
                    *(there.step, folder, remote.url, there.step, str(folder)),
                )
            taken_away.add(there.step)
        if there.step not in taken_away | abandoned and not (
            there.manifest and is_abandoned(there.manifest, left)
        ):
            yield there


def _offered(found: Sequence[RemoteCheckpoint], asked: Asked) -> list[RemoteCheckpoint]:
    """Remove the checkpoints of other runs."""
    offered = [each for each in found if asked.offers(each)]
    if others := sorted({each.step for each in found} - {each.step for each in offered}):
        _logger.info("Not fetched from storage, as they are of another run: steps %s.", others)
    return offered


def _of_another_run(remote: Remote, folder: Path, there: RemoteCheckpoint, run: str) -> str:
    of = "" if there.manifest is None else there.manifest.run
    return (
        f"{remote.url} has checkpoints of another run alone (run {of!r}, step {there.step}), and this is run {run!r}. "
        f"Go on with that run (`holdfast run --resume {of}`, or run={of!r}), or give this one another push_to, or "
        "begin anew with Checkpointer(fresh=True) or `holdfast run --fresh`, which leave them there. To go on from "
        f"them as run {run!r}: Remote({remote.url!r}).fetch({there.step}, {str(folder)!r})."
    )


def _fetch(remote: Remote, folder: Path, there: RemoteCheckpoint) -> str:
    """Fetch a checkpoint; return why the one in storage cannot be used, or "" if it was fetched."""
    remove_leftovers(folder)
    try:
        remote.fetch(there, folder)
    except DamagedCheckpoint as error:
        return str(error)
    _logger.info("Fetched %s.", step_path(folder, there.step))
    return ""
