"""Run tasks in a Ray cluster, or in a Ray of this machine; `pip install 'holdfast[ray]'`."""

import logging
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.cluster.leash import run_on_leash
from holdfast.cluster.local import core_count
from holdfast.cluster.tasks import Finished, Task, check_tasks, log_of, settle, skip_finished
from holdfast.core.errors import BadUse

_OBJECT_STORE_BYTES = 80 * 2**20  # near Ray's minimum, since the store holds only exit codes
_MAX_RETRIES = 2  # after the death of a worker or node; a task that ended is not run again


def demand_ray() -> None:
    """Check that Ray is installed.

    Raises:
        BadUse: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise BadUse("Ray is not installed. Run pip install 'holdfast[ray]'.")


@dataclass(frozen=True, kw_only=True)
class RayWorkers:
    """Run each task as a remote function with one CPU.

    Attributes:
        limit: the most tasks that run at the same time; None: as many as the cluster, or this
            machine's cores, allow.

    Raises:
        BadUse: Ray is not installed.
    """

    limit: int | None = None

    def __post_init__(self) -> None:
        demand_ray()

    def run(self, tasks: Sequence[Task], *, folder: Path) -> Generator[Finished, None, None]:
        """Run the tasks; see `Workers.run`.

        Raises:
            BadUse: see `Workers.run`; also, when the first result is requested, if no Ray answers
                at RAY_ADDRESS.
        """
        check_tasks(tasks)
        folder.mkdir(parents=True, exist_ok=True)
        return self._run(tasks, folder.absolute())

    def _run(self, tasks: Sequence[Task], folder: Path) -> Generator[Finished, None, None]:
        skipped, waiting = skip_finished(tasks, folder)
        yield from skipped
        if not waiting:
            return
        waiting.reverse()
        with connected(self.limit) as ray:
            remote = ray.remote(num_cpus=1, max_retries=_MAX_RETRIES)(_run_task)
            environment, working_folder = dict(os.environ), str(Path.cwd())
            running: dict[Any, Task] = {}
            try:
                while waiting or running:
                    while waiting and (self.limit is None or len(running) < self.limit):
                        task = waiting.pop()
                        result, log = str(task.result.absolute()), str(log_of(task, folder))
                        running[
                            remote.remote(task.command, result, log, environment, working_folder)
                        ] = task
                    [ended], _ = ray.wait(list(running), num_returns=1)
                    task, why = running.pop(ended), None
                    try:
                        exit_code = ray.get(ended)
                    except ray.exceptions.RayError as error:
                        # The workers died too often, or could not run the task.
                        exit_code, why = 1, str(error)
                    yield settle(task, exit_code, folder, why=why)
            finally:
                for each in running:
                    ray.cancel(each, force=True)  # kills the worker; the leash kills the command
                if running:
                    ray.wait(list(running), num_returns=len(running), timeout=10)


def _run_task(
    command: Sequence[str], result: str, log: str, environment: dict[str, str], working_folder: str
) -> int:
    """Run a task on a worker, with the driver's environment instead of the worker's."""
    if Path(result).exists():  # a retry: the first worker died after the command's end
        return 0
    return run_on_leash(
        command, Path(log), environment=environment, working_folder=Path(working_folder)
    )


@contextmanager
def connected(limit: int | None) -> Iterator[Any]:
    """Connect to Ray; after the block, disconnect, and stop a Ray that was started here.

    If the caller is already connected, that connection is used, and stays open.

    Args:
        limit: the number of CPUs of a Ray that is started here; None: this machine's cores.

    Raises:
        BadUse: no Ray answers at RAY_ADDRESS, or none starts here.
    """
    previous = os.environ.get("RAY_USAGE_STATS_ENABLED")
    # Ray reads the variable on import, and in the processes that `init` starts.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray

        if ray.is_initialized():
            yield ray
            return
        address = os.environ.get("RAY_ADDRESS")
        own: dict[str, Any] = {
            "num_cpus": limit or core_count(),
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
        try:
            # "local": otherwise Ray would join any other Ray that runs on this machine.
            ray.init(
                address=address or "local",
                logging_level=logging.ERROR,
                log_to_driver=False,
                **({} if address else own),
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise BadUse(
                f"No Ray cluster answers at RAY_ADDRESS={address}: {error}. Start it, or unset RAY_ADDRESS."
                if address
                else f"Ray does not start on this machine: {error}. Its logs are in /tmp/ray/session_latest/logs."
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()
    finally:
        if previous is None:
            os.environ.pop("RAY_USAGE_STATS_ENABLED", None)
        else:
            os.environ["RAY_USAGE_STATS_ENABLED"] = previous
