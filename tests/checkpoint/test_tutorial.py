"""Run the script of the tutorial: killed and started again, it ends with the same loss."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints" / "tutorial.md"
SCRIPT, MORTAL = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SCRIPT = SCRIPT.replace("time.sleep(0.05)", "time.sleep(0.005)")


def start(folder):
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], cwd=folder, stdout=subprocess.PIPE, text=True
    )


def test_the_tutorial_continues_after_a_kill_and_ends_with_the_same_loss(tmp_path):
    with start(tmp_path / "whole") as whole, start(tmp_path / "killed") as killed:
        assert killed.stdout.readline() == "begin at step 0\n"
        while killed.stdout.readline() != "step 100\n":
            assert killed.poll() is None
        killed.kill()
        killed.wait()
        lines = whole.stdout.read().splitlines()
    with start(tmp_path / "killed") as again:
        lines_again = again.stdout.read().splitlines()
    step = int(re.fullmatch(r"begin at step (\d+)", lines_again[0])[1])
    assert step > 0
    assert step % 20 == 0
    assert lines[-1].startswith("end at step 200, loss ")
    assert lines_again[-1] == lines[-1]


@pytest.mark.slow
def test_holdfast_starts_it_again_and_the_loss_is_the_same(tmp_path):
    with start(tmp_path / "whole") as whole:
        last = whole.stdout.read().splitlines()[-1]
    mortal = textwrap.indent(MORTAL, " " * 8)
    script = "import os\n" + SCRIPT.replace("step += 1\n", f"step += 1\n{mortal}")
    (tmp_path / "train.py").write_text(script)

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
    assert last in printed
    assert "SIGKILL" in holdfast("explain", "tutorial")
