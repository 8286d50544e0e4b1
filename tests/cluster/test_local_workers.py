import contextlib
import os
import signal
import subprocess
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

from holdfast.cluster import Task, workers
from holdfast.cluster.leash import release, start_on_leash
from holdfast.core.errors import BadUse


def test_every_task_finishes_once_with_its_exit_code_and_log(tmp_path):
    tasks = [
        python_task(tmp_path, f"good-{number}", f"print('said {number}')") for number in range(3)
    ]
    tasks.append(python_task(tmp_path, "bad", "raise SystemExit(7)"))
    tasks.append(Task(name="absent", command=("/no/such/program",), result=tmp_path / "absent"))
    finished = list(workers("local", limit=2).run(tasks, folder=tmp_path / "logs"))
    assert exit_codes(finished) == {"good-0": 0, "good-1": 0, "good-2": 0, "bad": 7, "absent": 127}
    logs = {each.task.name: each.log.read_text() for each in finished}
    assert logs["good-1"] == "said 1\n"
    assert "cannot start /no/such/program" in logs["absent"]
    assert not any(each.skipped for each in finished)


def test_a_worker_killed_mid_task_fails_that_task_alone_and_a_second_run_does_only_that_one(
    tmp_path,
):
    tasks = [
        python_task(tmp_path, "first"),
        sleeping_task(tmp_path, "victim"),
        python_task(tmp_path, "last"),
    ]

    def kill() -> None:
        os.kill(noted_pids(tmp_path, "victim")[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    finished = list(workers("local", limit=2).run(tasks, folder=tmp_path / "logs"))
    killer.join()
    assert exit_codes(finished) == {"first": 0, "victim": -signal.SIGKILL, "last": 0}
    assert none_lives(noted_pids(tmp_path, "victim")), "its child in another session went on"
    assert not tasks[1].result.exists()

    stamps = {task.name: task.result.stat().st_mtime_ns for task in tasks if task.result.exists()}
    again = [tasks[0], python_task(tmp_path, "victim"), tasks[2]]
    finished = list(workers("local").run(again, folder=tmp_path / "logs"))
    assert {each.task.name: each.skipped for each in finished} == {
        "first": True,
        "victim": False,
        "last": True,
    }
    assert set(exit_codes(finished).values()) == {0}
    assert stamps == {name: (tmp_path / f"{name}.result").stat().st_mtime_ns for name in stamps}


def test_a_command_that_ends_well_without_its_result_has_failed_and_the_log_says_why(tmp_path):
    [finished] = workers("local").run(
        [Task(name="t", command=("true",), result=tmp_path / "r")], folder=tmp_path
    )
    assert finished.exit_code == 1
    assert "ended with 0, but" in finished.log.read_text()


def test_a_result_decides_over_the_exit_code_as_it_will_on_resume(tmp_path):
    command = ("sh", "-c", f"echo whole > {tmp_path}/r; exit 5")
    [finished] = workers("local").run(
        [Task(name="t", command=command, result=tmp_path / "r")], folder=tmp_path
    )
    assert finished.exit_code == 0


def test_no_more_than_limit_run_at_a_time_and_so_many_do(tmp_path):
    # Each task waits until a second one runs: with fewer than two at a time this test would not
    # end.
    (tmp_path / "at-work").mkdir()
    count = (
        f"import os, pathlib, time\nplace = pathlib.Path({str(tmp_path / 'at-work')!r})\n"
        "(place / str(os.getpid())).touch()\n"
        "while (seen := len(list(place.iterdir()))) < 2: time.sleep(0.01)\n"
        "print(seen)"
    )
    tasks = [python_task(tmp_path, f"t{number}", count) for number in range(2)]
    assert exit_codes(workers("local", limit=2).run(tasks, folder=tmp_path / "a")) == {
        "t0": 0,
        "t1": 0,
    }

    # Fails if another task holds the one place.
    alone = f"import os\nos.mkdir({str(tmp_path / 'place')!r})\nprint(1)\nos.rmdir({str(tmp_path / 'place')!r})"
    tasks = [python_task(tmp_path, f"alone{number}", alone) for number in range(4)]
    assert set(
        exit_codes(workers("local", limit=1).run(tasks, folder=tmp_path / "b")).values()
    ) == {0}


def test_leaving_the_loop_ends_what_runs_with_its_descendants(tmp_path):
    tasks = [
        python_task(tmp_path, "quick"),
        sleeping_task(tmp_path, "a"),
        sleeping_task(tmp_path, "b"),
    ]
    with contextlib.closing(
        workers("local", limit=3).run(tasks, folder=tmp_path / "logs")
    ) as running:
        assert next(running).task.name == "quick"
        pids = noted_pids(tmp_path, "a") + noted_pids(tmp_path, "b")
        assert not none_lives(pids)
    assert none_lives(pids)


def test_a_leash_that_is_killed_itself_still_ends_the_command_with_its_descendants(tmp_path):
    leashed = start_on_leash(sleeping_task(tmp_path, "a").command, tmp_path / "log")
    pids = noted_pids(tmp_path, "a")
    leashed.kill()
    assert release(leashed) == -signal.SIGKILL
    await_true(lambda: none_lives(pids))


def test_an_error_of_the_caller_ends_what_runs(tmp_path):
    tasks = [python_task(tmp_path, "quick"), sleeping_task(tmp_path, "a")]

    def fail_in_the_loop() -> None:
        for _ in workers("local", limit=2).run(tasks, folder=tmp_path / "logs"):
            noted_pids(tmp_path, "a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_loop()
    assert none_lives(noted_pids(tmp_path, "a"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_caller_that_is_stopped(tmp_path, number):
    here = str(Path(__file__).parent)
    script = (
        f"import sys; sys.path.insert(0, {here!r})\n"
        "from pathlib import Path\nfrom cluster_tasks import sleeping_task\nfrom holdfast.cluster import workers\n"
        f"place = Path({str(tmp_path)!r})\n"
        "list(workers('local', limit=2).run([sleeping_task(place, n) for n in 'ab'], folder=place / 'logs'))"
    )
    with started([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as caller:
        pids = noted_pids(tmp_path, "a") + noted_pids(tmp_path, "b")
        assert not none_lives(pids)
        caller.send_signal(number)
        caller.wait(timeout=90)
    await_true(lambda: none_lives(pids))


def test_what_cannot_be_run_is_refused_at_once(tmp_path):
    one = python_task(tmp_path, "one")
    local = workers("local")
    with pytest.raises(BadUse, match="Two tasks are named one"):
        local.run(
            [one, Task(name="one", command=("true",), result=tmp_path / "x")], folder=tmp_path
        )
    with pytest.raises(BadUse, match="both write"):
        local.run([one, Task(name="two", command=("true",), result=one.result)], folder=tmp_path)
    with pytest.raises(BadUse, match="is not a file name"):
        local.run([Task(name="../x", command=("true",), result=tmp_path / "x")], folder=tmp_path)
    with pytest.raises(BadUse, match="has no command"):
        local.run([Task(name="x", command=(), result=tmp_path / "x")], folder=tmp_path)


def test_choosing_workers(monkeypatch):
    with pytest.raises(BadUse, match="Choose one of local, slurm, ray"):
        workers("pbs")
    with pytest.raises(BadUse, match="1 or more"):
        workers("local", limit=0)
    with pytest.raises(BadUse, match="choose slurm"):
        workers("local", sbatch_options=["--partition=x"])
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BadUse, match="There is no sbatch on this machine"):
        workers("slurm")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadUse, match=r"pip install 'holdfast\[ray\]'"):
        workers("ray")
