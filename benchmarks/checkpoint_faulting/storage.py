"""Use storage that fills up, is read-only, stands still, or fails requests.

The file systems and the S3 server are real. File systems are mounted in a mount namespace of the
process alone, and end with the process.
"""

import ctypes
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from checkpoint_faulting.ground import NEXT, STEPS, Ground
from checkpoint_faulting.oracle import RIGHT, Verdict, is_sentence, judge, leftovers
from checkpoint_faulting.state import per_rank_of, state_of
from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.format.paths import step_path
from holdfast.core.errors import BadUse, SaveFailed, StorageFailed

FULL: Final = "a full disk"
READ_ONLY: Final = "a read-only file system"
STALLED: Final = "storage that stands still, for less than a save may take"
GIVEN_UP: Final = "storage that stands still, for longer than a save may take"
REQUESTS: Final = "object storage of which 30% of the requests fail"
MOUNTED: Final = (FULL, READ_ONLY)
FROZEN: Final = (STALLED, GIVEN_UP)
SIZE: Final = "24m"
IMAGE_BYTES: Final = 96 << 20
PAGES: Final = 6
"""The number of pages around the end of a save's files up to which a disk is filled."""
TRAINS_ON_S: Final = 5.0
"""A longer call or update during a standstill of the storage counts as waiting for storage."""
TESTS: Final = Path(__file__).parents[2] / "tests" / "checkpoint"
_CLONE_NEWNS, _MS_PRIVATE = 0x20000, 0x44000


class Skipped(Exception):
    """A kind of fault that this machine cannot have; the message has the reason."""


def own_mounts() -> None:
    """Enter a new mount namespace.

    Raises:
        Skipped: that is not allowed here.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        os.geteuid()
        or libc.unshare(_CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, _MS_PRIVATE, None)
    ):
        raise Skipped("mounting a file system of one's own needs root")


def _run(*command: object) -> None:
    ended = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise Skipped(f"{command[0]} failed: {ended.stderr.strip()}")


def on_small_disk(kind: str, ground: Ground, folder: Path, count: int) -> list[Verdict] | str:
    """Save to a tmpfs that is full or read-only; return the reason if there is no tmpfs."""
    try:
        own_mounts()
        folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder)
    except Skipped as reason:
        return str(reason)
    chance = random.Random(f"{ground.seed}/{kind}")
    place = folder / "checkpoints"
    shutil.copytree(ground.base(1), place)
    step_bytes = sum(path.stat().st_size for path in step_path(place, STEPS[-1]).iterdir())
    sabotage = {FULL: _fill, READ_ONLY: _lock}[kind]
    verdicts = []
    with Checkpointer(place, keep=None, on_failure="warn") as ckpt:
        for _ in range(count):
            undo = sabotage(folder, step_bytes, chance)
            why = _save(ckpt, ground.seed)
            verdicts.append(_judge(why, ground.seed, place, undo, must_fail=kind == READ_ONLY))
            shutil.rmtree(step_path(place, NEXT), ignore_errors=True)
    return verdicts


def _fill(folder: Path, step_bytes: int, chance: random.Random) -> Callable[[], None]:
    """Return a function that fills a disk, mostly to near the end of a save's file."""
    near = chance.choice((0.0, 0.3, 0.6, 0.97, 1.0, 1.02, chance.random()))
    left_pages = max(0, int(step_bytes * near) // 4096 + chance.randint(-PAGES, PAGES))
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    filling = folder / "filling"
    with filling.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - 4096 * left_pages))
    return filling.unlink


def _lock(folder: Path, _step_bytes: int, _chance: random.Random) -> Callable[[], None]:
    _run("mount", "-o", "remount,ro", folder)
    return lambda: _run("mount", "-o", "remount,rw", folder)


def _save(ckpt: Checkpointer, seed: int) -> str:
    """Save; return "" if the save is durable, else the reason."""
    try:
        ckpt.save(NEXT, state_of(seed, NEXT), per_rank=per_rank_of(seed, NEXT, 0)).result()
    except SaveFailed as error:
        return str(error)
    return ""


def _judge(
    why: str, seed: int, place: Path, undo: Callable[[], None], *, must_fail: bool
) -> Verdict:
    if why and not is_sentence(why):
        return Verdict("crash", why)
    if must_fail:
        try:
            Checkpointer(place)
        except BadUse as error:
            if not is_sentence(str(error)):
                return Verdict("crash", str(error))
    undo()
    if not why and must_fail:
        return Verdict("silent", "it is said to be durable")
    least = STEPS[-1] if why else NEXT
    verdict = judge(place, seed, world_size=1, attested=(*STEPS, NEXT), least=least)
    if verdict.is_right and leftovers(place):
        return Verdict("left", str(leftovers(place)))
    return verdict


