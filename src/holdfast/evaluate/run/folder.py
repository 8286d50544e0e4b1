"""Lock the folder of an evaluation, and check folders before any work begins."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

from holdfast.core.errors import BadUse
from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.run.options import EvaluateOptions


@contextmanager
def holding(paths: EvaluationPaths) -> Iterator[None]:
    """Lock an evaluation for one command, inside a `with` block.

    Raises:
        BadUse: another command holds the lock, or the folder cannot be written.
    """
    try:
        paths.state.mkdir(parents=True, exist_ok=True)
        file = os.open(paths.state / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise BadUse(
            f"{paths.root}: {error.strerror}. Set HOLDFAST_HOME to a folder of yours."
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise BadUse(
            f"{paths.evaluation_id} is running. Wait for it, or stop the command that runs it."
        ) from error
    try:
        yield
    finally:
        os.close(file)


def check_is_ours(paths: EvaluationPaths) -> None:
    """Check that the evaluation's folder holds no other files, since Holdfast deletes files there.

    Raises:
        BadUse: the folder holds other files.
    """
    if not paths.root.is_dir() or paths.suite.exists():
        return
    if others := sorted(path.name for path in paths.root.iterdir() if path != paths.state):
        raise BadUse(
            f"{paths.root} holds something else: {', '.join(others[:3])}. Choose another --id."
        )


def check_output(options: EvaluateOptions) -> None:
    """Check before any work that the folder for results exists or can be created, and is writable.

    Raises:
        BadUse: the folder cannot be created or written.
    """
    if options.output is None:
        return
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=options.output):
            pass
    except OSError as error:
        raise BadUse(
            f"Nothing can be written into {options.output}: {error.strerror}. Give another -o."
        ) from error
