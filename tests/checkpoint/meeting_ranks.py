"""Run one rank: `meeting_ranks.py FOLDER RANK WORLD_SIZE SCENARIO…`. Exit with 0 if all is well.

The ranks do not save together, and each rank raises an error about that; the limits are short.
"""

import logging
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from waiting import ENDS_S, until

from holdfast.checkpoint import Checkpointer, scan
from holdfast.checkpoint.distributed import meeting
from holdfast.checkpoint.format.manifest import read_manifest
from holdfast.core.errors import BadUse, SaveFailed

STATE = {"t": torch.ones(3)}


def refused(work, *texts):
    with pytest.raises(BadUse) as raised:
        work()
    for text in texts:
        assert text in str(raised.value), (text, str(raised.value))


def restored(folder, **options):
    """Return a Checkpointer that all ranks have used."""
    ckpt = Checkpointer(folder, **options)
    assert ckpt.restore({"t": torch.zeros(3)}) in (0, 1)
    return ckpt


def rank_0_alone_saves(folder, rank, world_size):
    """The other ranks go on to the next step, where they wait for rank 0."""
    ckpt = restored(folder)
    if rank == 0:
        refused(
            lambda: ckpt.save(1, STATE),
            "save is collective, and rank 1 has not called save at step 1",
            "rank 1 waits in meeting_ranks.py:",
            "Call it on all ranks",
        )
    dist.barrier()
    assert not scan(folder)


def rank_0_alone_saves_first(folder, rank, world_size):
    """The other ranks have made their Checkpointers, but not used them."""
    ckpt = Checkpointer(folder)
    if rank == 0:
        refused(
            lambda: ckpt.save(1, STATE),
            "rank 1 has not called save at step 1",
            "rank 1 waits in meeting_ranks.py:",
        )
    dist.barrier()


def rank_0_alone_has_a_later_save(folder, rank, world_size):
    ckpt = restored(folder)
    ckpt.save(1, STATE).result()
    if rank == 0:
        refused(
            lambda: ckpt.save(2, STATE).result(),
            "rank 1 has not called save at step 2",
            "waits in meeting_ranks",
        )
    dist.barrier()
    assert [info.step for info in scan(folder)] == [1]


def ranks_save_at_other_steps(folder, rank, world_size):
    """Both ranks save at once, at different steps; afterwards they save together."""
    ckpt = restored(folder)
    text = "Ranks make different calls: rank 0 calls save at step 1 and rank 1 calls save at step 2. save"
    refused(lambda: ckpt.save(1 + rank, STATE), text)
    ckpt.save(3, STATE).result()
    refused(
        lambda: ckpt.save(4 + rank, STATE).result(),
        "rank 0 calls save at step 4 and rank 1 calls save at step 5",
    )
    ckpt.save(6, STATE).result()


def a_step_is_due_on_one_rank(folder, rank, world_size):
    ckpt = restored(folder, every=2)
    if rank:
        refused(
            lambda: ckpt.save(2, STATE),
            "rank 0 has not called save at step 2",
            "rank 0 has called save at step 1",
        )
    else:
        assert ckpt.save(1, STATE).step is None
    dist.barrier()
    assert not scan(folder)


def a_rank_is_a_step_ahead(folder, rank, world_size):
    """Rank 1 has gone on, because the step was not due there."""
    ckpt = restored(folder, every=2 + rank)
    if rank:
        assert ckpt.save(2, STATE).step is None
    else:
        refused(
            lambda: ckpt.save(2, STATE), "rank 1 has not called save at step 2", "rank 1 waits in"
        )
    dist.barrier()


def one_saves_and_one_restores(folder, rank, world_size):
    ckpt = restored(folder)
    work = (lambda: ckpt.save(1, STATE), lambda: ckpt.restore({"t": torch.zeros(3)}))[rank]
    refused(work, "rank 0 calls save at step 1 and rank 1 calls restore")


def one_has_closed(folder, rank, world_size):
    ckpt = restored(folder)
    if rank:
        ckpt.close()
    else:
        refused(lambda: ckpt.save(1, STATE), "rank 1 has closed its Checkpointer")
    dist.barrier()


def a_slow_rank_is_waited_for(folder, rank, world_size):
    """Rank 0 logs a warning, and then the other rank comes."""
    warned = folder.with_suffix(".warned")

    class Heard(logging.Handler):
        def emit(self, record):
            if "has not called save at step 1" in record.getMessage():
                warned.write_text(record.getMessage())

    heard = Heard()
    logging.getLogger("holdfast").addHandler(heard)
    ckpt = restored(folder)
    if rank:
        until(warned.exists)
    ckpt.save(1, STATE).result()
    logging.getLogger("holdfast").removeHandler(heard)
    assert "rank 1 is in waiting.py" in warned.read_text()
    assert [info.step for info in scan(folder)] == [1]


