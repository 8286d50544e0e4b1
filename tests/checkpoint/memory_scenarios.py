"""Check which ranks receive the snapshots in memory of ranks that died.

Run as `memory_scenarios.py FOLDER`. Prints one JSON object: each scenario's name, and its error or
null. Trainers are forked from this process, so that torch is imported once. Each scenario has a
folder of its own in FOLDER.
"""

import contextlib
import json
import logging
import os
import random
import select
import shutil
import signal
import socket
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.checkpoint import Checkpointer, scan
from holdfast.checkpoint.format.checksums import BLOCK_BYTES
from holdfast.checkpoint.format.manifest import read_manifest, write_manifest
from holdfast.checkpoint.format.rank_layout import PAGE_BYTES
from holdfast.checkpoint.memory import client as kept
from holdfast.checkpoint.memory import server as keeping
from holdfast.checkpoint.save import staging_thread
from holdfast.core.link import Unsupervised, set_job_link

COUNT = 300_000
NOBODY = 65534
ENDS_S = 30.0
SCENARIOS = {}


def scenario(work):
    SCENARIOS[work.__name__] = work
    return work


class Heard(Unsupervised, logging.Handler):
    """Record restores that are reported to a supervisor, and warnings to the user."""

    def __init__(self):
        logging.Handler.__init__(self, logging.WARNING)
        self.restored = []
        self.warnings = []

    def emit(self, *said):
        if len(said) == 1:
            self.warnings.append(said[0].getMessage())
        elif said[0] == "restored":
            self.restored.append(dict(said[1]))


HEARD = Heard()


def state_of(value):
    return {
        "value": value,
        "big": torch.full((COUNT,), float(value)),
        "some": [torch.tensor(value)] * 3,
    }


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def run_trainer(work, *, ranks=1):
    """Fork ranks that call `work(report, rank)`; return the exit codes and the reported numbers."""
    reader, report = os.pipe()
    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1] == 0:
            code = 99
            try:
                work(lambda number: os.write(report, b"%d\n" % number), rank)
                code = 0
            except SystemExit as error:
                code = error.code
            except Expected:
                code = 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
    os.close(report)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    with os.fdopen(reader) as told:
        return codes, [int(line) for line in told]


class Expected(Exception):
    """An error with which a training fails on purpose."""


def dead_trainer(folder, *, steps=(1, 2), then=die, **options):
    """Run a trainer that saves `steps` durably and then calls `then`; return its writing process."""

    def work(report, _rank):
        with Checkpointer(folder, **options) as ckpt:
            for step in steps:
                ckpt.save(step, state_of(step)).result()
            report(ckpt._engine._writer.pid)
            then(ckpt)

    _codes, (writer,) = run_trainer(work)
    return writer


def await_end(pid):
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        assert select.select([fd], [], [], ENDS_S)[0], "the process goes on"
        os.close(fd)


def assert_restored(folder, step, tier, **options):
    """Restore; check the values and the source, and that this process keeps no snapshot memory."""
    HEARD.warnings.clear()
    state = state_of(-1)
    with Checkpointer(folder, **options) as ckpt:
        found = ckpt.restore(state)
    assert found == state["value"] == step, (found, state["value"], HEARD.warnings)
    assert state["big"].eq(step).all()
    assert all(each.item() == step for each in state["some"])
    assert HEARD.restored[-1]["tier"] == tier, (HEARD.restored[-1], HEARD.warnings)
    assert not [name for name in open_files() if "memfd:holdfast" in name], open_files()


def open_files():
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder itself, during the listing
            found.append(str(fd.readlink()))
    return found


def spoil(path):
    """Overwrite a checkpoint's data with noise, of the same sizes, and keep the manifest."""
    for file in [*path.glob("*.distcp"), *path.glob("*.xxh3"), path / ".metadata"]:
        file.write_bytes(os.urandom(file.stat().st_size))


def is_kept(folder, rank=0):
    found = kept.ask(folder, rank)
    if found is not None:
        found.close()
    return found is not None


@scenario
def a_killed_trainer_s_successor_takes_nothing_from_the_disk(folder):
    writer = dead_trainer(folder)
    spoil(scan(folder)[0].path)
    assert_restored(folder, 2, "memory")
    await_end(writer)
    assert not is_kept(folder)


@scenario
def an_exception_or_an_exit_that_is_not_zero_leaves_it_as_well(folder):
    def fail(_ckpt):
        raise Expected

    for name, then in {"exception": fail, "exit": lambda _ckpt: sys.exit(3)}.items():
        writer = dead_trainer(folder / name, then=then)
        assert_restored(folder / name, 2, "memory")
        await_end(writer)


@scenario
def a_training_that_ends_in_good_order_leaves_nothing(folder):
    for name, then in {"end": lambda _ckpt: None, "exit": lambda _ckpt: sys.exit(0)}.items():
        await_end(dead_trainer(folder / name, then=then))
        assert not is_kept(folder / name)
        assert_restored(folder / name, 2, "disk")


