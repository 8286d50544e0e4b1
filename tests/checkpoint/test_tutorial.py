"""Run the script of the tutorial: killed and started again, it ends with the same loss."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from started_ranks import run_program

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints" / "tutorial.md"
SCRIPT, MORTAL = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SCRIPT = SCRIPT.replace("time.sleep(0.05)", "time.sleep(0.005)")
DIES = "import os\n" + SCRIPT.replace(
    "step += 1\n", f"step += 1\n{textwrap.indent(MORTAL, ' ' * 8)}"
)


@pytest.fixture(scope="module")
def last_line(tmp_path_factory):
    """Return what the script prints at the end of an uninterrupted run."""
    done = run_program(SCRIPT, in_folder=tmp_path_factory.mktemp("whole"))
    last = done.stdout.splitlines()[-1]
    assert last.startswith("end at step 200, loss "), done.stderr
    return last


def test_the_tutorial_continues_after_a_kill_and_ends_with_the_same_loss(tmp_path, last_line):
    killed = run_program(DIES, in_folder=tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert killed.stdout == "begin at step 0\nstep 50\nstep 100\n"
    lines = run_program(SCRIPT, in_folder=tmp_path).stdout.splitlines()
    step = int(re.fullmatch(r"begin at step (\d+)", lines[0])[1])
    assert step > 0
    assert step % 20 == 0
    assert lines[-1] == last_line


@pytest.mark.slow
def test_holdfast_starts_it_again_and_the_loss_is_the_same(tmp_path, last_line):
    (tmp_path / "train.py").write_text(DIES)

    def holdfast(*words):
        command = [sys.executable, "-m", "holdfast.cli.main", *words]
        # The page's `python` is that of the environment with Holdfast.
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = holdfast("run", "--name", "tutorial", "--", "python", "train.py")
    begins = [int(step) for step in re.findall(r"begin at step (\d+)", printed)]
    assert begins in ([0, 100], [0, 120])
    assert last_line in printed
    assert "SIGKILL" in holdfast("explain", "tutorial")
