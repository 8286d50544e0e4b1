"""The process that a shim has ready for the next attempt of its rank."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from holdfast.recover.shim import rank_shim
from holdfast.recover.shim.imports import Imports
from holdfast.recover.shim.rank_shim import Forked, Spawned, Warm
from holdfast.recover.shim.script import Script

FACTS = """
import os, signal, sys
print(os.getpid(), os.getppid(), "decimal" in sys.modules, os.environ.get("ADDED"), os.environ.get("CHANGED"),
      signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.pthread_sigmask(signal.SIG_BLOCK, []),
      len(os.listdir("/proc/self/fd")), sys.stdout.isatty(), file=sys.stderr)
"""


@pytest.fixture
def started(tmp_path):
    """A function that starts a trainer and returns it with its output's pipe."""
    pipes = []

    def start(warm, text):
        (tmp_path / "job.py").write_text(text)
        script = Script.of_command([sys.executable, str(tmp_path / "job.py")])
        output, theirs = os.pipe()
        trainer = warm.start(script, {"ADDED": "yes"}, "holdfast/2", theirs)
        os.close(theirs)
        pipes.append(os.fdopen(output))
        return trainer, pipes[-1]

    yield start
    for pipe in pipes:
        pipe.close()


@pytest.fixture
def warm(tmp_path):
    """A function that starts a warm process with a list of imports; each is killed at the end."""
    processes = []

    def start(*modules, environment=()):
        path = tmp_path / "imports.json"
        Imports(modules=modules, environment=dict(environment)).write(path)
        processes.append(Warm(["python", "job.py"], path))
        return processes[-1]

    yield start
    for one in processes:
        one.end()


