"""Drive a real writing process from a test, without a training."""

import os
import select
import signal
from pathlib import Path

from images import TEN_FILES, half_copied, hand_made, is_whole, order_of, seal, sealed
from waiting import ENDS_S, until

from holdfast.checkpoint.ipc.shared_buffer import State
from holdfast.checkpoint.writer.client import Writer

LAYOUT = hand_made(sizes=TEN_FILES)


class Bench:
    """A writer, and an arena and a layout that the writer has."""

    def __init__(self, folder, *, layout=LAYOUT, timeout_s=60.0, max_write_bytes_s=None):
        self.folder = folder
        self.layout = layout
        self.writer = Writer(timeout_s=timeout_s, max_write_bytes_s=max_write_bytes_s)
        self.arena = sealed(layout, 1)
        self._numbers = self.writer.share_arena(self.arena), self.writer.share_layout(layout)
        self._is_new = True

    def save(self, step, order=None):
        if not self._is_new:
            seal(self.arena, self.layout, step)
        self._is_new = False
        return self.again(order or order_of(self.folder, step))

    def blocked_save(self, step, files, order=None):
        """Request a save, and wait until `files` files are written; it writes no further one.

        Returns:
            The future of the save, and the pipe to `take_away` for the save to go on.
        """
        order = order or order_of(self.folder, step)
        pipe = block(order, self.layout, files)
        save = self.save(step, order)
        until(lambda: len(list(order.staging.glob("*.xxh3"))) == files)
        return save, pipe

    def limit_this_process(self, timeout_s):
        """Set the time limit for the running process; later processes have the one of before."""
        writer, former_s, start = self.writer, self.writer._timeout_s, self.writer._start

        def start_with_former():
            writer._timeout_s = former_s
            start()

        writer._timeout_s, writer._start = timeout_s, start_with_former

    def again(self, order):
        arena, layout = self._numbers
        return self.writer.save(
            order,
            arena=arena,
            generation=self.arena.generation,
            layout=layout,
            attested_bytes=8 * len(self.layout.pieces),
        )

    def is_whole(self, step):
        return is_whole(self.folder, step, step, [self.layout])


def block(order, layout, files):
    """Make a pipe in place of a file of a save; return its path.

    A pipe without a reader blocks every process that opens it for writing.
    """
    order.staging.mkdir(exist_ok=True)
    pipe = order.staging / layout.shards[files].name
    os.mkfifo(pipe)
    return pipe


def take_away(pipe, pid):
    """Stop a process, and remove the pipe that blocks it, or soon would.

    If the process is continued, the kernel repeats the call that opens the pipe, which then makes a
    file; so does the next process.
    """
    kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    pipe.unlink()


def kill(pid, number=signal.SIGKILL):
    os.kill(pid, number)


def has_ended(pid):
    """Wait until a process, maybe no child of this one, has ended; return False if it lives on."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], ENDS_S)[0])
    finally:
        os.close(fd)


def following(made, files):
    """Request a save with only the first files copied, and wait until these are written."""
    made.arena.move(State.FREE, made.arena.generation)
    generation = half_copied(made.arena, made.layout, 1, files)
    ended = made.again(order_of(made.folder, 1))
    until(lambda: len(list(made.folder.glob(".step-*/*.xxh3"))) == files)
    assert made.arena.state is State.COPYING
    return generation, ended


def copy_the_rest(made, generation):
    size_bytes = made.layout.shards[-1].offset + made.layout.shards[-1].size_bytes
    made.arena.image[:size_bytes] = bytes([1]) * size_bytes
    made.arena.move(State.SEALED, generation)
