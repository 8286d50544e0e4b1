"""Ends without an error: killed and stopped ranks, time limits, preemption."""

# ruff: noqa: E501  (lines of logs stand as they are printed)

from failure_lab.program import Program
from failure_lab.programs.hardware import hardware

PROGRAMS = (
    Program(
        id="others-rank-killed",
        reason="Others",
        cause="Somebody killed a rank (SIGKILL), and nothing says who.",
        root=r"Signal 9 \(SIGKILL\)|exitcode *: -9",
        accept_reasons=("Unknown", "NodeFailure"),
        restart_helps=True,
        faulty={"rank": 1},
        ranks=3,
        dialect="megatron",
        script="""
        import signal

        for step in training(8):
            if step == 6 and RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        """,
    ),
    Program(
        id="others-rank-stopped",
        reason="Others",
        cause="A rank was stopped (SIGSTOP), and its peers gave up waiting.",
        root=r"Timed out waiting \d+ms for",
        accept_reasons=("NCCLTimeoutError", "Unknown"),
        restart_helps=True,
        faulty={"rank": 2},
        ranks=3,
        dialect="titan",
        prefix="[rank${rank}]:",
        limit_s=60,
        script="""
        import signal

        join(timeout_s=5)
        for step in training(8):
            if step == 5 and RANK == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
        """,
    ),
    Program(
        id="others-time-limit",
        reason="Others",
        cause="Slurm ended the job at its time limit.",
        root=r"DUE TO TIME LIMIT",
        restart_helps=True,
        launcher="shell",
        dialect=None,
        name="job.sbatch",
        files={
            "train.py": """\
import time
for step in range(1, 9):
    print(f'step {step}/90000 loss {2.9 - step / 50:.3f}', flush=True)
time.sleep(30)
"""
        },
        script="""
        python train.py &
        worker=$!
        sleep 2
        echo "slurmstepd: error: *** JOB 5521903 ON node011 CANCELLED AT 2025-06-18T06:00:21 DUE TO TIME LIMIT ***" >&2
        echo "slurmstepd: error: *** STEP 5521903.0 ON node011 CANCELLED AT 2025-06-18T06:00:21 DUE TO TIME LIMIT ***" >&2
        kill -TERM $worker
        wait $worker
        """,
    ),
    hardware(
        id="others-preempted",
        reason="Others",
        cause="A job of higher priority took the nodes.",
        root=r"DUE TO PREEMPTION",
        dialect="hf",
        name="run_sft.py",
        rank=0,
        faulty={},
        prints="""\
slurmstepd: error: *** STEP 771420.0 ON gpu-b-03 CANCELLED AT 2025-01-27T22:41:07 DUE TO PREEMPTION ***
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
""",
        exits="os.kill(os.getpid(), signal.SIGTERM)",
    ),
)
