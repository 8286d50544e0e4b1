"""Run every example, or those that are named, at small size. Part of CI."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = sys.executable
HOLDFAST = [PYTHON, "-m", "holdfast.cli.main"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TIMEOUT_S = 120


def run(title: str, command: list[str], folder: Path) -> str:
    """Run a command to its end; leaves with an error if it fails."""
    print(f"\n== {title}", flush=True)
    environment = {**os.environ, "HOLDFAST_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    print(done.stdout[-600:] + done.stderr[-600:], flush=True)
    if done.returncode != 0:
        sys.exit(f"{title}: exit code {done.returncode}")
    return done.stdout


def interrupt_after_first_checkpoint(command: list[str], checkpoints: Path) -> None:
    """Start a command and kill it with SIGKILL once a checkpoint is there."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not list(checkpoints.glob("step-*")):
            if process.poll() is not None or time.monotonic() > deadline_s:
                sys.exit("the example ended before it saved a checkpoint")
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)


def minimal_loop(folder: Path) -> None:
    """The loop without a launcher, killed after its first checkpoint and started again."""
    minimal = [PYTHON, str(HERE / "minimal_loop.py"), "--steps", "2000", "--save-every", "50"]
    minimal += ["--checkpoints", str(folder / "minimal")]
    interrupt_after_first_checkpoint(minimal, folder / "minimal")
    short = [word if word != "2000" else "400" for word in minimal]
    printed = run("minimal_loop.py, killed and started again", short, folder)
    if "from step 0\n" in printed:
        sys.exit("minimal_loop.py did not go on from its checkpoint")


def ddp(folder: Path) -> None:
    """Two ranks, under torchrun and then under `holdfast run`, whose checkpoints verify."""
    script = [str(HERE / "ddp.py"), "--save-every", "20", "--checkpoints", str(folder / "ddp")]
    supervised = [*HOLDFAST, "run", "--nproc", "2", "--", PYTHON]
    for name, launcher, steps in (("torchrun", TORCHRUN, "20"), ("holdfast run", supervised, "40")):
        command = [*launcher, *script, "--steps", steps]
        printed = run(f"ddp.py under {name} to step {steps}", command, folder)
        reached = [step for step in ("20", "40") if f"step {step} loss" in printed]
        if reached != [steps]:
            sys.exit("ddp.py did not go on from its checkpoint to its last step")
    run("what it left", [*HOLDFAST, "checkpoint", "verify", str(folder / "ddp")], folder)


def integrations(folder: Path) -> None:
    """Those with a trainer of somebody else; FSDP2's goes on with another number of ranks."""
    starts = [
        ([PYTHON], name, 20)
        for name in ("huggingface_trainer", "lightning_trainer", "dcp_drop_ins")
    ]
    starts += [
        (TORCHRUN, "fsdp2", 20),
        ([PYTHON, "-m", "torch.distributed.run", "--standalone"], "fsdp2", 30),
    ]
    for launcher, name, steps in starts:
        script = [str(HERE / f"{name}.py"), "--steps", str(steps), "--save-every", "10"]
        run(
            f"{name}.py to step {steps}",
            [*launcher, *script, "--checkpoints", str(folder / name)],
            folder,
        )
        if not (folder / name / f"step-{steps:010}" / "holdfast.json").exists():
            sys.exit(f"{name}.py did not save step {steps}")


def evaluate(folder: Path) -> None:
    """An evaluation of a small model."""
    run(
        "evaluate.py",
        [PYTHON, str(HERE / "evaluate.py"), "--out", str(folder / "evaluation")],
        folder,
    )


def diagnose(folder: Path) -> None:
    """A job that fails, diagnosed by the example itself and by the command."""
    failed = folder / "failed"
    printed = run(
        "failing_job.py",
        [PYTHON, str(HERE / "diagnose/failing_job.py"), "--out", str(failed)],
        folder,
    )
    if "KeyError: 'warmup'" not in printed or "'rank': 1" not in printed:
        sys.exit("failing_job.py was not diagnosed")
    run("holdfast diagnose of the same", [*HOLDFAST, "diagnose", str(failed)], folder)


def characterize(folder: Path) -> None:
    """A report on a generated trace."""
    run(
        "characterize.py",
        [PYTHON, str(HERE / "characterize.py"), "--out", str(folder / "trace")],
        folder,
    )


EXAMPLES = {
    each.__name__: each
    for each in (minimal_loop, ddp, integrations, evaluate, diagnose, characterize)
}


def main() -> None:
    """Run the examples that the command line names, or all of them."""
    names = sys.argv[1:] or list(EXAMPLES)
    if unknown := [name for name in names if name not in EXAMPLES]:
        sys.exit(f"There is no example {unknown[0]!r}. Name some of: {', '.join(EXAMPLES)}.")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            EXAMPLES[name](Path(folder))
    print("\nAll examples ran." if len(names) == len(EXAMPLES) else f"\nRan {', '.join(names)}.")


if __name__ == "__main__":
    main()