@pytest.fixture
def install(tmp_path_factory, monkeypatch):
    """A function that makes a module which every process can import."""
    folder = tmp_path_factory.mktemp("installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    return lambda name, text: (folder / f"{name}.py").write_text(text)


def test_a_warm_process_forks_one_trainer_after_the_other(warm, started):
    process = warm("decimal", "a_module_that_is_not_there")
    assert process.process.args[-2:] == ["python", "job.py"]
    pids = set()
    for _ in range(2):
        trainer, output = started(process, FACTS)
        assert isinstance(trainer, Forked)
        assert trainer.wait()[0] == 0
        pid, parent, *facts = output.read().split(maxsplit=2)
        assert (int(pid), int(parent)) == (trainer.pid, process.process.pid)
        assert facts == [
            "True yes None True set() 4 False\n"
        ]  # three descriptors, and the listing's
        pids.add(pid)
    assert len(pids) == 2
    assert process.starts_again


def test_imports_see_the_variables_that_the_script_had_set_and_the_trainer_does_not(
    warm, started, install
):
    install("reads_it", "import os; SEEN = os.environ.get('CHANGED')")
    process = warm("reads_it", environment={"CHANGED": "here"})
    trainer, output = started(
        process, "import os, reads_it; print(reads_it.SEEN, os.environ.get('CHANGED'))"
    )
    assert trainer.wait()[0] == 0
    assert output.read() == "here None\n"


@pytest.mark.parametrize("path", ["", ":/libraries", "/libraries:"])
def test_modules_are_found_where_a_new_interpreter_finds_them(
    warm, started, tmp_path, monkeypatch, path
):
    """An empty word of PYTHONPATH is the working directory."""
    source = str(Path(rank_shim.__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", f"{source}:{path}")
    text = "import os, sys; print(sys.path, os.environ['PYTHONPATH'])"
    forked, output = started(warm("decimal"), text)
    assert forked.wait()[0] == 0
    again, new_output = started(Warm(["python", "job.py"]), text)
    assert again.wait()[0] == 0
    plain = subprocess.run(
        [sys.executable, str(tmp_path / "job.py")], capture_output=True, text=True, check=True
    )
    assert output.read() == new_output.read() == plain.stdout


def test_without_imports_the_process_becomes_the_trainer(started):
    process = Warm(["python", "job.py"])
    trainer, output = started(process, FACTS)
    assert isinstance(trainer, Spawned)
    assert trainer.wait()[0] == 0
    assert int(output.read().split()[0]) == process.process.pid
    assert not process.starts_again


THREADED = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


def test_what_has_threads_is_not_forked(warm, started, install):
    install("threaded", THREADED)
    process = warm("threaded")
    trainer, output = started(process, "import sys; print('threaded' in sys.modules); sys.exit(5)")
    assert isinstance(trainer, Spawned)
    assert trainer.wait()[0] == 5
    assert output.read() == "True\n"


@pytest.mark.parametrize(
    ("text", "returncode"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("raise KeyError('tokens')", 1),
    ],
)
def test_a_forked_trainer_ends_as_any_process(warm, started, text, returncode):
    before_s = time.monotonic()
    trainer, output = started(warm("decimal"), text)
    ended, at_s = trainer.wait()
    assert ended == returncode
    assert before_s < at_s <= time.monotonic()
    assert returncode != 1 or output.read().endswith("KeyError: 'tokens'\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_forked_trainer_can_be_ended_also_where_it_is_stopped(warm, started, number):
    trainer, output = started(warm("decimal"), "print('here'); import time; time.sleep(1000)")
    output.readline()
    if number == signal.SIGKILL:
        trainer.send_signal(signal.SIGSTOP)
    trainer.send_signal(number)
    assert trainer.wait()[0] == -number
    trainer.send_signal(number)  # of a process that is gone: nothing


def test_the_trainer_ends_with_the_process_that_forked_it(warm, started):
    process = warm("decimal")
    trainer, output = started(process, "print('here'); import time; time.sleep(1000)")
    output.readline()
    child = psutil.Process(trainer.pid)
    process.process.kill()
    assert trainer.wait()[0] == -signal.SIGKILL
    child.wait(60)
    assert not process.starts_again


def test_a_process_that_is_gone_starts_nothing(warm, started):
    process = warm("decimal")
    process.process.kill()
    process.process.wait()
    trainer, _ = started(process, FACTS)
    assert trainer is None


FAILS = "import sys, types; sys.modules['fails.part'] = types.ModuleType('part'); 1 / 0"
OPENS = "DEVICE = open('/dev/full')"


@pytest.mark.parametrize("text", [FAILS, OPENS, "raise SystemExit(0)"])
def test_imports_that_go_wrong_leave_the_start_to_a_new_interpreter(warm, started, install, text):
    """A package that is there in part, or a device that is open, would be the trainer's."""
    install("goes_wrong", text)
    process = warm("goes_wrong")
    assert started(process, FACTS)[0] is None
    assert process.process.returncode is not None


def test_what_a_file_beside_the_script_hides_is_left_to_a_new_interpreter(warm, started, tmp_path):
    (tmp_path / "psutil.py").write_text("HIDDEN = True")
    assert started(warm("psutil"), FACTS)[0] is None
    trainer, output = started(Warm(["python", "job.py"]), "import psutil; print(psutil.HIDDEN)")
    assert trainer.wait()[0] == 0
    assert output.read() == "True\n"


def test_imports_that_cannot_be_read_leave_the_start_to_a_new_interpreter(tmp_path, started):
    (tmp_path / "imports.json").write_text("{")
    assert started(Warm(["python", "job.py"], tmp_path / "imports.json"), FACTS)[0] is None


def test_an_import_that_does_not_end_is_given_up(warm, started, install, monkeypatch):
    install("waits", "import time; time.sleep(1000)")
    monkeypatch.setattr(rank_shim, "READY_TIMEOUT_S", 0.5)
    process = warm("waits")
    assert started(process, FACTS)[0] is None
    assert process.process.returncode == -signal.SIGKILL


def test_threads_that_end_before_a_fork_do_not_keep_from_it(warm, started, monkeypatch):
    """numpy's OpenBLAS has a pool of threads, and ends the pool before a fork."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = "import numpy; print((numpy.ones((500, 500)) @ numpy.ones((500, 500)))[0, 0])"
    trainer, output = started(warm("numpy"), text)
    assert isinstance(trainer, Forked)
    assert trainer.wait()[0] == 0
    assert output.read() == "500.0\n"


def test_a_signal_to_the_waiting_process_is_not_the_trainers(warm, started, install):
    """As of `pkill -f train.py`: SIGTERM is blocked below the guard."""
    install("threaded", THREADED)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        processes = [warm("threaded"), warm("decimal")]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    for process in processes:
        process.process.send_signal(signal.SIGTERM)
        trainer, _ = started(process, "print('here')")
        assert trainer.wait()[0] == 0


def test_installed_modules_and_changed_variables_are_learnt(tmp_path, monkeypatch):
    """Not the user's own modules: they may be edited before the next start."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_the_user.py").touch()
    import of_the_user  # type: ignore[import-not-found] # noqa: F401 - it is there to be found

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("WANDB_API_KEY", "a word of no one else")
    learnt = Imports.of_this_process()
    learnt.write(tmp_path / "imports.json")
    assert Imports.read(tmp_path / "imports.json") == learnt
    assert "a word of no one else" not in (tmp_path / "imports.json").read_text()
    assert {"json", "psutil", "holdfast.recover.shim.script"} <= set(learnt.modules)
    assert not {"of_the_user", "__main__"} & set(learnt.modules)
    assert learnt.environment["OMP_NUM_THREADS"] == "7"
    assert json.loads((tmp_path / "imports.json").read_text())["modules"] == list(learnt.modules)