@scenario
def who_only_reads_leaves_it_to_the_successor(folder):
    writer = dead_trainer(folder)
    assert_restored(folder, 2, "disk", read_only=True)
    assert_restored(folder, 2, "memory")
    await_end(writer)


@scenario
def it_need_not_be_kept(folder):
    await_end(dead_trainer(folder, keep_in_memory_s=None))
    assert_restored(folder, 2, "disk")


@scenario
def a_trainer_that_is_killed_while_it_copies_leaves_the_snapshot_before(folder):
    def kill_in_the_copy(ckpt):
        staging_thread.copy_into = die
        ckpt.save(3, state_of(3)).result()

    dead_trainer(folder, then=kill_in_the_copy)
    assert_restored(folder, 2, "memory")


@scenario
def a_state_that_has_changed_its_shape_is_left_as_it_is_now(folder):
    def save_more(ckpt):
        ckpt.save(3, {**state_of(3), "more": torch.ones(10)}).result()
        die()

    dead_trainer(folder, then=save_more)
    assert_restored(folder, 3, "memory")


@scenario
def a_snapshot_that_is_still_being_written_is_waited_for(folder):
    """Writing takes seconds, and the trainer is killed as soon as the snapshot is copied."""

    def kill_after_the_copy(ckpt):
        ckpt.save(2, state_of(2))
        ckpt.before_update()
        die()

    dead_trainer(folder, steps=(1,), then=kill_after_the_copy, max_write_mib_s=0.4)
    assert [info.step for info in scan(folder)] == [1]
    assert_restored(folder, 2, "memory")


@scenario
def a_kill_at_any_instant_leaves_the_newest_from_memory_or_disk(folder):
    """At seeded instants; each trainer resumes from the last state, and saves as fast as possible."""

    def save_for_ever(ckpt, durable):
        step = ckpt.restore(state_of(-1))
        while True:
            step += 1
            ckpt.save(step, state_of(step)).result()
            os.write(durable, b"%d\n" % step)

    source, tiers = random.Random(5), []
    for _ in range(8):
        reader, durable = os.pipe()
        trainer = os.fork()
        if trainer == 0:
            os.close(reader)
            save_for_ever(Checkpointer(folder), durable)
        os.close(durable)
        assert os.read(reader, 1), "the trainer failed"
        select.select([], [], [], source.uniform(0.0, 0.1))
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        with os.fdopen(reader) as told:
            newest = [int(line) for line in told.read().splitlines()[1:]]
        HEARD.warnings.clear()
        state = state_of(-1)
        with Checkpointer(folder) as ckpt:
            step = ckpt.restore(state)
        assert step >= max(newest, default=1)
        assert state["value"] == step == scan(folder)[0].step
        assert state["big"].eq(step).all()
        assert not [
            each for each in HEARD.warnings if not each.startswith("Waiting for the last save")
        ]
        tiers.append(HEARD.restored[-1]["tier"])
    assert set(tiers) == {"memory"}, tiers


@scenario
def a_flipped_bit_is_found_and_the_disk_has_it_right(folder):
    """The bit is in a tensor, in a plain value, or in the frame of a tensor."""
    for number, at in enumerate((COUNT * 2, 100, COUNT * 4 + 2000)):
        place = folder / str(number)
        dead_trainer(place)
        found = kept.ask(place, 0)
        (byte,) = os.pread(found.fd, 1, PAGE_BYTES + at)
        os.pwrite(found.fd, bytes([byte ^ 16]), PAGE_BYTES + at)
        found.close()
        assert_restored(place, 2, "disk")
        (warning,) = HEARD.warnings
        assert warning.startswith(
            "Step 2 is read from disk and not from memory: __0_0.distcp does not match"
        ), warning
        assert f"bytes {at // BLOCK_BYTES * BLOCK_BYTES:,}" in warning or "bytes 0 to" in warning, (
            warning
        )


@scenario
def a_checkpoint_that_is_damaged_on_disk_is_whole_in_memory(folder):
    dead_trainer(folder)
    next(scan(folder)[0].path.glob("*.distcp")).write_bytes(b"")
    assert scan(folder)[0].state == "damaged"
    assert_restored(folder, 2, "memory")


@scenario
def what_was_taken_away_on_disk_is_not_restored_from_memory(folder):
    dead_trainer(folder)
    shutil.rmtree(scan(folder)[0].path)
    assert_restored(folder, 1, "disk")


@scenario
def a_newer_checkpoint_on_disk_wins(folder):
    await_end(dead_trainer(folder / "other", steps=(9,), keep_in_memory_s=None))
    dead_trainer(folder)
    shutil.copytree(folder / "other" / "step-0000000009", folder / "step-0000000009")
    assert_restored(folder, 9, "disk")


@scenario
def another_save_of_the_same_step_is_another_checkpoint(folder):
    dead_trainer(folder)
    path = scan(folder)[0].path
    write_manifest(path, replace(read_manifest(path, step=2), save="another"))
    assert_restored(folder, 2, "disk")
    (warning,) = HEARD.warnings
    assert "rank 0's snapshot in memory belongs to another checkpoint" in warning