def on_frozen_disk(
    kind: str, ground: Ground, folder: Path, stall_s: float, count: int
) -> list[Verdict] | str:
    """Save to an ext4 that is frozen for `stall_s` seconds; training must go on meanwhile.

    Every other save is the first one, which finds files of a dead process.
    """
    image, mounted = folder / "image", folder / "mounted"
    try:
        own_mounts()
        mounted.mkdir(parents=True)
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", image)
        _run("mount", "-o", "loop", image, mounted)
    except (Skipped, FileNotFoundError) as reason:
        return str(reason)
    place = mounted / "checkpoints"
    shutil.copytree(ground.base(1), place)
    timeout_s = 600.0 if kind == STALLED else stall_s / 20
    verdicts = []
    for number in range(count):
        left = place / ".step-0000000001.dead.tmp"
        with Checkpointer(place, keep=None, on_failure="warn", timeout_s=timeout_s) as ckpt:
            if number % 2:
                ckpt.restore({})  # which takes the folder for this process, as the first save would
                left.mkdir()
            else:
                state = state_of(ground.seed, STEPS[0])
                ckpt.save(STEPS[0], state, per_rank=per_rank_of(ground.seed, STEPS[0], 0)).result()
            verdicts.append(_freeze(kind, ckpt, ground.seed, mounted, stall_s))
        if left.exists() and verdicts[-1] == RIGHT:
            verdicts[-1] = Verdict("left", str(left))
        shutil.rmtree(step_path(place, NEXT), ignore_errors=True)
    _run("umount", "--lazy", mounted)
    return verdicts


def _freeze(kind: str, ckpt: Checkpointer, seed: int, mounted: Path, stall_s: float) -> Verdict:
    """Save once while the file system stands still."""
    # In a session of its own: it thaws whatever becomes of this process, and of the name of the
    # folder. It begins to count once training has gone on, which its input's end says, or when that
    # has taken too long.
    words = [
        "sh",
        "-c",
        'timeout "$2" cat; sleep "$1"; exec fsfreeze --unfreeze .',
        "thaw",
        str(stall_s),
    ]
    thaw = subprocess.Popen(
        [*words, str(TRAINS_ON_S)], cwd=mounted, start_new_session=True, stdin=subprocess.PIPE
    )
    assert thaw.stdin is not None
    _run("fsfreeze", "--freeze", mounted)
    try:
        began_s = time.monotonic()
        handle = ckpt.save(NEXT, state_of(seed, NEXT), per_rank=per_rank_of(seed, NEXT, 0))
        ckpt.before_update()
        has_waited = time.monotonic() - began_s >= TRAINS_ON_S
        thaw.stdin.close()
        try:
            handle.result()
            why = ""
        except SaveFailed as error:
            why = str(error)
    finally:
        thaw.stdin.close()
        thaw.wait()
    if has_waited:
        return Verdict("stuck", "training waited for storage")
    if why and (kind == STALLED or not is_sentence(why)):
        return Verdict("stuck" if kind == STALLED else "crash", why)
    if why and (again := _save_in_time(ckpt, seed)):
        return Verdict("stuck", f"and then, though storage goes on: {again}")
    return judge(mounted / "checkpoints", seed, world_size=1, attested=(*STEPS, NEXT), least=NEXT)


def _save_in_time(ckpt: Checkpointer, seed: int) -> str:
    """Save until a killed process has left its system call."""
    for _ in range(5):
        if not (why := _save(ckpt, seed)):
            break
        time.sleep(0.2)
    return why


def in_object_storage(ground: Ground, folder: Path, failing: int) -> list[Verdict] | str:
    """Push and fetch through a proxy that fails 30% of the requests.

    Returns:
        A verdict for each of `failing` transfers that failed.
    """
    try:
        import moto.s3.models

        from holdfast.testing import s3
    except ImportError as error:
        return f"{error.name} is not installed"
    from holdfast.checkpoint.storage.remote import Remote

    sys.path.append(str(TESTS))  # the proxy is the tests'
    import storage_world

    moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1
    os.environ.update(
        AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="us-east-1"
    )
    verdicts = list[Verdict]()
    torch.set_num_threads(1)
    with (
        s3.serve() as url,
        storage_world.proxy(url, storage_world.by_chance(0.3, ground.seed)) as between,
    ):
        os.environ["AWS_ENDPOINT_URL"] = between.url
        for number in range(1_000_000):
            before = between.failed
            there = f"s3://{storage_world.new_bucket(url)}/runs"
            remote = Remote(there, patience=storage_world.QUICK, part_bytes=256 << 10)
            back = folder / str(number)
            try:
                for step in STEPS[-2:]:
                    remote.push(ground.checkpoint(1, step))
                    remote.fetch(step, back)
                verdict = judge(
                    back, ground.seed, world_size=1, attested=STEPS[-2:], least=STEPS[-1]
                )
            except StorageFailed as error:
                verdict = RIGHT if is_sentence(str(error)) else Verdict("crash", str(error))
            shutil.rmtree(back, ignore_errors=True)
            verdicts += [verdict] * (between.failed - before)
            if len(verdicts) >= failing:
                return verdicts[:failing]
    return verdicts
