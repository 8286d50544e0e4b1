"""Send real SIGTERMs to real trainers: `sigterm_scenarios.py FOLDER NAME…`.

Exits with 0 if all is well. Each scenario has a folder of its own in FOLDER, and trainers forked
from this process, so that torch is imported once. With the name `train`, this is the program of one
rank of two, which sends itself SIGTERM.
"""

import atexit
import ctypes
import logging
import multiprocessing
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from waiting import until

from holdfast.checkpoint import Checkpointer, outlive_sigterm, scan, verify

LONG_S = 60.0
MIB = 1 << 20
FIRST = b"ready\n"


class Slow:
    """A value whose state is ready only after SIGTERM."""

    def __init__(self, ckpt, report):
        self._ckpt, self._report = ckpt, report

    def state_dict(self):
        return {"t": torch.ones(3)}

    def load_state_dict(self, _state):
        os.write(self._report, b"restoring\n")
        while not self._ckpt._sigterm.received:
            time.sleep(0.005)


def stuck_in_a_library():
    """Hang as in a collective with a dead rank: neither handlers nor system calls respond."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


def train(
    folder,
    report,
    *,
    rank=0,
    world_size=1,
    grace_s=LONG_S,
    every=1 << 40,
    mib=0,
    is_slow=False,
    waits=False,
    stuck_at=None,
    told_at=None,
    before=lambda: None,
    loads=lambda: None,
    **options,
):
    torch.set_num_threads(1)
    logging.basicConfig(filename=folder / f"log-{rank}", force=True)
    if world_size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
    before()
    options |= {"every": every, "sigterm_grace_s": grace_s, "keep_in_memory_s": None}
    with Checkpointer(folder / "ckpt", **options) as ckpt:
        state = {"w": torch.zeros(16 + mib * MIB // 4), "step": 0}
        if is_slow:
            state["slow"] = Slow(ckpt, report)
        start = ckpt.restore(state, per_rank={"rank": rank})
        data = iter(loads() or range(1 << 40))
        os.write(report, FIRST)
        for step in range(start + 1, 1 << 40):
            next(data)
            ckpt.before_update()
            state["w"].fill_(step)
            state["step"] = step
            handle = ckpt.save(step, state, per_rank={"rank": rank})
            if waits:
                handle.result()
            os.write(report, b"%d\n" % step)
            if step == told_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == stuck_at:
                stuck_in_a_library()
            time.sleep(0.003)


class Trainer:
    """A forked trainer, and its output."""

    def __init__(self, folder, **options):
        folder.mkdir(exist_ok=True)
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(reading)
                train(folder, writing, **options)
                code = 0
            except SystemExit as leaves:
                code = leaves.code
            except BaseException:
                traceback.print_exc()
            finally:
                with suppress(BaseException):
                    atexit._run_exitfuncs()
                os._exit(code)
        os.close(writing)
        self._lines = os.fdopen(reading, "rb")

    def says(self, line):
        for said in self._lines:
            if said == line:
                return
        raise AssertionError(f"it ended without saying {line}")

    def asked_to_end(self):
        os.kill(self.pid, signal.SIGTERM)

    def left(self):
        """Wait for the exit by SIGTERM, and return the last step."""
        steps = [int(said) for said in self._lines if said.strip().isdigit()]
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == 143
        self._lines.close()
        return steps[-1] if steps else None


def newest(folder):
    """Return the step of the newest checkpoint, after a check of every byte."""
    info = scan(folder / "ckpt")[0]
    assert verify(info).state == "verified"
    size = (info.path / "__0_0.distcp").stat().st_size
    state = {"w": torch.zeros(16 + (size // MIB) * MIB // 4), "step": 0}
    assert Checkpointer(folder / "ckpt").restore(state) == info.step == state["step"]
    assert state["w"].eq(info.step).all()
    return info.step


def log(folder, rank=0):
    return (folder / f"log-{rank}").read_text()


def it_saves_at_the_next_call_and_leaves(folder):
    trainer = Trainer(folder)
    trainer.says(b"5\n")
    trainer.asked_to_end()
    last = trainer.left()
    step = newest(folder)
    assert step >= 6
    assert last in (step - 1, None) or last < step
    assert f"SIGTERM: step {step} is saved" in log(folder)


def a_second_one_changes_nothing(folder):
    trainer = Trainer(folder, mib=8)
    trainer.says(b"5\n")
    trainer.asked_to_end()
    with suppress(ProcessLookupError):
        trainer.asked_to_end()
    trainer.left()
    assert newest(folder) >= 6


def during_a_save(folder):
    trainer = Trainer(folder, mib=33, every=2, max_write_mib_s=100)
    trainer.says(b"2\n")  # the checkpoint is being written
    trainer.asked_to_end()
    trainer.left()
    assert newest(folder) >= 3


def during_a_restore(folder):
    before = Trainer(folder, every=1, is_slow=True)
    before.says(b"3\n")
    before.asked_to_end()
    before.left()
    restored = scan(folder / "ckpt")[0].step
    trainer = Trainer(folder, is_slow=True)
    trainer.says(b"restoring\n")
    trainer.asked_to_end()
    trainer.left()
    assert newest(folder) == restored + 1


def the_handler_that_was_there_comes_last(folder):
    def before():
        signal.signal(
            signal.SIGTERM, lambda number, _frame: (folder / "told").write_text(str(number))
        )

    trainer = Trainer(folder, before=before)
    trainer.says(b"5\n")
    trainer.asked_to_end()
    trainer.left()
    assert (folder / "told").read_text() == "15"
    assert newest(folder) >= 6


def storage_that_stalls_is_waited_for_no_longer_than_the_grace_time(folder):
    first = Trainer(folder, mib=33, every=2)
    first.says(b"4\n")
    first.asked_to_end()
    first.left()
    step = newest(folder)
    trainer = Trainer(folder, mib=33, grace_s=1.5, max_write_mib_s=1e-3, every=step + 1)
    trainer.says(b"%d\n" % (step + 1))  # never durable
    writer = writer_of(trainer.pid)
    trainer.asked_to_end()
    trainer.left()
    os.kill(writer, signal.SIGKILL)
    assert (
        f"SIGTERM: the grace period of 1.5 s is over. The newest checkpoint is {scan(folder / 'ckpt')[0].path}"
        in log(folder)
    )
    assert newest(folder) == step


def a_main_thread_that_is_stuck_ends_all_the_same(folder):
    trainer = Trainer(folder, grace_s=1.0, stuck_at=3)
    trainer.says(b"3\n")
    time.sleep(0.1)
    trainer.asked_to_end()
    trainer.left()
    assert "the grace period of 1 s is over. This process has found no checkpoint" in log(folder)


def a_forked_worker_is_ended_by_it_and_its_parent_is_not(folder):
    folder.mkdir()
    child = os.fork()
    if child == 0:
        with suppress(BaseException), Checkpointer(folder / "ckpt", sigterm_grace_s=LONG_S) as ckpt:
            runs, report = os.pipe()
            worker = os.fork()
            if worker == 0:
                os.write(report, b".")
                time.sleep(LONG_S)
                os._exit(1)
            os.read(runs, 1)
            os.kill(worker, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
            ckpt.save(1, {"a": 1}).result(LONG_S)
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def it_is_given_back_when_the_checkpointer_is_closed(folder):
    before = signal.getsignal(signal.SIGTERM)
    fds = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        Checkpointer(folder, sigterm_grace_s=LONG_S).close()
    assert signal.getsignal(signal.SIGTERM) is before
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= fds)


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def nothing_is_written_into_the_wrong_file_once_it_is_closed(folder):
    before = signal.getsignal(signal.SIGTERM)

    def of_the_script(_number, _frame):
        pass

    ckpt = Checkpointer(folder, sigterm_grace_s=LONG_S)
    signal.signal(signal.SIGTERM, of_the_script)
    ckpt.close()
    assert signal.getsignal(signal.SIGTERM) is of_the_script
    assert signal.set_wakeup_fd(-1) == -1
    signal.signal(signal.SIGTERM, before)

    first, second = (Checkpointer(folder, sigterm_grace_s=LONG_S) for _ in range(2))
    first.close()
    assert signal.set_wakeup_fd(second._sigterm._write_fd) == second._sigterm._write_fd
    second.close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1

    ckpt = Checkpointer(folder, sigterm_grace_s=LONG_S)
    in_a_thread(ckpt.close)
    assert stat.S_ISFIFO(os.fstat(signal.set_wakeup_fd(-1)).st_mode)
    signal.signal(signal.SIGTERM, before)


def ends_with(work):
    """Return the exit code of a process that calls `work`."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def once_it_is_closed_the_handler_before_it_is_called(folder):
    def work():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        ckpt = Checkpointer(folder, sigterm_grace_s=LONG_S)
        ours = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: [ours(number, frame)])
        ckpt.close()
        signal.raise_signal(signal.SIGTERM)

    assert ends_with(work) == 7


