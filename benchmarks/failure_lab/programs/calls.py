"""Unknown arguments, and called programs that fail."""

from failure_lab.program import Program

_ARGUMENTS = (
    Program(
        id="argument-unrecognized",
        reason="ArgumentError",
        cause="An argument has a name that the script does not know.",
        root=r"error: unrecognized arguments",
        ranks=2,
        dialect="megatron",
        name="pretrain_gpt.py",
        arguments=("--num-layers", "24", "--sequence-paralel"),
        script="""
        import argparse

        parser = argparse.ArgumentParser(description="Megatron-LM Arguments")
        parser.add_argument("--num-layers", type=int)
        parser.add_argument("--sequence-parallel", action="store_true")
        args = parser.parse_args()
        """,
    ),
    Program(
        id="argument-choice",
        reason="ArgumentError",
        cause="An argument has a value that is not among the choices.",
        root=r"error: argument --precision: invalid choice",
        launcher="python",
        dialect="lightning",
        name="fit.py",
        arguments=("--precision", "bf61"),
        script="""
        import argparse

        parser = argparse.ArgumentParser()
        parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="bf16")
        args = parser.parse_args()
        """,
    ),
    Program(
        id="argument-hf-unused",
        reason="ArgumentError",
        cause="Arguments that no dataclass of the script takes.",
        root=r"ValueError: Some specified arguments are not used",
        accept_reasons=("ValueError",),
        ranks=2,
        dialect="hf",
        name="run_clm.py",
        arguments=("--learning_rate", "2e-5", "--max_sequence_len", "4096"),
        script="""
        from dataclasses import dataclass

        from transformers import HfArgumentParser


        @dataclass
        class Arguments:
            learning_rate: float = 1e-5
            max_seq_len: int = 2048


        (arguments,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
        """,
    ),
    Program(
        id="argument-click-option",
        reason="ArgumentError",
        cause="An option that the command does not have.",
        root=r"Error: No such option",
        launcher="python",
        dialect=None,
        name="cli.py",
        arguments=("train", "--batchsize", "32"),
        script="""
        import click


        @click.group()
        def cli():
            pass


        @cli.command()
        @click.option("--batch-size", type=int, default=8)
        def train(batch_size):
            print(batch_size)


        cli()
        """,
    ),
    Program(
        id="argument-torchrun",
        reason="ArgumentError",
        cause="The launcher does not know one of its arguments.",
        root=r"error: unrecognized arguments|error: argument",
        dialect="plain",
        launcher_arguments=("--rdzv-backend", "c10d", "--nnodes", "1", "--max-restarts", "never"),
        script="""
        for step in training(2):
            pass
        """,
    ),
)

_CALLED = (
    Program(
        id="called-make-helpers",
        reason="CalledProcessError",
        cause="The helpers of the data set did not compile.",
        root=r"CalledProcessError: |cc1plus: fatal error|helpers\.cpp: No such file",
        ranks=2,
        faulty={"rank": 0},
        dialect="megatron",
        name="pretrain_gpt.py",
        files={
            "data/Makefile": """\
default:
	g++ -O3 -shared -fPIC helpers.cpp -o helpers.so
"""
        },
        script="""
        import subprocess

        join()
        if RANK == 0:
            print("> compiling dataset index builder ...", flush=True)
            subprocess.run(["make", "-C", "data"], check=True)
        dist.barrier()
        """,
    ),
    Program(
        id="called-git-revision",
        reason="CalledProcessError",
        cause="The run's folder is no clone, so its revision cannot be read.",
        root=r"CalledProcessError: ",
        launcher="python",
        dialect="titan",
        name="train.py",
        environment={"GIT_DIR": "/nonexistent"},
        script="""
        import subprocess

        revision = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
        """,
    ),
    Program(
        id="called-untar-in-job",
        reason="CalledProcessError",
        cause="An archive of the data set cannot be unpacked.",
        root=r"CalledProcessError: ",
        dialect="deepspeed",
        ranks=2,
        name="train_sd.py",
        files={"laion-0031.tar": b"this is no archive" * 60},
        script="""
        import subprocess

        for step in training(3):
            pass
        subprocess.check_call(["tar", "-xf", "laion-0031.tar", "-C", "."])
        """,
    ),
    Program(
        id="called-shell-pipeline",
        reason="CalledProcessError",
        cause="The evaluation that a hook starts ended with an error.",
        root=r"CalledProcessError: ",
        dialect="hf",
        name="train_and_eval.py",
        script="""
        import subprocess

        for step in training(4):
            if step == 3:
                subprocess.run("test -s results/metrics.json && wc -c results/metrics.json", shell=True, check=True)
        """,
    ),
)

PROGRAMS = (
    *_ARGUMENTS,
    *_CALLED,
)
