"""Test that a supervised trainer's data workers outlive SIGTERM, but not their trainer.

The children of a worker do not outlive SIGTERM.
"""

import textwrap

from started_ranks import run_program

BEGIN = """
import os, signal, subprocess, sys, time, warnings
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling
from holdfast.checkpoint.schedule.data_workers import spare_workers
LONG_S = 60.0

class Data(Dataset):
    def __len__(self):
        return 8

spare_workers()
"""


def run(script):
    done = run_program(BEGIN + textwrap.dedent(script))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_what_a_worker_starts_is_ended_by_sigterm():
    run("""
        def item(self, index):
            program = subprocess.Popen(["sleep", "1000"])
            program.terminate()
            ended = [program.wait(LONG_S)]
            ready, write = os.pipe()
            # Since Python 3.12, a fork beside threads warns; a worker has multiprocessing's.
            warnings.simplefilter("ignore", DeprecationWarning)
            if (child := os.fork()) == 0:
                os.write(write, b".")
                time.sleep(LONG_S)
                os._exit(1)
            os.read(ready, 1)
            os.kill(child, signal.SIGTERM)
            return [*ended, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]

        Data.__getitem__ = item
        assert next(iter(DataLoader(Data(), num_workers=1, batch_size=None))) == [-signal.SIGTERM] * 2
    """)


def test_a_worker_outlives_sigterm_and_its_trainer_ends_it():
    """PyTorch ends a worker that does not leave, and multiprocessing does at the trainer's end."""
    run("""
        def item(self, index):
            if index >= 4:
                time.sleep(1000)
            return index

        def begin(worker):
            os.environ["BEGUN"] = str(worker)

        def pid(self, index):
            return item(self, index), os.getpid(), os.environ["BEGUN"]

        Data.__getitem__ = pid
        batches = iter(DataLoader(Data(), num_workers=2, batch_size=None, prefetch_factor=1, worker_init_fn=begin))
        (_, first, one), (_, second, two) = next(batches), next(batches)
        assert (one, two) == ("0", "1")
        for worker in (first, second):
            subprocess.run(["kill", str(worker)], check=True)
        assert [next(batches)[0], next(batches)[0]] == [2, 3]
        signal_handling._remove_worker_pids(id(batches))  # as PyTorch does before it ends them
        one, two = batches._workers
        one.terminate()
        one.join(LONG_S)
        two._popen.terminate()
        two.join(LONG_S)
        assert (one.exitcode, two.exitcode) == (-signal.SIGKILL, -signal.SIGKILL)
        os._exit(0)
    """)
