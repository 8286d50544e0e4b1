"""Run one program in a private folder and keep its output."""

import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from failure_lab.place import MARK, command, end_all, lay_out
from failure_lab.program import Program
from holdfast.testing.s3 import serve

_MARKED = re.compile(r"@@rank(\d+)@@")
"""torchrun's mark before every line of a rank; the program's own prefix replaces it."""

_HOMES = (
    "/home/ana/llm",
    "/workspace/pretrain",
    "/mnt/nfs/users/jwu/runs/exp41",
    "/fsx/code/trainer",
    "/app",
    "/data/src",
)
_LIBRARIES = (
    "/opt/conda/lib/python3.11/site-packages",
    "/usr/local/lib/python3.11/dist-packages",
    "/venv/lib/python3.11/site-packages",
)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The output of one run of a program."""

    log: str
    """The whole output in its order."""
    ranks: dict[int, str] = field(default_factory=dict)
    """The output of each rank, if torchrun launched the program."""
    launcher: str = ""
    """The output of torchrun itself."""
    exit_code: int
    timed_out: bool
    wall_s: float


def run(program: Program, folder: Path | None = None) -> Recording:
    """Run `program` to its end, or to its time limit, and end every process it started.

    `folder`: where it runs; a temporary one by default, removed afterwards.

    Raises:
        CannotRun: this machine lacks what the program needs.
    """
    with ExitStack() as stack:
        place = folder or Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="lab-", ignore_cleanup_errors=True)
            )
        )
        work = place / "work"
        work.mkdir(parents=True)
        lay_out(program, work)
        token = uuid.uuid4().hex
        environment = _environment(program, token)
        if "s3" in program.needs:
            environment["AWS_ENDPOINT_URL"] = stack.enter_context(serve())
        start = time.monotonic()
        code, timed_out = _run(
            command(program, place), work, place / "console", environment, program.limit_s, token
        )
        wall_s = time.monotonic() - start
        text = _Disguise(program, work)(
            (place / "console").read_bytes().decode("utf-8", "replace").replace("\r", "\n")
        )
        ranks, launcher = _by_rank(text)
        return Recording(
            log=_MARKED.sub(lambda found: _prefix(program, found[1]), text),
            ranks=ranks,
            launcher=launcher if ranks else "",
            exit_code=code,
            timed_out=timed_out,
            wall_s=wall_s,
        )


def _prefix(program: Program, rank: str) -> str:
    return program.prefix.replace("${rank}", rank).replace("${local_rank}", rank)


def _by_rank(text: str) -> tuple[dict[int, str], str]:
    """Return the ordered output of each rank, and the rest."""
    found: dict[int, list[str]] = {}
    others = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        if marked := _MARKED.match(line):
            found.setdefault(int(marked[1]), []).append(_MARKED.sub("", line))
        else:
            others.append(line)
    return {rank: "".join(lines) for rank, lines in sorted(found.items())}, "".join(others)


def _run(
    arguments: list[str],
    work: Path,
    console: Path,
    environment: dict[str, str],
    limit_s: float,
    token: str,
) -> tuple[int, bool]:
    with console.open("wb") as out:
        process = subprocess.Popen(
            arguments, cwd=work, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(timeout=limit_s), False
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(), True
        finally:
            end_all(token)


def _environment(program: Program, token: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    return {
        **kept,
        "PATH": os.pathsep.join(
            (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
        ),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": "cache",
        "AWS_EC2_METADATA_DISABLED": "true",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "@@rank${rank}@@",
        **program.environment,
        MARK: token,
    }


class _Disguise:
    """Replace this machine's paths and name, which would identify the programs, by a cluster's."""

    def __init__(self, program: Program, work: Path) -> None:
        number = sum(program.id.encode())
        self._pairs = (
            (str(work), _HOMES[number % len(_HOMES)]),
            (str(work.parent), "/tmp"),
            (sysconfig.get_path("purelib"), _LIBRARIES[number % len(_LIBRARIES)]),
            (sysconfig.get_path("stdlib"), "/opt/conda/lib/python3.11"),
            (sys.executable, "/opt/conda/bin/python"),
            (sys.prefix, "/opt/conda"),
        )
        self._host = f"node{number % 60 + 1:03d}"

    def __call__(self, text: str) -> str:
        for own, other in self._pairs:
            text = text.replace(own, other)
        return re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w.-])", self._host, text)
