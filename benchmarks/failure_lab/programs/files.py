"""Files that are missing, full, too many, read-only, or owned by another user."""

from failure_lab.program import Program

_MISSING = (
    Program(
        id="file-config-missing",
        reason="FileNotFoundError",
        cause="The named configuration does not exist.",
        root=r"FileNotFoundError: .*configs/7b-long\.yaml",
        ranks=2,
        dialect="titan",
        arguments=("--config", "configs/7b-long.yaml"),
        files={
            "configs/7b.yaml": """\
lr: 3.0e-4
"""
        },
        script="""
        import argparse

        import yaml

        parser = argparse.ArgumentParser()
        parser.add_argument("--config")
        with open(parser.parse_args().config) as file:
            config = yaml.safe_load(file)
        """,
    ),
    Program(
        id="file-token-shard-missing",
        reason="FileNotFoundError",
        cause="A memory-mapped shard of tokens is not there.",
        root=r"FileNotFoundError: .*train_000012\.bin",
        accept_reasons=("DatasetLoadingError",),
        dialect="plain",
        name="train_gpt2.py",
        ranks=2,
        faulty={"rank": 0},
        prefix="[default${local_rank}]:",
        script="""
        import numpy as np

        for step in training(5):
            if step == 3 and RANK == 0:
                tokens = np.memmap("fineweb10B/train_000012.bin", dtype=np.uint16, mode="r")
        """,
    ),
    Program(
        id="file-checkpoint-missing",
        reason="FileNotFoundError",
        cause="The checkpoint to resume from was removed.",
        root=r"FileNotFoundError: .*checkpoint-4000",
        accept_reasons=("ModelLoadingError",),
        dialect="hf",
        name="finetune.py",
        launcher="python",
        script="""
        print("Resuming from output/checkpoint-4000", flush=True)
        state = torch.load("output/checkpoint-4000/optimizer.pt", map_location="cpu")
        """,
    ),
    Program(
        id="file-script-missing",
        reason="FileNotFoundError",
        cause="The launcher's script does not exist.",
        root=r"can't open file",
        launcher="shell",
        dialect=None,
        name="launch.sh",
        script="""
        set -e
        echo "$(date '+%F %T') launching pretraining on $(nproc) cores"
        python pretrain_gpt2.py --num-layers 24 --hidden-size 1024
        """,
    ),
)

_BROKEN = (
    Program(
        id="os-disk-full-checkpoint",
        reason="OSError",
        cause="The disk is full while a checkpoint is written.",
        root=r"No space left on device|PytorchStreamWriter failed|unexpected pos|iostream error",
        accept_reasons=("RuntimeError",),
        needs=("tmpfs",),
        ranks=2,
        faulty={"rank": 0},
        dialect="megatron",
        script="""
        for step in training(6):
            if step == 5 and RANK == 0:
                print(f"saving checkpoint at iteration {step:7d} to scratch", flush=True)
                torch.save(torch.zeros(4 << 20), "scratch/model_optim_rng.pt")
        """,
    ),
    Program(
        id="os-disk-full-log",
        reason="OSError",
        cause="The disk is full while samples are dumped.",
        root=r"OSError: \[Errno 28\]",
        needs=("tmpfs",),
        dialect="lightning",
        name="dump_activations.py",
        script="""
        import json

        for step in training(4):
            with open(f"scratch/samples-{step}.json", "w") as file:
                json.dump({"tokens": list(range(150_000))}, file)
        """,
    ),
    Program(
        id="os-too-many-files",
        reason="OSError",
        cause="The limit of open files was reached.",
        root=r"Too many open files",
        ranks=2,
        faulty={"rank": 1},
        dialect="deepspeed",
        files={"index.bin": "0" * 64},
        script="""
        import resource

        shards = []
        for step in training(6):
            if step == 2 and RANK == 1:
                resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
                for _ in range(256):
                    shards.append(open("index.bin", "rb"))
        """,
    ),
    Program(
        id="os-port-in-use",
        reason="OSError",
        cause="The port of the metrics server is taken.",
        root=r"Address already in use",
        accept_reasons=("NetworkError", "ConnectionError"),
        launcher="python",
        dialect="titan",
        name="serve_metrics.py",
        script="""
        import http.server
        import socket

        taken = socket.create_server(("127.0.0.1", 0))
        for step in training(2):
            pass
        exporter = http.server.HTTPServer(taken.getsockname(), http.server.BaseHTTPRequestHandler)
        """,
    ),
    Program(
        id="os-read-only",
        reason="OSError",
        cause="The file system of the logs is mounted read-only.",
        root=r"Read-only file system",
        accept_reasons=("PermissionError",),
        needs=("read-only",),
        dialect="hf",
        name="train_lora.py",
        script="""
        from pathlib import Path

        for step in training(5):
            pass
        Path("scratch/runs/lora").mkdir(parents=True)
        """,
    ),
)

_REFUSED = (
    Program(
        id="permission-checkpoint-folder",
        reason="PermissionError",
        cause="The folder of the checkpoints may not be written.",
        root=r"PermissionError: ",
        needs=("owner-only",),
        ranks=2,
        faulty={"rank": 0},
        dialect="deepspeed",
        script="""
        from pathlib import Path

        if RANK == 0:
            Path("checkpoints").mkdir()
            Path("checkpoints").chmod(0o555)
        for step in training(4):
            if step == 3 and RANK == 0:
                Path("checkpoints/global_step3").mkdir()
        """,
    ),
    Program(
        id="permission-token-file",
        reason="PermissionError",
        cause="The file with the data set's index may not be read.",
        root=r"PermissionError: ",
        needs=("owner-only",),
        ranks=2,
        dialect="megatron",
        files={
            "blend.json": """\
{"data": []}
"""
        },
        script="""
        import json

        os.chmod("blend.json", 0)
        join()
        with open("blend.json") as file:
            blend = json.load(file)
        """,
    ),
    Program(
        id="permission-hook-not-executable",
        reason="PermissionError",
        cause="The script that prepares the node may not be executed.",
        root=r"PermissionError: ",
        dialect="titan",
        launcher="python",
        name="start.py",
        files={
            "hooks/prepare_node.sh": """\
#!/bin/sh
echo ready
"""
        },
        script="""
        import subprocess

        subprocess.run(["./hooks/prepare_node.sh", "--gpus", "8"], check=True)
        """,
    ),
    Program(
        id="permission-shell-redirect",
        reason="PermissionError",
        cause="The job may not write into its log folder.",
        root=r"Permission denied",
        needs=("owner-only",),
        launcher="shell",
        dialect=None,
        name="job.sh",
        script="""
        mkdir -p logs && chmod 555 logs
        set -euo pipefail
        echo "job 99120 starts on $(nproc) cores"
        python -c "print('environment: ok')" > logs/environment.txt
        """,
    ),
)

PROGRAMS = (*_MISSING, *_BROKEN, *_REFUSED)
