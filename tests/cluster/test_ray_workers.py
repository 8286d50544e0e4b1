"""Test the Ray workers on a real Ray of this machine."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from cluster_tasks import await_true, exit_codes, none_lives, noted_pids, python_task, sleeping_task

from deferred import Deferred, needs
from holdfast.cluster import workers

pytestmark = [
    pytest.mark.slow,  # a whole cluster is started
    needs("ray", "Ray is not installed (pip install 'holdfast[ray]')"),
]

ray = Deferred("ray")


@pytest.fixture(scope="module")
def standing_ray():
    """Start a Ray that no run may stop."""
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def test_a_ray_of_its_own_runs_every_task_and_is_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tasks = [python_task(tmp_path, f"good-{number}", f"print({number})") for number in range(4)]
    tasks.append(python_task(tmp_path, "bad", "raise SystemExit(7)"))
    tasks[0].result.write_text("from before")
    finished = list(workers("ray", limit=2).run(tasks, folder=tmp_path / "f"))
    assert exit_codes(finished) == {**{f"good-{number}": 0 for number in range(4)}, "bad": 7}
    assert [each.task.name for each in finished if each.skipped] == ["good-0"]
    assert {each.task.name: each.log.read_text() for each in finished[1:]}["good-3"] == "3\n"
    assert tasks[0].result.read_text() == "from before"
    assert not ray.is_initialized()
    assert "RAY_USAGE_STATS_ENABLED" not in os.environ


def test_a_task_whose_worker_is_killed_runs_again_elsewhere(standing_ray, tmp_path):
    # In its first start, the task records Ray's worker and waits to be killed.
    note = tmp_path / "worker"
    before = (
        f"import os, pathlib, psutil, time\nnote = pathlib.Path({str(note)!r})\n"
        "if not note.exists():\n"
        "    worker = next(p for p in psutil.Process().parents() if p.cmdline()[0].startswith('ray::'))\n"
        "    note.write_text(f'{worker.pid} {os.getpid()}\\n')\n    time.sleep(600)"
    )

    def kill() -> None:
        await_true(lambda: note.exists() and note.read_text().endswith("\n"))
        os.kill(int(note.read_text().split()[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    tasks = [python_task(tmp_path, "victim", before), python_task(tmp_path, "other")]
    finished = list(workers("ray").run(tasks, folder=tmp_path / "f"))
    killer.join()
    assert exit_codes(finished) == {"victim": 0, "other": 0}
    await_true(lambda: none_lives([int(note.read_text().split()[1])]))
    assert ray.is_initialized(), "it stopped a Ray that was not its own"


def test_leaving_early_ends_what_runs(standing_ray, tmp_path):
    tasks = [
        sleeping_task(tmp_path, "slow"),
        python_task(tmp_path, "quick"),
        sleeping_task(tmp_path, "never"),
    ]
    running = workers("ray", limit=2).run(tasks, folder=tmp_path / "f")
    assert next(running).task.name == "quick"
    pids = noted_pids(tmp_path, "slow")
    running.close()
    await_true(lambda: none_lives(pids))


def test_the_ray_at_ray_address_is_used_and_gets_the_callers_environment(standing_ray, tmp_path):
    script = (
        "import sys\nfrom pathlib import Path\nfrom holdfast.cluster import Task, workers\n"
        "place = Path(sys.argv[1])\n"
        "command = ('sh', '-c', 'echo $SAID $PWD > tmp && mv tmp result')\n"
        "[end] = workers('ray').run([Task(name='t', command=command, result=place / 'result')], folder=place / 'f')\n"
        "sys.exit(end.exit_code)"
    )
    environment = {**os.environ, "RAY_ADDRESS": standing_ray, "SAID": "hello"}
    argv = [sys.executable, "-W", "error", "-c", script, str(tmp_path)]
    done = subprocess.run(
        argv,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "result").read_text() == f"hello {tmp_path}\n"
