"""Kill or stop real trainers and their writing processes, at each system call of the writing."""

import os
import random
import select
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkpoint_faulting.calls import Strike, Traced
from checkpoint_faulting.forks import PATIENCE_S, Failed, Fork
from checkpoint_faulting.ground import NEXT, STEPS, Ground
from checkpoint_faulting.oracle import RIGHT, Verdict, judge, leftovers
from checkpoint_faulting.state import per_rank_of, state_of
from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.catalog.staging_dir import remove_leftovers
from holdfast.checkpoint.writer import client as writer

WRITER: Final = "kill -9 of the writing process at a system call"
TRAINER: Final = "kill -9 of the trainer at a system call of its writing process"
BOTH: Final = "kill -9 of both at a system call of the writing process"
STOPPED: Final = "SIGSTOP of the writing process"
KEPT: Final = "kill -9 of a trainer whose snapshot is kept in memory"
AT_CALLS: Final = (WRITER, TRAINER, BOTH)
AT_TIMES: Final = (STOPPED, KEPT)
KINDS: Final = (*AT_CALLS, *AT_TIMES)
LATER: Final = (50, 60)
"""Steps that are saved in direct succession, once the writing process is known."""
ENDS_S: Final = 20.0
LATEST_S: Final = 0.03
"""A save is over after this time."""


def train(
    folder: Path, seed: int, say: int, go: int, silent_s: float, keep_s: float | None
) -> None:
    """Save step NEXT, send the writing process' pid, and save the later steps.

    The later steps are saved once `go` is closed. Each durable step is sent to `say`.
    """
    writer._SILENT_S = silent_s  # type: ignore[misc]

    def tell(*words: object) -> None:
        os.write(say, (" ".join(map(str, words)) + "\n").encode())

    with Checkpointer(folder, keep=None, keep_in_memory_s=keep_s) as ckpt:
        for step in (NEXT, *LATER):
            handle = ckpt.save(step, state_of(seed, step), per_rank=per_rank_of(seed, step, 0))
            if step != LATER[0]:  # that one is written while the next is copied
                handle.result()
                tell("writer", ckpt._engine._writer.pid)
                tell("durable", step)
            if step == NEXT:
                os.read(go, 1)
    tell("done")


@dataclass(frozen=True)
class Blow:
    """A fault; `call` counts the writing process' calls from the request to save step 50 on."""

    kind: str
    number: int
    call: int
    ground: Ground
    scratch: Path
    silent_s: float = 15.0

    def run(self) -> tuple[Verdict, bool]:
        """Run in this process; also return whether a fault was injected."""
        verdict, _calls, is_struck = self._run()
        return verdict, is_struck

    def calls(self) -> int:
        """Return the number of calls."""
        return self._run()[1]

    def _run(self) -> tuple[Verdict, int, bool]:
        folder = self.scratch / f"blow-{KINDS.index(self.kind)}-{self.number}"
        self.ground.lay_down(1, folder)
        (heard, say), (go, gate) = os.pipe(), os.pipe()
        keep_s = ENDS_S if self.kind == KEPT else None
        trainer = Fork(
            _train_alone, heard, gate, folder, self.ground.seed, say, go, self.silent_s, keep_s
        )
        os.close(say)
        os.close(go)
        try:
            told = _hear(heard, b"durable")
            calls, is_struck = self._strike(trainer.pid, *_pids(told), gate)
            told += _hear(heard, None)
            return self._judge(folder, trainer.pid, told, is_struck), calls, is_struck
        except Failed as error:
            return Verdict("stuck", str(error)), 0, True
        finally:
            os.close(heard)
            trainer.end()
            shutil.rmtree(folder, ignore_errors=True)

    def _strike(self, trainer: int, writing: int, gate: int) -> tuple[int, bool]:
        """Let the later saves begin; return the number of calls, and True after a fault."""
        if self.kind in AT_TIMES:
            os.close(gate)
            time.sleep(random.Random(f"{self.ground.seed}/{self.number}").uniform(0, LATEST_S))
            try:
                os.kill(
                    *(
                        (writing, signal.SIGSTOP)
                        if self.kind == STOPPED
                        else (trainer, signal.SIGKILL)
                    )
                )
            except ProcessLookupError:  # it has ended before
                return 0, False
            return 0, True
        victims = {WRITER: (writing,), TRAINER: (trainer,), BOTH: (trainer, writing)}[self.kind]

        def kill() -> None:
            for victim in victims:
                os.kill(victim, signal.SIGKILL)

        traced = Traced.seize(
            writing, lambda count, _: Strike("kill") if count == self.call else None, kill
        )
        os.close(gate)
        traced.run()
        return len(traced.names), bool(traced.injected)

    def _judge(self, folder: Path, trainer: int, told: bytes, is_struck: bool) -> Verdict:
        goes_on = self.kind in (WRITER, STOPPED) or not is_struck
        if goes_on and b"done" not in told:
            return Verdict("stuck", f"the trainer did not go on: {told!r}")
        living = [] if self.kind == KEPT else _still_there([trainer, *_pids(told)])
        _await(lambda: self.kind != KEPT or not leftovers(folder))
        durable = [
            int(line.split()[1]) for line in told.splitlines() if line.startswith(b"durable")
        ]
        verdict = judge(
            folder,
            self.ground.seed,
            world_size=1,
            attested=(*STEPS, NEXT, *LATER),
            least=max(durable),
        )
        if not verdict.is_right:
            return verdict
        if self.kind == KEPT:  # until somebody has restored
            living = _still_there([trainer, *_pids(told)])
        if living:
            return Verdict("left", f"processes: {living}")
        if self.kind != BOTH and leftovers(folder):  # a living process leaves nothing
            return Verdict("left", f"{leftovers(folder)}")
        remove_leftovers(folder)
        return Verdict("left", f"{leftovers(folder)}") if leftovers(folder) else RIGHT


def _train_alone(heard: int, gate: int, *arguments: object) -> None:
    os.close(heard)
    os.close(gate)
    train(*arguments)  # type: ignore[arg-type]


def _hear(fd: int, word: bytes | None) -> bytes:
    """Return the trainer's output up to a word, or up to its end."""
    told, until_s = b"", time.monotonic() + PATIENCE_S
    while word is None or word not in told:
        if not select.select([fd], [], [], max(0.0, until_s - time.monotonic()))[0]:
            raise Failed("the trainer hangs")
        chunk = os.read(fd, 4096)
        if not chunk:
            break
        told += chunk
    if word is not None and word not in told:
        raise Failed(f"the trainer ended early: {told!r}")
    return told


def _pids(told: bytes) -> list[int]:
    return list(
        dict.fromkeys(
            int(line.split()[1]) for line in told.splitlines() if line.startswith(b"writer")
        )
    )


def _still_there(pids: list[int]) -> list[int]:
    """Return the processes that still live after a while."""
    _await(lambda: not any(map(_lives, pids)))
    return list(filter(_lives, pids))


def _await(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + ENDS_S / 2
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.005)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
