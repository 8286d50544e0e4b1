"""Make the private place of a program: its folder, its limits, the end of its processes."""

import os
import shutil
import socket
import sys
from pathlib import Path

import psutil

from failure_lab.program import Program
from holdfast.core.errors import HoldfastError

MARK = "HOLDFAST_LAB_RUN"
"""The environment variable by which every process of a run is found and ended."""

_TMPFS = {
    "tmpfs": "mkdir -p scratch && mount -t tmpfs -o size=2m tmpfs scratch",
    "read-only": "mkdir -p scratch && mount -t tmpfs -o ro,size=1m tmpfs scratch",
}


class CannotRun(HoldfastError):
    """This machine cannot run the program; the message names the missing part."""


def lay_out(program: Program, folder: Path) -> None:
    """Write the script of `program` and the files beside it into `folder`."""
    for name, content in {program.name: program.source, **program.files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def command(program: Program, folder: Path) -> list[str]:
    """Return the command line that runs `program` under its limits.

    Raises:
        CannotRun: a required mount, privilege or tool is missing here.
    """
    return [*_limits(program), *_launch(program, folder)]


def _launch(program: Program, folder: Path) -> list[str]:
    if program.launcher == "shell":
        return ["bash", program.name, *program.arguments]
    if program.launcher == "python":
        return [sys.executable, program.name, *program.arguments]
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={program.ranks}", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", f"--log-dir={folder / 'logs'}", "--tee=3", *program.launcher_arguments,
        program.name, *program.arguments,
    ]  # fmt: skip


def _limits(program: Program) -> list[str]:
    before = [
        _tool("prlimit"),
        f"--as={program.memory_bytes}",
        "--core=0",
        "--fsize=2147483648",
        "--",
    ]
    if "owner-only" in program.needs and os.geteuid() == 0:
        # Root may read and write everything by two capabilities; without them it is refused as
        # anyone is.
        before += [_tool("setpriv"), "--bounding-set=-dac_override,-dac_read_search", "--"]
    mounts = [_TMPFS[need] for need in program.needs if need in _TMPFS]
    if mounts:
        if os.geteuid() != 0:
            raise CannotRun(f"program {program.id} needs a mount of its own: run as root")
        # The mount lies in a namespace of its own and goes with the last process in it.
        before += [
            _tool("unshare"),
            "--mount",
            "bash",
            "-c",
            " && ".join([*mounts, 'exec "$@"']),
            "lab",
        ]
    return before


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise CannotRun(f"no {name} on this machine: install util-linux")
    return found


def free_port() -> int:
    """Return an unused TCP port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def end_all(token: str) -> int:
    """Kill the processes of the run `token`, also in other sessions; return their number."""
    ended: list[psutil.Process] = []
    while left := [one for one in _of_run(token) if one not in ended]:
        for process in left:
            _kill(process)
        ended += left
        psutil.wait_procs(left, timeout=5)
    return len(ended)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _of_run(token: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == token:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
