"""Test the Slurm workers on a real Slurm, private to this file."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from cluster_tasks import (
    await_true,
    exit_codes,
    none_lives,
    noted_pids,
    python_task,
    sleeping_task,
    started,
)

from holdfast.cluster import workers
from holdfast.cluster.slurm import SlurmWorkers
from holdfast.core.errors import BadUse
from holdfast.testing.slurm import PrivateSlurm

pytestmark = pytest.mark.slow  # a whole cluster is started

if reason := PrivateSlurm.missing():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with PrivateSlurm(tmp_path_factory.mktemp("s"), nodes=2, cpus=2) as slurm:
        yield slurm


@pytest.fixture
def slurm(cluster, monkeypatch):
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    yield cluster
    await_true(
        lambda: cluster.run(["squeue", "--noheader"]) == ""
    )  # no test leaves jobs to the next


def test_an_array_with_a_failing_task_and_one_whose_node_dies(slurm, tmp_path):
    tasks = [python_task(tmp_path, f"good-{number}", f"print({number})") for number in range(4)]
    tasks.append(python_task(tmp_path, "bad", "raise SystemExit(7)"))
    note = tmp_path / "node"
    # In its first start, the task sleeps; on the node of its requeue, the task runs to its end.
    tasks.append(
        python_task(
            tmp_path,
            "victim",
            f"import os, pathlib, time\nnote = pathlib.Path({str(note)!r})\nfirst = not note.exists()\n"
            "print('first' if first else 'second', flush=True)\n"
            "note.write_text(os.environ['SLURMD_NODENAME'] + '\\n')\ntime.sleep(600 if first else 0)",
        )
    )

    def kill() -> None:
        await_true(lambda: note.exists() and note.read_text().endswith("\n"))
        node = note.read_text().strip()
        slurm.kill_node(node)
        slurm.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=dead"])
        dead.append(node)

    dead: list[str] = []
    killer = threading.Thread(target=kill)
    killer.start()
    finished = list(SlurmWorkers(grace_s=20).run(tasks, folder=tmp_path / "f"))
    killer.join()
    slurm.restart_node(dead[0])
    assert exit_codes(finished) == {
        **{f"good-{number}": 0 for number in range(4)},
        "bad": 7,
        "victim": 0,
    }
    logs = {each.task.name: each.log.read_text() for each in finished}
    assert logs["good-3"] == "3\n"
    assert logs["victim"] == "first\nsecond\n"
    assert not list((tmp_path / "f").glob("slurm-*"))

    # Resume: only the failed task runs.
    tasks[4] = python_task(tmp_path, "bad")
    finished = list(workers("slurm").run(tasks, folder=tmp_path / "f"))
    assert [each.task.name for each in finished if not each.skipped] == ["bad"]
    assert set(exit_codes(finished).values()) == {0}


def test_leaving_early_cancels_the_array(slurm, tmp_path):
    tasks = [
        python_task(tmp_path, "quick"),
        sleeping_task(tmp_path, "slow"),
        sleeping_task(tmp_path, "never"),
    ]
    running = SlurmWorkers(limit=2).run(tasks, folder=tmp_path / "f")
    assert next(running).task.name == "quick"
    pids = noted_pids(tmp_path, "slow")
    running.close()
    await_true(lambda: none_lives(pids))


def test_an_element_that_somebody_cancels_has_failed(slurm, tmp_path):
    def cancel() -> None:
        noted_pids(tmp_path, "slow")
        slurm.run(
            ["scancel", *slurm.run(["squeue", "--noheader", "--array", "--format=%i"]).split()]
        )

    canceller = threading.Thread(target=cancel)
    canceller.start()
    [finished] = SlurmWorkers(grace_s=1).run(
        [sleeping_task(tmp_path, "slow")], folder=tmp_path / "f"
    )
    canceller.join()
    assert finished.exit_code != 0


def test_what_a_killed_caller_left_is_cancelled_by_the_next_run(slurm, tmp_path):
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nfrom cluster_tasks import sleeping_task\nfrom holdfast.cluster import workers\n"
        f"place = Path({str(tmp_path)!r})\n"
        "list(workers('slurm').run([sleeping_task(place, 'slow')], folder=place / 'f'))"
    )
    with started([sys.executable, "-c", script], env=dict(os.environ)) as caller:
        pids = noted_pids(tmp_path, "slow")
        caller.send_signal(signal.SIGKILL)
        caller.wait(timeout=90)
    assert not none_lives(pids)
    finished = list(SlurmWorkers().run([python_task(tmp_path, "slow")], folder=tmp_path / "f"))
    assert exit_codes(finished) == {"slow": 0}
    await_true(lambda: none_lives(pids))


def test_an_unknown_partition_is_bad_use(slurm, tmp_path):
    unknown = workers("slurm", sbatch_options=["--partition=nosuch"])
    with pytest.raises(BadUse, match="invalid partition"):
        list(unknown.run([python_task(tmp_path, "t")], folder=tmp_path / "f"))
