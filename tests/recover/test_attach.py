"""The rank's side by itself: outside supervision, and what it refuses."""

import math
import subprocess
import sys

import pytest

from holdfast.core.errors import BadUse
from holdfast.recover.attach import Run, _number


def test_outside_supervision_every_call_works_and_nobody_listens():
    script = (
        "import holdfast\nrun = holdfast.attach()\nassert run is holdfast.attach()\nassert not run.supervised\n"
        "run.step(1, loss=0.5, lr=1e-3)\nwith run.section('evaluate', limit_s=3):\n    pass\n"
        "run.emit('note', {'a': 1})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True])
def test_a_step_is_a_whole_number(step):
    with pytest.raises(BadUse, match="whole number"):
        Run(None).step(step)


def test_numbers_that_json_lacks_are_words():
    assert [_number(value) for value in (None, 1, 2.5, math.nan, math.inf, -math.inf)] == [
        None,
        1.0,
        2.5,
        "nan",
        "inf",
        "-inf",
    ]


def test_attach_imports_neither_torch_nor_the_ledger():
    heavy = "{'torch', 'sqlalchemy', 'psutil', 're2'}"
    script = f"import sys, holdfast; holdfast.attach(); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
