"""Start ranks as torchrun does, without importing torch, for tests that are not about torchrun.

`holdfast run` treats every program of the name `torchrun` as PyTorch's launcher. PyTorch's own
launcher imports torch, which takes two seconds of CPU time.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

END_S = 30.0
"""The seconds after which torchrun kills the ranks that a SIGTERM has not ended."""


def command(folder: Path, ranks: int, *words: str) -> list[str]:
    """Put the launcher into a folder; return the command that starts a script there.

    Args:
        folder: the working directory of the command.
        ranks: the number of ranks.
        words: the script and its arguments.
    """
    launcher = folder / "torchrun"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" "$@"\n')
    launcher.chmod(0o755)
    return ["./torchrun", str(ranks), *words]


def main() -> int:
    """Run the command `light_torchrun [OPTION=VALUE …] RANKS SCRIPT …`; return 1 if a rank fails.

    The options are torchrun's, by which `holdfast run` names the node of several.
    """
    options, words = {}, sys.argv[1:]
    while words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        options[name] = value
    count = int(words.pop(0))
    nnodes, node_rank = int(options.get("--nnodes", 1)), int(options.get("--node-rank", 0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [os.environ.get("PYTHON_EXEC", sys.executable), "-u", *words],
            env={
                **os.environ,
                "RANK": str(node_rank * count + rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(nnodes * count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": options.get("--master-addr", "127.0.0.1"),
                "MASTER_PORT": options.get("--master-port", str(port)),
                "TORCHELASTIC_RESTART_COUNT": "0",
            },
        )
        for rank in range(count)
    ]
    going = {one.pid: one for one in ranks}
    while going:
        pid, status = os.wait()
        del going[pid]
        if os.waitstatus_to_exitcode(status) != 0:
            for one in going.values():
                one.terminate()
            for one in going.values():
                try:
                    one.wait(END_S)
                except subprocess.TimeoutExpired:
                    one.kill()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