@scenario
def a_successor_that_dies_before_it_has_restored_leaves_it_to_the_next(folder):
    writer = dead_trainer(folder)

    def die_in_the_middle(_report, _rank):
        kept.KeptFiles.read = die
        Checkpointer(folder).restore(state_of(-1))

    assert run_trainer(die_in_the_middle)[0] == [-signal.SIGKILL]
    assert_restored(folder, 2, "memory")
    await_end(writer)


@scenario
def a_first_save_gives_the_memory_back_too(folder):
    writer = dead_trainer(folder)
    with Checkpointer(folder) as ckpt:
        ckpt.save(3, state_of(3)).result()
        await_end(writer)


@scenario
def other_users_get_nothing_and_are_not_believed(folder):
    if os.geteuid() != 0:
        return
    writer = dead_trainer(folder)
    name = keeping.address(folder, 0)

    def ask(_report, _rank):
        os.setuid(NOBODY)
        for want in ("snapshot", "end"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                line.connect(name)
                with contextlib.suppress(BrokenPipeError):
                    keeping.send(line, {"want": want})
                with contextlib.suppress(ConnectionResetError):
                    assert keeping.receive(line) is None

    assert run_trainer(ask)[0] == [0]
    assert_restored(folder, 2, "memory")
    await_end(writer)

    ready, done = os.pipe(), os.pipe()

    def pose(_report, _rank):
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(name)
            listener.listen()
            os.write(ready[1], b".")
            os.read(done[0], 1)

    child = os.fork()
    if child == 0:
        pose(None, None)
        os._exit(0)
    os.read(ready[0], 1)
    assert not is_kept(folder)
    os.write(done[1], b".")
    os.waitpid(child, 0)


def a_rank(folder, rank, world_size, work):
    """Call `work` as one of several ranks."""
    store = f"file://{folder}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    work()
    dist.destroy_process_group()


def own_of(rank):
    return {"rank": rank, "own": torch.full((1000,), rank)}


def ranks_that_die(folder, *, lost=None, then=lambda _ckpt, _rank: None):
    """Save step 1 on two ranks, call `then`, and kill both; return the writing processes.

    The writing process of rank `lost` is killed as well.
    """

    def work(report, rank):
        def save():
            ckpt = Checkpointer(folder)
            ckpt.save(1, state_of(1), per_rank=own_of(rank)).result()
            pid = ckpt._engine._writer.pid
            report(pid)
            dist.barrier()
            then(ckpt, rank)
            if rank == lost:
                os.kill(pid, signal.SIGKILL)
            die()

        a_rank(folder, rank, 2, save)

    folder.mkdir(parents=True, exist_ok=True)
    writers = run_trainer(work, ranks=2)[1]
    Path(f"{folder}.store").unlink()
    return writers


def ranks_that_restore(folder, tier):
    def work(_report, rank):
        def restore():
            state, own = state_of(-1), own_of(-1)
            assert Checkpointer(folder).restore(state, per_rank=own) == 1
            assert state["value"] == 1
            assert state["big"].eq(1).all()
            assert own["rank"] == rank
            assert own["own"].eq(rank).all()
            if rank == 0:
                assert HEARD.restored[-1]["tier"] == tier, (HEARD.restored, HEARD.warnings)

        a_rank(folder, rank, 2, restore)

    assert run_trainer(work, ranks=2)[0] == [0, 0]


@scenario
def all_ranks_of_a_node_take_all_of_it_from_memory(folder):
    writers = ranks_that_die(folder)
    spoil(scan(folder)[0].path)
    ranks_that_restore(folder, "memory")
    for writer in writers:
        await_end(writer)


@scenario
def a_save_that_one_rank_did_not_complete_leaves_the_one_before_in_memory(folder):
    """Rank 1 is killed during its copy of step 2; rank 0 has copied all."""

    def save_again(ckpt, rank):
        if rank == 1:
            staging_thread.copy_into = die
        ckpt.save(2, state_of(2), per_rank=own_of(rank))
        ckpt.before_update()

    ranks_that_die(folder, then=save_again)
    ranks_that_restore(folder, "memory")


@scenario
def where_one_rank_has_lost_its_memory_all_take_the_disk(folder):
    writers = ranks_that_die(folder, lost=1)
    ranks_that_restore(folder, "disk")
    for writer in writers:
        await_end(writer)


@scenario
def another_number_of_ranks_takes_the_disk_and_frees_the_memory_of_all(folder):
    writers = ranks_that_die(folder)
    assert_restored(folder, 1, "disk")
    for writer in writers:
        await_end(writer)


def play(scenarios, folder):
    """Run the scenarios, and print the error of each, or null."""
    torch.set_num_threads(1)
    set_job_link(HEARD)
    logging.getLogger("holdfast").addHandler(HEARD)
    found = {}
    for name, work in scenarios.items():
        try:
            work(Path(folder) / name)
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    play(SCENARIOS, sys.argv[1])