def a_rank_stands_in_a_collective_while_its_thread_comes(folder, rank, world_size):
    """The staging thread of the last rank is still busy; the main thread waits for rank 0."""
    ckpt = restored(folder)
    ckpt.save(1, STATE).result()
    ckpt.before_update()  # from now on, saves return before the copy
    thread_comes = threading.Event()
    if rank:
        ckpt._engine.thread._pool.submit(thread_comes.wait)
    handle = ckpt.save(2, STATE)
    if rank:
        beside = threading.Thread(
            target=lambda: (until(folder.with_suffix(".looked").exists), thread_comes.set())
        )
        beside.start()
        dist.barrier()
        beside.join()
    else:
        looks, ask = [], meeting._Lobby.ask

        def counted(*arguments):
            looks.append(time.monotonic())
            return ask(*arguments)

        meeting._Lobby.ask = counted
        until(lambda: handle.done() or (looks and looks[-1] - looks[0] > 3 * meeting.STUCK_S))
        meeting._Lobby.ask = ask
        folder.with_suffix(".looked").touch()
        dist.barrier()
    handle.result()


def a_rank_was_killed(folder, rank, world_size):
    """A killed rank cannot take part in later calls."""
    ckpt = restored(folder)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    refused(lambda: ckpt.save(1, STATE), "rank 1 has not called save at step 1", "rank 1 has ended")
    folder.with_suffix(".passed").touch()
    os._exit(0)


def ranks_have_other_folders(folder, rank, world_size):
    own = folder / str(rank)
    text = (
        f"The folder of rank 1, {folder / '1'}, is not the folder of rank 0, {folder / '0'}. Give"
    )
    refused(lambda: Checkpointer(own).save(1, STATE), text)
    refused(lambda: Checkpointer(own).restore(dict(STATE)), text)
    assert not list(own.iterdir())
    (folder / "link").symlink_to(folder / "0") if rank == 0 else None
    dist.barrier()
    ckpt = Checkpointer(folder / "link" if rank else own)
    ckpt.save(1, STATE).result()
    assert ckpt.restore(dict(STATE)) == 1


def entries_may_differ_but_not_in_kind(folder, rank, world_size):
    with Checkpointer(folder) as ckpt:
        ckpt.save(1, {**STATE, **({} if rank else {"best": 1.0})}).result()
        refused(
            lambda: ckpt.save(2, {"x": torch.ones(2) if rank else 1.0}),
            "Ranks 0 and 1 disagree about 'x'",
        )
    state = {"t": torch.zeros(3), "best": 0.0}
    assert Checkpointer(folder, read_only=True).restore(state) == 1
    assert state["best"] == 1.0


def a_group_of_the_ranks_saves(folder, rank, world_size):
    """Rank 0 belongs to no group of Checkpointers, and takes no part."""
    group = dist.new_group([1, 2])
    if rank == 0:
        refused(lambda: Checkpointer(folder, process_group=group), "not in process_group")
    else:
        for step in (1, 2):  # a second group of these ranks, after the first
            with Checkpointer(folder, process_group=group, sigterm_grace_s=60) as ckpt:
                training = {"t": torch.full((3,), float(step)), f"of-{rank}": step}
                path = ckpt.save(step, training, per_rank={"rank": rank}).result()
                state, mine = {"t": torch.zeros(3)}, {"rank": 0}
                assert ckpt.restore(state, per_rank=mine) == step
                assert (state["t"].tolist(), mine) == ([step] * 3, {"rank": rank})
            assert read_manifest(path, step=step).world_size == 2
            assert [each["rank"] for each in Checkpointer(folder).per_rank_states(step)] == [1, 2]
    dist.barrier()


def a_group_is_destroyed_before_its_saves_have_ended(folder, rank, world_size):
    """The ranks are those of the group at the time when the saves began."""
    group = dist.new_group([1, 2])
    if rank:
        ckpt = Checkpointer(folder, process_group=group)
        ckpt.save(1, STATE).result()
        ckpt.before_update()  # from now on, saves return before the copy
        goes_on, thread = threading.Event(), ckpt._engine.thread
        thread._pool.submit(goes_on.wait)
        good = ckpt.save(2, STATE)
        dist.destroy_process_group(group)
        goes_on.set()
        assert good.result(ENDS_S) is not None
        thread._agree = lambda *_: (_ for _ in ()).throw(SaveFailed("Step 3 was not saved."))
        bad = ckpt.save(3, STATE)
        until(bad.done)
        with pytest.raises(SaveFailed, match="Step 3"):
            ckpt.close()
        with pytest.raises(SaveFailed, match="Step 3"):
            bad.result(ENDS_S)
        refused(
            lambda: Checkpointer(folder, process_group=group), "process_group has been destroyed"
        )
    dist.barrier()


def main(folder, rank, world_size, *names):
    torch.set_num_threads(1)
    meeting.WARN_AFTER_S, meeting.STUCK_S, meeting._LOOK_EVERY_S = 0.5, 4.0, 0.05
    timeout = timedelta(seconds=600)
    init_method = f"file://{folder}/store-{world_size}"
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
    )
    for name in names:
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        globals()[name](Path(folder) / name, rank, world_size)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
