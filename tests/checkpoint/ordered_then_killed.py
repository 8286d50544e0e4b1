"""Request a save of step 2, and wait to be killed.

Run as `ordered_then_killed.py FOLDER FORKS FILES`. FILES of the ten files are copied.

Prints the process ids of the writing process and of a child that shares this process's open files,
or 0 without a child.
"""

import os
import signal
import sys
from pathlib import Path

from images import TEN_FILES, half_copied, hand_made, order_of, sealed

from holdfast.checkpoint.ipc.shared_buffer import State
from holdfast.checkpoint.writer.client import Writer


def main(folder, forks, files):
    layout = hand_made(sizes=TEN_FILES)
    arena = sealed(layout, 2)
    if files < len(layout.shards):
        arena.move(State.FREE, arena.generation)
        half_copied(arena, layout, 2, files)
    writer = Writer(timeout_s=60, max_write_bytes_s=None)
    ended = writer.save(
        order_of(folder, 2),
        arena=writer.share_arena(arena),
        generation=arena.generation,
        layout=writer.share_layout(layout),
        attested_bytes=8 * len(layout.pieces),
    )
    child = os.fork() if forks else 0
    if forks and child == 0:
        signal.pause()
    sys.stdout.write(f"{writer.pid} {child}\n")
    sys.stdout.flush()
    ended.exception()
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "forks", int(sys.argv[3]))
