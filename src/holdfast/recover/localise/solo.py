"""Check a single node: a matrix product with a known result, memory, disk, and shared memory.

`python -m holdfast.recover.localise.solo CHECK FOLDER PARENT_PID` prints a line, runs one check,
and prints one JSON object. Each check runs in a separate process, which `tester` kills at a time
limit. A check that hangs twice has failed.

`worker` runs the matrix product. If a device is full, in use or missing, this does not mean that it
is broken. The result of the check is then "not looked at".
"""

import errno
import json
import mmap
import os
import random
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

MIB = 1024 * 1024
LIMIT_S = 20.0
"""The seconds that a check may take. On an idle node, a check takes one or two seconds."""
MEMORY_BYTES = 64 * MIB
DISK_BYTES = 32 * MIB
SHARED_BYTES = 16 * MIB
PERIOD = 31
"""The number of rows after which the matrices of the product repeat themselves."""
CPU_REPEATS, GPU_REPEATS = 16, 128
"""The number of rows and columns of the matrices, divided by `PERIOD`."""
PRODUCTS = 8
MAX_EVIDENCE = 300
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOMEM)
"""Errors of the operating system that are no sign of broken hardware."""

OCCUPIED = re.compile(
    r"out of memory|busy or unavailable|no kernel image|driver version is insufficient|CUBLAS_STATUS_ALLOC_FAILED|"
    r"not compiled with CUDA",
    re.IGNORECASE,
)
"""Matches errors of torch, CUDA and NCCL that are no sign of broken hardware: another process uses
the GPU, or torch is too old or too new for the GPU."""
READY = b"ready\n"
"""The line that is printed after the imports. The time limit of a check starts after this line, so
that imports do not count.
"""

Outcome = Literal["passed", "failed", "not looked at"]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of one check of a node.

    Attributes:
        name: the name of the check, in a form for sentences.
        outcome: `passed`, `failed`, or `not looked at` if the check could not be made.
        evidence: what the check found, in one sentence.
        seconds: the duration of the check in seconds.
        is_slow: True if the check failed because it exceeded its time limit, which also happens on
            a busy node.
    """

    name: str
    outcome: Outcome
    evidence: str
    seconds: float = 0.0
    is_slow: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the result in the form for messages and output."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Read a result that another process has sent.

        Raises:
            KeyError, TypeError, ValueError: the result is malformed.
        """
        outcomes: dict[str, Outcome] = {
            "passed": "passed",
            "failed": "failed",
            "not looked at": "not looked at",
        }
        return cls(
            name=str(fields["name"])[:64],
            outcome=outcomes[str(fields["outcome"])],
            evidence=str(fields["evidence"])[:MAX_EVIDENCE],
            seconds=float(fields["seconds"]),
            is_slow=fields.get("is_slow") is True,
        )


class Broken(Exception):
    """The check has failed; the message is the evidence."""


class NotLooked(Exception):
    """The check could not be made; the message states why."""


def main() -> None:
    """Run one check and print its result."""
    from holdfast.core.processes import die_with_parent

    name, folder, parent_pid = sys.argv[1:4]
    die_with_parent(int(parent_pid))
    import psutil  # noqa: F401 - for the checks, as the next import
    import xxhash  # noqa: F401

    os.write(1, READY)
    print(json.dumps(checked(name, CHECKS[name], Path(folder)).to_json()))  # noqa: T201 - the answer


def checked(name: str, check: Callable[[Path], str], folder: Path) -> CheckResult:
    """Run a check; return its result."""
    began_s = time.monotonic()
    outcome: Outcome = "passed"
    try:
        evidence = check(folder)
    except Broken as error:
        outcome, evidence = "failed", str(error)
    except NotLooked as error:
        outcome, evidence = "not looked at", str(error)
    except MemoryError:
        outcome, evidence = "not looked at", "there was no free memory for it"
    except OSError as error:
        outcome = "not looked at" if error.errno in NO_ROOM else "failed"
        evidence = str(error)
    except Exception as error:  # errors of torch have no common class
        outcome = "not looked at" if is_occupied(error) else "failed"
        evidence = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began_s
    text = " ".join(evidence.split())[:MAX_EVIDENCE]
    return CheckResult(name=name, outcome=outcome, evidence=text, seconds=seconds)


def is_occupied(error: Exception) -> bool:
    """Return True if an error of torch is no sign of broken hardware, such as a GPU in use."""
    return OCCUPIED.search(str(error)) is not None