def once_it_is_closed_by_another_thread_it_does_what_was_done_before(folder):
    def work():
        ckpt = Checkpointer(folder, sigterm_grace_s=0.01)
        in_a_thread(ckpt.close)
        signal.raise_signal(signal.SIGTERM)

    assert ends_with(work) == -signal.SIGTERM


def data_workers_outlive_it(folder):
    """All processes receive the signal, as from torchrun."""

    def loads():
        return DataLoader(range(1 << 20), num_workers=2, worker_init_fn=outlive_sigterm(LONG_S))

    trainer = Trainer(folder, before=os.setsid, loads=loads)
    trainer.says(b"5\n")
    os.killpg(trainer.pid, signal.SIGTERM)
    trainer.left()
    assert newest(folder) >= 6


def has_pending(pid, number):
    """Return True if a signal that was sent to a process is still pending."""
    (told,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("ShdPnd:")
    )
    return bool(int(told.split()[1], 16) >> (number - 1) & 1)


def a_data_worker_is_ended_by_its_trainer_at_once_and_by_others_after_the_grace_time(folder):
    def work(begin, ready):
        begin(0)
        os.write(ready, b".")
        time.sleep(LONG_S)

    for grace_s, is_ended_by_trainer in ((LONG_S, True), (0.2, False)):
        reading, ready = os.pipe()
        begin = pickle.loads(pickle.dumps(outlive_sigterm(grace_s)))
        worker = multiprocessing.get_context("fork").Process(target=work, args=(begin, ready))
        worker.start()
        os.read(reading, 1)
        for _ in range(2):
            subprocess.run(["kill", str(worker.pid)], check=True)
            # Otherwise the next signal would merge with this one.
            until(lambda pid=worker.pid: not has_pending(pid, signal.SIGTERM))
        if is_ended_by_trainer:
            assert worker.is_alive()
            worker.terminate()
        worker.join(LONG_S / 2)
        assert worker.exitcode == 143


