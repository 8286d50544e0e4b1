"""Run generated programs against their tests, without harm and without forged verdicts.

A trial has two jails that share only one socket. The program runs in the first jail. The tests run
in the second jail, and use the program's functions and classes through the socket, by calls with
plain data as arguments and results. So a program that changes its own process (operators, builtins,
assertions, exits, output) cannot change the comparison in the tests. The verdict is written to a
pipe that the program never has. A jail is an unprivileged user without network, with resource
limits, and, if available, in namespaces and restricted by Landlock and seccomp (`confine`).

Some tests cannot run this way. The verdict is "cannot be tested", and never "passed", if a test
would let the program's own operators decide a comparison, derives a class from the program's class,
or patches the program's module. The tests do not see the program's output, and a list that the
program returns is a copy.
"""

import contextlib
import json
import os
import queue
import secrets
import select
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.core.child_process import end_within
from holdfast.core.errors import BadUse
from holdfast.evaluate.metrics.sandbox.codec import Malformed, receive, send
from holdfast.evaluate.metrics.sandbox.confine import Limits
from holdfast.evaluate.metrics.sandbox.forkserver import is_open_to_others, readable_paths
from holdfast.evaluate.metrics.sandbox.rpc import ENDED_EARLY
from holdfast.evaluate.metrics.sandbox.supervisor import NOT_WANTED
from holdfast.evaluate.types.errors import EvaluationError

__all__ = ["Limits", "Protection", "Sandbox", "Verdict"]

MAX_SLOTS = 48
_START_S = 20.0
_GRACE_S = 5.0
_LAST_WORD_S = 0.5
_SOURCE = str(Path(__file__).resolve().parents[4])
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[3]); "
    "from holdfast.evaluate.metrics.sandbox.forkserver import main; main(int(sys.argv[1]), "
    "sys.argv[2])"
)


