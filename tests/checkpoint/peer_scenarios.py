"""Check what peers keep for lost nodes: `peer_scenarios.py FOLDER quick|slow`.

The nodes are on this machine, with names of their own. Prints one JSON object, as
`memory_scenarios.py` does.
"""

import functools
import os
import random
import select
import signal
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from memory_scenarios import HEARD, a_rank, await_end, die, play, run_trainer
from waiting import until

from holdfast.checkpoint import Checkpointer, scan
from holdfast.checkpoint.format.rank_layout import PAGE_BYTES
from holdfast.checkpoint.ipc import memory_reservation
from holdfast.checkpoint.memory import client as kept
from holdfast.checkpoint.save import staging_thread
from holdfast.core.errors import SaveFailed

COUNT = 1_200_000
ENDS_S = 20.0
"""The limit by which a wait for a lost rank has ended."""
NODES = ("a", "b")
SCENARIOS = {}
SLOW = {}


def scenario(work):
    SCENARIOS[work.__name__] = work
    return work


def slow_scenario(work):
    SLOW[work.__name__] = work
    return work


def small(value):
    return {"value": value, "some": [torch.tensor(value)] * 3}


def own_of(rank, step=1):
    return {"rank": rank, "own": torch.full((COUNT,), float(10 * step + rank))}


