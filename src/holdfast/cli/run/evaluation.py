"""Run `holdfast eval watch` beside a run; a failure of the evaluation never disturbs training."""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from holdfast.cluster import release, start_on_leash
from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.paths import RunPaths

if TYPE_CHECKING:
    import subprocess

_LOOK_S = 0.1
HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """The requested evaluation of a run's checkpoints, stored in the run's folder for a resume.

    Attributes:
        suite: the SUITE of `holdfast eval`.
        drop_stale: True if a newer checkpoint replaces checkpoints whose evaluation has not begun.
        options: the options of `holdfast eval watch`, one word each.
    """

    suite: str
    drop_stale: bool
    options: tuple[str, ...]

    @classmethod
    def checked(cls, suite: str, *, drop_stale: bool, options: Sequence[str]) -> Self:
        """Create a request after checking it.

        Raises:
            BadUse: there is no such suite, or an option is malformed.
            HoldfastError: the packages for evaluations are not installed.
        """
        try:
            from holdfast.evaluate import load_suite
        except ImportError as error:
            raise HoldfastError(
                f"--eval-suite needs {error.name}, which is not installed. Run: pip install 'holdfast[eval]'"
            ) from error
        load_suite(suite)
        for option in options:
            if not option.startswith("-"):
                raise BadUse(
                    f"--eval-option {option!r} is not an option. Write it in one word: --eval-option=--nodes=4"
                )
        suite = str(Path(suite).absolute()) if suite.endswith(".toml") else suite
        return cls(suite=suite, drop_stale=drop_stale, options=tuple(options))

    def keep(self, paths: RunPaths) -> None:
        """Write the request into the run's folder."""
        write_atomic(_wish_of(paths), json.dumps(asdict(self)).encode())

    @classmethod
    def kept(cls, paths: RunPaths) -> Self | None:
        """Read the request of a run; None if the run has none."""
        try:
            fields = json.loads(_wish_of(paths).read_bytes())
        except FileNotFoundError:
            return None
        return cls(
            suite=fields["suite"], drop_stale=fields["drop_stale"], options=tuple(fields["options"])
        )


class RunEvaluation:
    """Evaluate a run's checkpoints as they appear.

    An instance is an observer of the run (`holdfast.recover.agent.node.Observer`). With the first
    checkpoint it starts `holdfast eval watch` on the parent of the checkpoint's folder. If this
    watch process has ended, the next checkpoint starts another. At the end of the run the file
    RUN/evaluation.over is written; the watch then evaluates the remaining checkpoints and ends.

    Args:
        wish: the requested evaluation.
        paths: the paths of the run.
        ledger: the ledger's URL.
        working_folder: the working folder of the run's command, to which the checkpoint paths that
            it reports are relative.
        say: prints a line for people.
        holdfast: the command line of the `holdfast` program.
    """

    def __init__(
        self,
        wish: Wish,
        paths: RunPaths,
        ledger: str,
        *,
        working_folder: Path,
        say: Callable[[str], None],
        holdfast: Sequence[str] = HOLDFAST,
    ) -> None:
        self._wish, self._paths, self._working_folder, self._print = (
            wish,
            paths,
            working_folder,
            say,
        )
        self._before = [*holdfast, "--ledger", ledger]
        self._over = paths.root / "evaluation.over"
        self._over.unlink(missing_ok=True)  # left by the attempt that is resumed
        self._watched: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """The log of the watch process."""
        return self._paths.logs / "evaluation.log"

    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        """Receive an event of the run; a saved or restored checkpoint starts the watch."""
        if kind in ("checkpoint", "restored"):
            self._watched = (self._working_folder / str(data["path"])).parent
            self._start_unless_it_runs()

    def finish(self) -> None:
        """Wait until the checkpoints of the run, which has ended, are evaluated.

        Ctrl-C ends the wait; finished evaluations are kept.
        """
        if self._watched is None:
            return
        try:
            self._over.touch()
            self._start_unless_it_runs()
            if self._child is None:
                return
            self._print("evaluating the remaining checkpoints; Ctrl-C stops the evaluation")
            exit_code = _awaited(self._child)
        except KeyboardInterrupt:
            exit_code = None
        except OSError as error:
            self._print(f"the evaluation cannot be ended ({self._over} cannot be written): {error}")
            exit_code = None
        finally:
            if self._child is not None:
                release(self._child)
        if exit_code == 0:
            return
        how = "was ended" if exit_code is None else f"ended with {exit_code}"
        again = ["eval", "watch", str(self._watched), "--once", "--suite", self._wish.suite]
        again += ["--run", self._paths.run_id, *self._wish.options]
        self._print(
            f"the evaluation {how}; see {self.log}. Continue with: holdfast {shlex.join(again)}"
        )

    def _start_unless_it_runs(self) -> None:
        if self._child is not None:
            if self._child.poll() is None:
                return
            release(self._child)
            if self._over.exists() and self._child.returncode == 0:
                return
        stale = ["--drop-stale"] if self._wish.drop_stale else []
        command = [
            *self._before,
            "eval",
            "watch",
            str(self._watched),
            "--suite",
            self._wish.suite,
            *stale,
        ]
        command += [
            "--run",
            self._paths.run_id,
            "--until-file",
            str(self._over),
            "--no-progress",
            *self._wish.options,
        ]
        try:
            self._child = start_on_leash(
                command,
                self.log,
                append=True,
                environment={**os.environ, "HOLDFAST_HOME": str(self._paths.home)},
                working_folder=self._working_folder,
            )
        except OSError as error:  # training continues; the next checkpoint tries again
            self._print(f"the evaluation cannot be started: {error}")


def _awaited(child: "subprocess.Popen[bytes]") -> int:
    """Wait for the end of the watch process, and return its exit code.

    The function polls, because a Ctrl-C just before a wait without a limit would take effect only
    after the wait.
    """
    while (exit_code := child.poll()) is None:
        time.sleep(_LOOK_S)
    return exit_code


def _wish_of(paths: RunPaths) -> Path:
    return paths.root / "evaluation.json"
