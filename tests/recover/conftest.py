"""Real runs of small jobs: `holdfast run` in a process of its own, in a home of its own."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

import light_torchrun
from holdfast.cli.main import main
from holdfast.core.ledger import Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover.spec import RunSpec
from holdfast.recover.supervisor import Supervisor
from holdfast.testing import FakeClock

HOLDFAST = [sys.executable, "-m", "holdfast.cli.main"]
TIMEOUT_S = 240


class Started(subprocess.Popen):
    """A command that a failed test ends, instead of waiting for it."""

    def __exit__(self, exc_type, value, traceback):
        if exc_type is not None:
            self.kill()
        super().__exit__(exc_type, value, traceback)


@dataclass
class Place:
    """A folder with jobs and a ledger, and the commands run there."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / ".holdfast"

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "HOLDFAST_HOME": str(self.home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def job(self, text: str, name: str = "job.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def ranks(self, count: int, *words: str) -> list[str]:
        """Return the command of a job whose launcher imports no torch."""
        return light_torchrun.command(self.folder, count, *words)

    def start(self, *arguments: str, environment=None, **options) -> Started:
        return Started(
            [*HOLDFAST, *arguments],
            cwd=self.folder,
            env=environment or self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def holdfast(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> tuple[int, str, str]:
        """Run a command to its end; return its exit code and its output."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err

    def look(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command that starts no process, in this process; return its exit code and its
        output.

        A process of its own would import for longer than the command takes.
        """
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.setenv("HOLDFAST_HOME", str(self.home))
            patch.setattr(sys, "argv", ["holdfast", *arguments])
            try:
                main()
            except SystemExit as end:
                code = end.code
        return code, out.getvalue(), err.getvalue()

    def json(self, *arguments: str) -> dict:
        code, out, err = self.look(*arguments, "--json")
        assert code == 0, out + err
        return json.loads(out)

    def ledger(self) -> Ledger:
        return Ledger.open(ledger_url(self.home))

    def paths(self, run: str) -> RunPaths:
        return RunPaths(self.home, run)

    def wait_for_step(self, run: str, step: int) -> None:
        """Wait until the run's journal has `step` or a later one; a killed agent may lose steps."""
        self.wait_until(lambda: self.last_step(run) >= step)

    def last_step(self, run: str) -> int:
        """Return the last step in the run's journal."""
        steps = self.paths(run).steps
        lines = steps.read_text().split("\n")[:-1] if steps.exists() else []
        return max((json.loads(line)["step"] for line in lines[-5:]), default=0)

    @staticmethod
    def wait_until(holds, timeout_s: float = TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline_s, "it did not happen in time"
            time.sleep(0.1)

    @classmethod
    def child(cls, node: subprocess.Popen, module: str) -> psutil.Process:
        """Wait for the child of a `holdfast run` that runs a module such as `agent`; return it."""

        def found() -> list[psutil.Process]:
            return [
                one
                for one in psutil.Process(node.pid).children()
                if any(word.endswith(f".{module}") for word in cls.command(one))
            ]

        cls.wait_until(lambda: len(found()) == 1)
        return found()[0]

    @staticmethod
    def command(process: psutil.Process) -> list[str]:
        """The words of a process's command line; none if the process has ended."""
        try:
            return process.cmdline()
        except psutil.NoSuchProcess:
            return []

    def processes(self) -> list[psutil.Process]:
        """Every living process that this place's runs started, recognised by their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("HOLDFAST_HOME") == str(self.home)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def nothing_is_left(self, among: Collection[psutil.Process] | None = None) -> None:
        """Assert that no process, or none of those given, lives on.

        A process that is being killed may yet have to be scheduled.
        """

        def found() -> list[psutil.Process]:
            return [one for one in self.processes() if among is None or one in among]

        self.wait_until(lambda: not any(map(_is_being_killed, found())))
        left = found()
        for process in left:
            process.send_signal(signal.SIGKILL)
        assert not left, f"left behind: {left}"

    def commands(self) -> list[str]:
        """The command line of every such process."""
        return [" ".join(self.command(process)) for process in self.processes()]


@pytest.fixture
def place(tmp_path):
    """A place whose processes are gone when the test ends, and were gone by themselves."""
    yield from _place_in(tmp_path)


@pytest.fixture(scope="module")
def shared_place(tmp_path_factory):
    """The same for a run that several tests look at."""
    yield from _place_in(tmp_path_factory.mktemp("shared"))


def _is_being_killed(process):
    """Return True if SIGKILL is pending, or if the process has ended meanwhile."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    pending = [
        line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
    ]
    return any(int(signals, 16) & 1 << (signal.SIGKILL - 1) for signals in pending)


def _place_in(folder):
    place = Place(folder)
    yield place
    place.nothing_is_left()


@pytest.fixture
def supervisor(tmp_path):
    """Return a function that makes the next supervisor of one run; the former ones are gone.

    Its keywords replace options of the run.
    """
    ledger, made = Ledger.open(ledger_url(tmp_path)), []
    run = Run(
        run_id="r",
        state="running",
        command=["true"],
        options={},
        cwd="/",
        host="h",
        pid=1,
        started_at_s=0.0,
    )
    ledger.add_run(run)
    spec = RunSpec(command=("true",), cwd=str(tmp_path), nnodes=4, min_nodes=2)

    def make(**options):
        how = {"token": "x", "generation": len(made), "clock": FakeClock()}
        paths = RunPaths(tmp_path, "r")
        made.append(Supervisor(replace(spec, **options), paths, ledger, **how))
        return made[-1]

    yield make
    for one in made:
        one._conduct.close()
        one._recorder.close()
    ledger.close()