def on_nodes(folder, work, *, nodes=NODES, ranks=1):
    """Call `work(rank)` in several ranks on each node; return the exit codes."""

    def a_trainer(_report, rank):
        os.environ["HOLDFAST_NODE"] = nodes[rank // ranks]
        a_rank(folder, rank, ranks * len(nodes), functools.partial(work, rank))

    folder.mkdir(parents=True, exist_ok=True)
    Path(f"{folder}.store").unlink(missing_ok=True)
    return run_trainer(a_trainer, ranks=ranks * len(nodes))[0]


def save(ckpt, rank, step, *, held=True):
    """Save until the save is durable, and held by the peer."""
    path = ckpt.save(step, small(step), per_rank=own_of(rank, step)).result()
    writer = ckpt._engine._writer
    if held:
        until(lambda: writer.held_step == step)
    dist.barrier()
    return path


def die_with_what_writes(ckpt, after_s=0.0):
    """Kill trainer and writing process at once, since either one would report the other's death."""
    trainer, writer = os.getpid(), ckpt._engine._writer.pid
    if os.fork() == 0:
        select.select([], [], [], after_s)
        os.kill(trainer, signal.SIGSTOP)
        os.kill(writer, signal.SIGKILL)
        os.kill(trainer, signal.SIGKILL)
        os._exit(0)
    if not after_s:
        signal.pause()


def lose(folder, *, lost=("a",), nodes=NODES, ranks=1, steps=(1,), then=lambda _ckpt, _rank: None):
    """Save, call `then`, and kill all trainers, and on the nodes in `lost` the writing processes."""

    def work(rank):
        ckpt = Checkpointer(folder, peer_memory=True, timeout_s=ENDS_S)
        for step in steps:
            save(ckpt, rank, step)
        then(ckpt, rank)
        Path(f"{folder}.{rank}.writer").write_text(str(ckpt._engine._writer.pid))
        dist.barrier()
        if os.environ["HOLDFAST_NODE"] in lost:
            die_with_what_writes(ckpt)
        die()

    assert set(on_nodes(folder, work, nodes=nodes, ranks=ranks)) == {-signal.SIGKILL}


def assert_restored(
    folder, tier, *, nodes=("new", "b"), ranks=1, step=1, warnings=0, before=lambda _rank: None
):
    def work(rank):
        before(rank)
        state, own = small(-1), {"rank": -1, "own": torch.zeros(COUNT)}
        with Checkpointer(folder) as ckpt:
            assert ckpt.restore(state, per_rank=own) == step
        assert state["value"] == step
        assert all(each.item() == step for each in state["some"])
        assert own["rank"] == rank
        assert torch.equal(own["own"], own_of(rank, step)["own"])
        if rank == 0:
            assert HEARD.restored[-1]["tier"] == tier, (HEARD.restored, HEARD.warnings)
            assert len(HEARD.warnings) == warnings, HEARD.warnings
        dist.barrier()
        assert kept.ask_all(folder, ranks * len(nodes)) == []

    assert on_nodes(folder, work, nodes=nodes, ranks=ranks) == [0] * ranks * len(nodes)


def spoil(path, *lost):
    """Overwrite on disk all that a lost node wrote, and each other rank's own tensors."""
    for file in path.glob("*.distcp*"):
        size_bytes = file.stat().st_size
        if any(file.name.startswith(f"__{rank}_") for rank in lost):
            file.write_bytes(os.urandom(size_bytes))
        elif size_bytes > COUNT:
            with file.open("r+b") as content:
                content.seek(size_bytes // 4)
                content.write(os.urandom(size_bytes // 2))


@scenario
def a_lost_node_s_rank_takes_its_part_from_its_peer_and_nothing_of_it_from_the_disk(folder):
    lose(folder, steps=(1, 2))
    spoil(scan(folder)[0].path, 0)
    assert_restored(folder, "peer_memory", step=2)


@scenario
def so_do_all_ranks_of_a_node(folder):
    lose(folder, ranks=2)
    spoil(scan(folder)[0].path)
    assert_restored(folder, "peer_memory", ranks=2)


@scenario
def each_node_may_be_the_lost_one(folder):
    lose(folder, lost=("b",))
    spoil(scan(folder)[0].path, 1)
    assert_restored(folder, "peer_memory", nodes=("a", "new"))


@scenario
def nodes_that_come_back_in_another_order_have_it_all(folder):
    lose(folder, lost=())
    spoil(scan(folder)[0].path)
    assert_restored(folder, "memory", nodes=("b", "a"))


@scenario
def what_is_lost_on_both_nodes_of_a_pair_is_on_disk(folder):
    lose(folder, lost=("a", "b"))
    assert_restored(folder, "disk", nodes=("new", "newer"))


@scenario
def without_peers_a_lost_node_takes_the_disk(folder):
    def work(rank):
        ckpt = Checkpointer(folder)
        save(ckpt, rank, 1, held=False)
        if rank == 0:
            die_with_what_writes(ckpt)
        die()

    on_nodes(folder, work)
    assert_restored(folder, "disk", warnings=1)


@scenario
def a_flipped_bit_in_what_the_peer_holds_is_found_and_the_disk_has_it_right(folder):
    lose(folder)
    os.environ["HOLDFAST_NODE"] = "b"
    try:
        found = kept.ask(folder, 1, 0)
    finally:
        del os.environ["HOLDFAST_NODE"]
    assert found is not None
    (byte,) = os.pread(found.fd, 1, PAGE_BYTES + COUNT * 2)
    os.pwrite(found.fd, bytes([byte ^ 16]), PAGE_BYTES + COUNT * 2)
    found.close()
    assert_restored(folder, "disk", warnings=1)


@scenario
def what_is_gone_when_it_is_to_be_sent_or_has_no_room_is_read_from_disk(folder):
    def be_gone(rank):
        if rank == 1:
            kept.ask = lambda *_: None

    def be_short_of_memory(rank):
        if rank == 0:
            memory_reservation.available_memory_bytes = lambda: 0

    def be_cut_off(_rank):
        def fail(*_, **__):
            raise RuntimeError("Connection closed by peer")

        dist.send = dist.recv = fail

    for before in (be_gone, be_short_of_memory, be_cut_off):
        place = folder / before.__name__
        lose(place)
        assert_restored(place, "disk", warnings=1, before=before)


@scenario
def a_peer_s_process_that_dies_is_replaced_and_holds_the_next_save(folder):
    def strike(ckpt, rank):
        if rank == 1:
            pid = ckpt._engine._writer.pid
            os.kill(pid, signal.SIGKILL)
            await_end(pid)
        dist.barrier()
        save(ckpt, rank, 2)

    lose(folder, then=strike)
    spoil(scan(folder)[0].path, 0)
    assert_restored(folder, "peer_memory", step=2)


@slow_scenario
def a_node_that_is_lost_at_any_instant_leaves_the_newest(folder):
    """At seeded instants; the trainers save as fast as possible, and end together."""

    def is_killed(rank):
        pid = int(Path(f"{folder}.{rank}.pid").read_text())
        return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    def save_for_ever(end_s, rank):
        Path(f"{folder}.{rank}.pid").write_text(str(os.getpid()))
        ckpt = Checkpointer(folder, peer_memory=True, timeout_s=ENDS_S)
        step = ckpt.restore(small(-1), per_rank={"rank": -1, "own": torch.zeros(COUNT)})
        save(ckpt, rank, step + 1)
        if rank == 0:
            die_with_what_writes(ckpt, after_s=end_s)
        elif os.fork() == 0:
            select.select([], [], [], end_s)
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        while True:
            step += 1
            try:
                ckpt.save(step + 1, small(step + 1), per_rank=own_of(rank, step + 1)).result()
            except SaveFailed:
                until(lambda: is_killed(1 - rank))  # a moment before this one is
                signal.pause()

    source = random.Random(7)
    for number in range(2):
        end_s = source.uniform(0.01, 0.2)
        codes = on_nodes(folder, functools.partial(save_for_ever, end_s), nodes=(f"a{number}", "b"))
        assert codes == [-signal.SIGKILL] * 2
    newest = scan(folder)[0].step

    def work(rank):
        state, own = small(-1), {"rank": -1, "own": torch.zeros(COUNT)}
        with Checkpointer(folder) as ckpt:
            step = ckpt.restore(state, per_rank=own)
        assert step == newest == state["value"]
        assert torch.equal(own["own"], own_of(rank, step)["own"])

    assert on_nodes(folder, work, nodes=("new", "b")) == [0, 0]


@slow_scenario
def a_save_that_a_lost_node_leaves_undone_does_not_keep_the_one_before_from_being_taken(folder):
    """Rank 1 has written its part of step 2, and waits for rank 0, which is lost."""

    def save_half(ckpt, rank):
        def die_once_rank_1_has_written(*_, **__):
            until(lambda: list(folder.glob(".step-*/rank-1.note")))
            die_with_what_writes(ckpt)

        if rank == 0:
            staging_thread.copy_into = die_once_rank_1_has_written
        ckpt.save(2, small(2), per_rank=own_of(rank, 2))
        ckpt.before_update()
        until(lambda: list(folder.glob(".step-*/rank-1.note")))
        die()

    lose(folder, then=save_half)
    spoil(scan(folder)[0].path, 0)
    assert_restored(folder, "peer_memory")


@scenario
def a_training_that_ends_in_good_order_leaves_nothing_with_the_peer(folder):
    def work(rank):
        with Checkpointer(folder, peer_memory=True) as ckpt:
            save(ckpt, rank, 1)

    assert on_nodes(folder, work) == [0, 0]
    assert_restored(folder, "disk", nodes=NODES)


@scenario
def on_one_node_it_is_said_that_there_is_no_peer(folder):
    def work(rank):
        with Checkpointer(folder, peer_memory=True) as ckpt:
            save(ckpt, rank, 1, held=False)
        said = [warning for warning in HEARD.warnings if "all ranks are on one node" in warning]
        assert len(said) == (rank == 0), HEARD.warnings

    assert on_nodes(folder, work, nodes=("a", "a")) == [0, 0]


if __name__ == "__main__":
    _folder, _which, *_names = sys.argv[1:]
    _all = SLOW if _which == "slow" else SCENARIOS
    play({name: work for name, work in _all.items() if not _names or name in _names}, _folder)
