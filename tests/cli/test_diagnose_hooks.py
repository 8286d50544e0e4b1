"""The Slurm scripts of examples/diagnose, run by sh.

Slurm's own commands are stubs; `holdfast diagnose` is real.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples" / "diagnose"
GPU_LOST = "Nov 22 07:15:01 gn07 kernel: NVRM: Xid (PCI:0000:4e:00): 79, pid=4711, name=python, GPU has fallen off the bus."  # noqa: E501
STUBS = {
    "holdfast": f'exec "{sys.executable}" -m holdfast.cli.main "$@"',
    "srun": """
        output=/dev/stdout
        while :; do case $1 in --output=*) output=${1#--output=}; shift;; --*) shift;; *) break;; esac; done
        "$@" >"$(echo "$output" | sed 's/%t/0/; s/%N/gn07/')" 2>&1""",
    "journalctl": 'echo "gn07 kernel: nothing to tell"',
    "sacct": "echo '{\"jobs\": []}'",
    "scontrol": 'if [ "$1 $2" = "show hostnames" ]; then printf "%s\\n" $3; else echo "scontrol $*" >>"$CALLS"; fi',
    "sbatch": 'echo "sbatch $HOLDFAST_ATTEMPT $*" >>"$CALLS"',
}


@pytest.fixture
def slurm(tmp_path):
    """Run one of the scripts as Slurm would; return the exit code and the calls."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name, body in STUBS.items():
        (stubs / name).write_text(f"#!/bin/sh\n{body}\n")
        (stubs / name).chmod(0o755)

    def run(script, *command, **variables):
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SLURM", "HOLDFAST"))
            },
            "PATH": f"{stubs}:{os.environ['PATH']}",
            "HOLDFAST_PATH": str(stubs),
            "CALLS": str(calls),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "gn07 gn08",
            **variables,
        }
        done = subprocess.run(
            ["sh", SCRIPTS / script, *command],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        return done.returncode, calls.read_text().splitlines()

    return run


def failing(*lines):
    """A command that prints these lines and leaves with 3."""
    return sys.executable, "-c", f"print(*{lines!r}, sep=chr(10)); raise SystemExit(3)"


def test_a_job_that_succeeds_is_left_alone(slurm, tmp_path):
    assert slurm("resubmit.sh", "true") == (0, [])
    assert not (tmp_path / "logs" / "4711.json").exists()


def test_a_lost_gpu_is_tried_again_without_its_node(slurm, tmp_path):
    command = failing("step 1 loss 2.0", GPU_LOST)
    code, calls = slurm("resubmit.sh", *command)
    assert code == 3
    assert calls == [
        f"sbatch 2 --begin=now --exclude=gn07 {SCRIPTS / 'resubmit.sh'} {' '.join(command)}"
    ]
    assert (tmp_path / "logs" / "4711.json").exists()


def test_a_node_of_somebody_else_is_not_excluded_and_earlier_ones_stay_so(slurm):
    command = failing(GPU_LOST.replace("gn07", "gn99"))
    _, (call,) = slurm("resubmit.sh", *command, HOLDFAST_EXCLUDE="gn03", HOLDFAST_ATTEMPT="3")
    assert call.startswith("sbatch 4 --begin=now --exclude=gn03 ")


def test_an_error_of_the_script_is_not_tried_again(slurm):
    lines = (
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "KeyError: 'lr'",
    )
    assert slurm("resubmit.sh", *failing(*lines)) == (3, [])


def test_finished_work_is_not_done_again(slurm, tmp_path):
    lines = ("step 1 loss 2.0", "Training finished.", "container trainer exited with code 134")
    assert slurm("resubmit.sh", *failing(*lines)) == (3, [])
    log = tmp_path / "slurm-4711.out"
    log.write_text("\n".join(lines) + "\n")
    _, (call,) = slurm("epilog.sh", SLURM_JOB_EXIT_CODE="256", SLURM_JOB_STDOUT=str(log))
    assert "AdminComment=completed_teardown_failed" in call


def test_a_failure_that_the_logs_do_not_show_is_tried_again(slurm):
    _, (call,) = slurm("resubmit.sh", *failing("step 1 loss 2.0"))
    assert call.startswith("sbatch 2 --begin=now ")


def test_attempts_have_an_end(slurm):
    assert slurm("resubmit.sh", *failing(GPU_LOST), HOLDFAST_ATTEMPT="4") == (3, [])


def test_the_epilog_puts_the_cause_into_the_record(slurm, tmp_path):
    log = tmp_path / "slurm-4711.out"
    log.write_text(f"step 1 loss 2.0\n{GPU_LOST}\n")
    code, (call,) = slurm("epilog.sh", SLURM_JOB_EXIT_CODE="256", SLURM_JOB_STDOUT=str(log))
    assert code == 0
    assert call.startswith("scontrol update JobId=4711 AdminComment=failed NodeFailure 0.")
    assert "exclude_and_restart" in call
    assert "node gn07" in call


def test_the_epilog_says_nothing_of_a_job_that_succeeded_or_left_no_output(slurm, tmp_path):
    assert slurm("epilog.sh", SLURM_JOB_EXIT_CODE="0", SLURM_JOB_STDOUT="/etc/hostname") == (0, [])
    assert slurm(
        "epilog.sh", SLURM_JOB_EXIT_CODE="256", SLURM_JOB_STDOUT=str(tmp_path / "none")
    ) == (0, [])
