"""Run the script of the checkpoint tutorial: killed and started again, it ends with the same loss."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints" / "tutorial.md"


def start(folder):
    folder.mkdir(exist_ok=True)
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = script.replace("time.sleep(0.05)", "time.sleep(0.005)")
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=folder, stdout=subprocess.PIPE, text=True
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