def matrix_product(_folder: Path) -> str:
    """Multiply matrices of integers on each GPU, or else on the CPU; compare each element.

    All visible GPUs are checked. All sums are integers that float32 and bfloat16 represent exactly.
    So the order of summation and TF32 do not change the result, and any difference is a fault.
    """
    try:
        import torch
    except ImportError:
        raise NotLooked("torch is not installed here") from None
    if not torch.cuda.is_available():
        _multiply(torch, torch.device("cpu"), torch.float32, CPU_REPEATS)
        return "exact on the CPU; no GPU is visible"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    count = torch.cuda.device_count()
    for number in range(count):
        for dtype in (torch.float32, torch.bfloat16):
            _multiply(torch, torch.device("cuda", number), dtype, GPU_REPEATS)
    return f"exact on {count} GPUs"


def _multiply(torch: Any, device: Any, dtype: Any, repeats: int) -> None:
    # A[i, k] = a[(i + k) % PERIOD] and B[k, j] = b[(k - j) % PERIOD] with values of -1, 0 and 1.
    # Then C[i, j] = repeats · c[(i + j) % PERIOD], where c is computed here with Python's integers.
    source = random.Random(PERIOD)
    a, b = ([source.choice((-1, 0, 1)) for _ in range(PERIOD)] for _ in range(2))
    c = [sum(a[(s + k) % PERIOD] * b[k] for k in range(PERIOD)) for s in range(PERIOD)]
    index = torch.arange(PERIOD * repeats, device=device)
    rows, columns = index[:, None], index[None, :]
    left = torch.tensor(a, device=device, dtype=dtype)[(rows + columns) % PERIOD]
    right = torch.tensor(b, device=device, dtype=dtype)[(rows - columns) % PERIOD]
    expected = repeats * torch.tensor(c, device=device)[(rows + columns) % PERIOD]
    for _ in range(PRODUCTS):
        wrong = int((torch.matmul(left, right).to(torch.int64) != expected).sum())
        if wrong:
            raise Broken(f"{wrong} of {expected.numel()} elements are wrong on {device} ({dtype})")


def memory(_folder: Path) -> str:
    """Write patterns into a block of memory and read them back."""
    import psutil

    size_bytes = min(MEMORY_BYTES, psutil.virtual_memory().available // 8) // MIB * MIB
    if size_bytes == 0:
        raise NotLooked("less than 8 MiB of memory is free")
    with mmap.mmap(-1, size_bytes) as block:
        _write_and_read(block, size_bytes, "memory")
    return f"{size_bytes // MIB} MiB written and read back"


def _write_and_read(block: mmap.mmap, size_bytes: int, what: str) -> None:
    pattern = random.Random(size_bytes).randbytes(MIB)
    inverse = bytes(byte ^ 0xFF for byte in pattern)
    for written in (pattern, inverse):
        for offset in range(0, size_bytes, MIB):
            block[offset : offset + MIB] = written
        for offset in range(0, size_bytes, MIB):
            if block[offset : offset + MIB] != written:
                raise Broken(f"{what} holds other bytes than were written, at MiB {offset // MIB}")


def disk(folder: Path) -> str:
    """Write a file, force it to the disk, and read it back with a checksum."""
    import xxhash

    data = random.Random(DISK_BYTES).randbytes(MIB)
    path = folder / f"holdfast-check-{os.getpid()}"
    written, read = xxhash.xxh3_64(), xxhash.xxh3_64()
    try:
        with path.open("xb") as file:
            for _ in range(DISK_BYTES // MIB):
                file.write(data)
                written.update(data)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # read from the disk instead of the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with path.open("rb") as file:
            while chunk := file.read(MIB):
                read.update(chunk)
    finally:
        path.unlink(missing_ok=True)
    if read.digest() != written.digest():
        raise Broken(f"{folder} gives back other bytes than were written")
    return f"{DISK_BYTES // MIB} MiB written to {folder}, synchronised and read back"


def shared_memory(_folder: Path) -> str:
    """Write a file in /dev/shm through a memory mapping and read it back."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        raise NotLooked(f"there is no {folder}")
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < 2 * SHARED_BYTES:
        raise NotLooked(f"{folder} is full")  # else a write would cause SIGBUS
    path = folder / f"holdfast-check-{os.getpid()}"
    try:
        with path.open("x+b") as file:
            file.truncate(SHARED_BYTES)
            with mmap.mmap(file.fileno(), SHARED_BYTES) as block:
                _write_and_read(block, SHARED_BYTES, str(folder))
    finally:
        path.unlink(missing_ok=True)
    return f"{SHARED_BYTES // MIB} MiB written and read back"


CHECKS: dict[str, Callable[[Path], str]] = {
    "memory": memory,
    "disk": disk,
    "shared memory": shared_memory,
}


if __name__ == "__main__":
    main()
