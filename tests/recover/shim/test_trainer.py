"""The process that a shim has ready for the next attempt of its rank."""

import json
import os
import signal
import sys
import time

import psutil
import pytest

from holdfast.recover.shim.imports import Imports
from holdfast.recover.shim.rank_shim import Child, Forked, Warm
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
    warm, started, tmp_path, monkeypatch
):
    (tmp_path / "reads_it.py").write_text("import os; SEEN = os.environ.get('CHANGED')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    process = warm("reads_it", environment={"CHANGED": "here"})
    trainer, output = started(
        process, "import os, reads_it; print(reads_it.SEEN, os.environ.get('CHANGED'))"
    )
    assert trainer.wait()[0] == 0
    assert output.read() == "here None\n"


def test_without_imports_the_process_becomes_the_trainer(started):
    process = Warm(["python", "job.py"])
    trainer, output = started(process, FACTS)
    assert isinstance(trainer, Child)
    assert trainer.wait()[0] == 0
    assert int(output.read().split()[0]) == process.process.pid
    assert not process.starts_again


def test_what_has_threads_is_not_forked(warm, started, tmp_path, monkeypatch):
    text = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    (tmp_path / "threaded.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    process = warm("threaded")
    trainer, output = started(process, "import sys; print('threaded' in sys.modules); sys.exit(5)")
    assert isinstance(trainer, Child)
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


def test_imports_that_cannot_be_read_make_a_slower_start(tmp_path, started):
    (tmp_path / "imports.json").write_text("{")
    process = Warm(["python", "job.py"], tmp_path / "imports.json")
    trainer, output = started(process, "print('here')")
    assert trainer.wait()[0] == 0
    assert output.read() == "here\n"
    process.end()


def test_installed_modules_and_changed_variables_are_learnt(tmp_path, monkeypatch):
    """Not the user's own modules: they may be edited before the next start."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_the_user.py").touch()
    import of_the_user  # type: ignore[import-not-found] # noqa: F401 - it is there to be found

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("HOLDFAST_TOKEN", "a word of no one else")
    monkeypatch.delenv("HOME")
    learnt = Imports.of_this_process()
    learnt.write(tmp_path / "imports.json")
    assert Imports.read(tmp_path / "imports.json") == learnt
    assert "a word of no one else" not in (tmp_path / "imports.json").read_text()
    assert {"json", "psutil", "holdfast.recover.shim.script"} <= set(learnt.modules)
    assert not {"of_the_user", "__main__"} & set(learnt.modules)
    assert learnt.environment["OMP_NUM_THREADS"] == "7"
    assert learnt.environment["HOME"] is None
    assert json.loads((tmp_path / "imports.json").read_text())["modules"] == list(learnt.modules)