@dataclass(frozen=True, kw_only=True)
class Protection:
    """Describe how this machine protects itself against programs, as found at the start.

    Attributes:
        user: how jails lose the rights of the caller: "another user" or "a user namespace".
        namespaces: True if jails have separate files, processes, network and interprocess
            communication.
        seccomp: True if the kernel refuses sockets and other system calls.
        landlock: the version of Landlock; 0 if the kernel has none.
    """

    user: str
    namespaces: bool
    seccomp: bool
    landlock: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of running a program against its tests.

    Attributes:
        passed: True if the tests ran to their end without a failure.
        reason: "passed", "failed: AssertionError", "timed out", "killed: memory", "cannot be
            tested: ...".
        seconds: the seconds from the call to the verdict.
        output_tail: the end of the program's output and then of the tests' output, for people to
            read.
    """

    passed: bool
    reason: str
    seconds: float
    output_tail: str = ""


class Sandbox:
    """Run trials, at most `slots` at the same time; safe to use from several threads.

    All processes of a sandbox end with the process that owns the sandbox, even if that process is
    killed.
    """

    def __init__(
        self,
        slots: int | None = None,
        limits: Limits | None = None,
        *,
        packages: bool = True,
        namespaces: bool = True,
    ) -> None:
        """Start the sandbox's parent process.

        Args:
            slots: the number of trials at the same time; None for the number of cores of this
                process.
            limits: the limits of each program's jail and of each tests' jail.
            packages: True to let programs import the packages installed for this interpreter, as in
                an unmodified harness.
            namespaces: False to run without namespaces.

        Raises:
            BadUse: this machine lacks the minimum of protection, or `slots` is out of range.
        """
        slots = slots or len(os.sched_getaffinity(0))
        if not 1 <= slots <= MAX_SLOTS:
            raise BadUse(
                f"A sandbox has 1 to {MAX_SLOTS} slots, not {slots}; start several of them for "
                "more."
            )
        self.limits = limits or Limits()
        paths = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) if packages else ()
        self._site_packages = tuple(dict.fromkeys(os.path.realpath(path) for path in paths))
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(slots):
            self._free.put(slot)
        self._lock = threading.Lock()
        self._namespaces = namespaces
        self._closed = False
        self._start()

    def _start(self) -> None:
        """Start the forkserver with the best protection that this machine offers."""
        readable = readable_paths(self._site_packages)
        refusals = []
        for mode in ("namespaces", "plain") if self._namespaces else ("plain",):
            refusal = "namespaces are not permitted"
            if mode == "plain" and os.geteuid() != 0:
                refusal = "taking on another user needs root"
            elif mode == "plain" and not all(is_open_to_others(path) for path in readable):
                refusal = f"other users cannot read the Python in {sys.base_prefix}"
            else:
                self._process, self._control = self._launch(mode, readable)
                facts = self._first_word()
                if "refused" not in facts and (facts["namespaces"] or facts["seccomp"]):
                    self.protection = Protection(**facts)
                    return
                refusal = facts.get(
                    "refused", "no network namespace, and no seccomp to forbid sockets"
                )
                self._stop()
            refusals.append(refusal)
        raise BadUse(
            f"Generated code cannot be run safely on this machine ({'; '.join(refusals)}). Allow "
            "user namespaces "
            "(sysctl user.max_user_namespaces, or --cap-add SYS_ADMIN for a container), or run as "
            "root with seccomp."
        )

    def _launch(
        self, mode: str, readable: tuple[str, ...]
    ) -> tuple["subprocess.Popen[bytes]", socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [
            os.path.realpath(sys.executable),
            "-s",
            "-S",
            "-P",
            "-c",
            _PROGRAM,
            str(theirs.fileno()),
            mode,
        ]
        process = subprocess.Popen(
            [*command, _SOURCE],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"},
            cwd="/",
        )
        theirs.close()
        first = {
            "limits": asdict(self.limits),
            "readable": readable,
            "site_packages": self._site_packages,
        }
        with contextlib.suppress(OSError):
            ours.send(json.dumps(first).encode())
        return process, ours

    def _first_word(self) -> dict[str, Any]:
        ready, _, _ = select.select([self._control], [], [], _START_S)
        word = self._control.recv(4096) if ready else b""
        facts: dict[str, Any] = (
            json.loads(word) if word else {"refused": "its first process ended or hangs"}
        )
        return facts

    def run(self, program: str, tests: str, *, wall_s: float | None = None) -> Verdict:
        """Run a program against its tests, once a slot is free.

        Args:
            program: the source of the whole program (prompt and completion).
            tests: the source of the tests, which use the program's names, and raise an exception if
                the program is wrong.
            wall_s: the seconds for this trial, instead of `limits.wall_s`.

        Raises:
            EvaluationError: the sandbox itself failed.
        """
        slot = self._free.get()
        try:
            for _ in range(2):
                verdict = self._try(slot, program, tests, wall_s or self.limits.wall_s)
                if verdict is not None:
                    return verdict
                self._restart()  # killed from outside: a trial has no effects, so it may run again
            raise EvaluationError(
                "The sandbox was killed twice during one trial; see the kernel's log for what did "
                "it."
            )
        finally:
            self._free.put(slot)

    def _try(self, slot: int, program: str, tests: str, wall_s: float) -> Verdict | None:
        """Run one trial; return None if the sandbox's processes ended during the trial."""
        started_s = time.monotonic()
        nonce = secrets.token_hex(16)
        with contextlib.ExitStack() as stack:
            links = socket.socketpair()
            orders = [socket.socketpair() for _ in range(2)]
            for each in (*links, *(end for order in orders for end in order)):
                stack.callback(each.close)
            programs, testers = (order[0] for order in orders)
            try:
                for number in range(2):
                    fds = [orders[number][1].fileno(), links[number].fileno()]
                    socket.send_fds(self._control, [str(2 * slot + number).encode()], fds)
                    orders[number][1].close()
                    links[number].close()
                send(programs, {"role": "program", "source": program, "wall_s": wall_s + _GRACE_S})
                send(testers, {"role": "tester", "source": tests, "nonce": nonce, "wall_s": wall_s})
                tested = _report(testers, wall_s + _GRACE_S)
                if ENDED_EARLY in tested["verdict"]:
                    # Wait for the warden's report of the program's end.
                    select.select([programs], [], [], _LAST_WORD_S)
                programs.shutdown(socket.SHUT_WR)  # the program is not needed any more
                ran = _report(programs, _GRACE_S)
            except (OSError, EOFError):
                return None
            except ValueError as error:
                return Verdict(
                    passed=False, reason=f"failed: {error}", seconds=time.monotonic() - started_s
                )
        passed, reason = _judge(tested, ran, nonce)
        tail = ran["output"] + tested["output"]
        return Verdict(
            passed=passed, reason=reason, seconds=time.monotonic() - started_s, output_tail=tail
        )

    def process_id(self) -> int:
        """Return the id of the process that is the ancestor of all others in the sandbox."""
        return self._process.pid

    def _restart(self) -> None:
        with self._lock:
            if self._closed:
                raise EvaluationError("The sandbox was closed while a trial ran.")
            ready, _, _ = select.select([self._control], [], [], 0)
            if ready:  # the forkserver has ended, and no other thread has restarted it
                self._stop()
                self._start()

    def _stop(self) -> None:
        self._control.close()
        end_within(self._process, _GRACE_S)

    def close(self) -> None:
        """End every process of the sandbox."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._stop()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _report(order: socket.socket, timeout_s: float) -> dict[str, str]:
    """Wait until a jail has ended, and return its supervisor's report.

    Raises:
        EOFError, OSError: the sandbox's processes ended.
        EvaluationError: the jail could not be created.
    """
    order.settimeout(timeout_s)
    try:
        report: dict[str, str] = receive(order)
    except Malformed as error:
        raise EOFError from error
    if "broken" in report:
        raise EvaluationError(f"A jail of the sandbox could not be made: {report['broken']}")
    with contextlib.suppress(OSError):
        order.recv(1)  # wait until the warden itself has ended
    return report


def _judge(tested: dict[str, str], ran: dict[str, str], nonce: str) -> tuple[bool, str]:
    """Return whether the program passed, and the reason.

    The verdict is the tests' own if it has the nonce, unless the tests timed out or the program
    ended early.
    """
    if tested["ended"] == "timed out":
        return False, "timed out"
    try:
        verdict = json.loads(tested["verdict"])
        is_theirs = secrets.compare_digest(str(verdict["nonce"]), nonce)
    except (ValueError, KeyError, TypeError):
        is_theirs = False
    if not is_theirs:
        return False, f"failed: the tests {tested['ended']} without a verdict"
    ended_early = ran["ended"] != NOT_WANTED
    if ended_early and (verdict["passed"] or ENDED_EARLY in verdict["reason"]):
        return False, ran["ended"] if ran["ended"].startswith(
            "killed"
        ) else f"failed: the program {ran['ended']}"
    return verdict["passed"] is True, verdict["reason"]