def two_ranks_agree_on_the_step(folder):
    trainers = [Trainer(folder, rank=rank, world_size=2) for rank in range(2)]
    trainers[0].says(b"5\n")
    trainers[1].asked_to_end()
    for trainer in trainers:
        trainer.left()
    step = newest(folder)
    theirs = Checkpointer(folder / "ckpt").per_rank_states(step)
    assert theirs == [{"rank": 0}, {"rank": 1}]
    assert len(scan(folder / "ckpt")) == 1


def two_ranks_told_at_different_steps(folder):
    trainers = [Trainer(folder, rank=rank, world_size=2, every=7) for rank in range(2)]
    for rank, said in ((0, b"20\n"), (1, b"40\n")):
        with suppress(AssertionError):  # the signal has arrived already
            trainers[rank].says(said)
            trainers[rank].asked_to_end()
    for trainer in trainers:
        trainer.left()
    step = newest(folder)
    assert step >= 21
    assert Checkpointer(folder / "ckpt").per_rank_states(step) == [{"rank": 0}, {"rank": 1}]


def a_rank_that_stands_still_does_not_keep_the_other(folder):
    trainers = [
        Trainer(folder, rank=rank, world_size=2, grace_s=1.5, every=5, waits=True)
        for rank in range(2)
    ]
    trainers[1].says(b"12\n")
    os.kill(trainers[1].pid, signal.SIGSTOP)
    trainers[0].asked_to_end()
    trainers[0].left()
    os.kill(trainers[1].pid, signal.SIGKILL)
    os.waitpid(trainers[1].pid, 0)
    assert newest(folder) >= 5
    assert "is over. The newest checkpoint is" in log(folder)


def writer_of(pid):
    """Return the writing process of the trainer `pid`: its only child."""
    (child,) = [
        child
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return int(child)


def main(folder, names):
    if names[0] == "train":
        train(folder, 1, rank=int(names[1]), world_size=2, told_at=9)
    for name in names:
        globals()[name](folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
