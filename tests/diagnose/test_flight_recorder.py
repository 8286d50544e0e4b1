"""Test that the dumps of a hung job's ranks show which rank did not join the collective."""

import os
import pickle
import subprocess
import sys

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.files import Reading
from holdfast.diagnose.logs.flight_recorder import flight_lines, read_dump

NAMES = ["nccl:all_reduce", "nccl:_all_gather_base", "nccl:_reduce_scatter_base"]


def entry(sequence, state="completed", group="0", p2p=False, name=None):
    """Return an entry as torch/csrc/distributed/c10d/FlightRecorder.hpp 2.10 writes entries."""
    return {
        "frames": [{"name": "train", "filename": "/job/t.py", "line": 8}],
        "record_id": sequence + 100,
        "pg_id": 0,
        "process_group": (group, "default_pg" if group == "0" else "tp"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": name or NAMES[sequence % 3],
        "time_created_ns": 1700000000000000000 + sequence,
        "input_sizes": [[1024, 1024]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1024, 1024]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": p2p,
    }


def dump(reached, waiting=True, world=4, group="0", members=None, first=1):
    """Return the dump of a rank that reached collective `reached`, and waits in it or has left."""
    entries = [entry(at, group=group) for at in range(first, reached)]
    entries.append(entry(reached, "started" if waiting else "completed", group))
    ranks = list(range(world)) if members is None else members
    return {
        "version": "2.10",
        "pg_config": {group: {"name": group, "desc": "default_pg", "ranks": str(ranks)}},
        "pg_status": {
            group: {"last_enqueued_collective": reached, "last_started_collective": reached}
        },
        "entries": entries,
    }


@pytest.fixture
def job(tmp_path):
    def written(dumps, **logs):
        for rank, one in dumps.items():
            (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(one, protocol=2))
        for name, text in logs.items():
            (tmp_path / f"{name}.log").write_text(text)
        return tmp_path

    return written


def said(folder):
    reading = Reading()
    found = flight_lines(sorted(folder.glob("nccl_trace*")), reading)
    return [line for lines in found.values() for line in lines], reading.notes


def test_the_rank_that_left_no_dump_is_the_one(job):
    folder = job({rank: dump(7) for rank in (0, 1, 3)})
    ((rank, text),), notes = said(folder)
    assert rank == 2
    assert text.startswith(
        "flight recorder: rank 2 left no dump, and 3 ranks of group 0 wait in collective 7"
    )
    assert notes == []
    found = diagnose(folder)
    assert (found.reason, found.scope) == ("NCCLTimeoutError", {"rank": 2})
    assert (found.root_line, found.restart_helps) == (None, True)


@pytest.mark.parametrize("waiting", [True, False])
def test_the_rank_that_is_behind_is_the_one(job, waiting):
    """Test a rank that waits in an earlier collective, and one that has left it."""
    folder = job({0: dump(7), 1: dump(7), 2: dump(5, waiting), 3: dump(7)})
    ((rank, text),), _ = said(folder)
    assert rank == 2
    assert "rank 2 did not come to collective 7" in text
    assert text.endswith("its last one is 5")
    found = diagnose(folder)
    assert (found.reason, found.scope) == ("NCCLTimeoutError", {"rank": 2})


@pytest.mark.parametrize("rank", range(4))
def test_also_where_it_is_the_first_or_the_last(job, rank):
    assert diagnose(job({one: dump(7) for one in range(4) if one != rank})).scope == {"rank": rank}
    assert diagnose(job({rank: dump(3)})).scope == {"rank": rank}


def test_several_missing_ranks_are_all_named(job):
    """Test ranks 12 and 14 of 16, as in the fixtures of NVIDIA's resiliency extension."""
    found = diagnose(job({rank: dump(7, world=16) for rank in range(16) if rank not in (12, 14)}))
    assert found.scope == {"rank": [12, 14]}


def test_a_silent_rank_explains_those_that_are_behind(job):
    folder = job({rank: dump(6 if rank == 1 else 7, world=8) for rank in range(6)})
    lines, _ = said(folder)
    assert {rank for rank, _ in lines} == {6, 7}


def test_dumps_of_one_node_say_nothing_of_the_ranks_of_others(job):
    """Test 56 of 64 ranks without a dump: their dumps were not given."""
    folder = job({rank: dump(5 if rank == 6 else 7, world=64) for rank in range(8)})
    assert diagnose(folder).scope == {"rank": 6}


def test_where_all_wait_nobody_is_named(job):
    folder = job({rank: dump(7) for rank in range(4)})
    ((rank, text),), _ = said(folder)
    assert rank is None
    assert text.startswith("flight recorder: all 4 ranks of group 0 wait in collective 7")
    found = diagnose(folder)
    assert (found.reason, found.scope) == ("NCCLTimeoutError", {})


def test_where_nobody_waits_there_is_nothing_to_say(job):
    folder = job({rank: dump(7, waiting=False) for rank in range(4)})
    assert said(folder) == ([], [])
    assert diagnose(folder).reason == "Unknown"


def test_groups_are_looked_at_each_for_itself(job):
    """Test two groups of two ranks each."""
    pairs = {0: ("1", [0, 1], 9), 1: ("1", [0, 1], 9), 2: ("2", [2, 3], 4), 3: ("2", [2, 3], 3)}
    folder = job(
        {
            rank: dump(at, group=group, members=members)
            for rank, (group, members, at) in pairs.items()
        }
    )
    lines, _ = said(folder)
    assert {(rank, "group 2" in text) for rank, text in lines if rank is not None} == {(3, True)}


def test_a_rank_in_no_pair_is_not_awaited(job):
    folder = job({rank: dump(7, world=8, members=[0, 1, 2, 3]) for rank in range(4)})
    ((rank, _),), _ = said(folder)
    assert rank is None


def test_sends_and_receives_do_not_count(job):
    dumps = {rank: dump(7) for rank in range(4)}
    dumps[3]["entries"].append(entry(40, "started", p2p=True))
    ((rank, _),), _ = said(job(dumps))
    assert rank is None


def test_the_ring_buffer_may_have_lost_the_first_entries(job):
    dumps = {rank: dump(5007, first=5000) for rank in range(3)} | {3: dump(5001, first=4990)}
    assert diagnose(job(dumps)).scope == {"rank": 3}


def test_the_rank_of_a_dump_is_in_it_or_in_its_name(tmp_path):
    (tmp_path / "nccl_trace_a.pkl").write_bytes(pickle.dumps({**dump(7, world=2), "rank": 1}))
    (tmp_path / "trace_0.pickle").write_bytes(pickle.dumps(dump(3, world=2)))
    found = diagnose([tmp_path / "nccl_trace_a.pkl", tmp_path / "trace_0.pickle"])
    assert found.scope == {"rank": 0}


@pytest.mark.parametrize(
    "prefix", ["nccl_trace_rank_", "comm_lib_trace_rank_", "hccl_trace_rank_", "fr/trace_"]
)
def test_dumps_are_found_in_a_folder_by_their_usual_names(tmp_path, prefix):
    """Test the default up to torch 2.8, the default since, NPUs, and a user's own prefix."""
    (tmp_path / "fr").mkdir()
    for rank, at in {0: 7, 1: 5}.items():
        (tmp_path / f"{prefix}{rank}").write_bytes(pickle.dumps(dump(at, world=2), protocol=2))
    assert diagnose(tmp_path).scope == {"rank": 1}


def test_an_older_form_without_groups(job):
    """Test version 1: no pg_config, and the sequence number as `seq_id` or `collective_seq_id`."""
    dumps = {
        rank: {"entries": [entry(at) for at in range(6)] + [entry(7, "scheduled")]}
        for rank in (0, 1)
    }
    dumps[2] = {"entries": [entry(at) for at in range(6)]}
    assert diagnose(job(dumps)).scope == {"rank": 2}


def test_dumps_and_logs_tell_one_failure(job):
    watchdog = (
        "[rank{0}]:[E1122 03:11:47.1 ProcessGroupNCCL:632] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600043 milliseconds before timing out.\n"
    )
    logs = {f"rank-{rank}": watchdog.format(rank) for rank in (0, 1, 3)}
    found = diagnose(job({rank: dump(7) for rank in (0, 1, 3)}, **logs))
    assert (found.reason, found.scope) == ("NCCLTimeoutError", {"rank": 2})


def test_what_the_silent_rank_itself_says_is_the_root(job):
    traceback = "Traceback (most recent call last):\n  File \"/job/t.py\", line 8, in f\n    g()\nKeyError: 'a'\n"
    found = diagnose(job({rank: dump(7) for rank in (0, 1, 3)}, **{"rank-2": traceback}))
    assert (found.reason, found.scope) == ("KeyError", {"rank": 2})


def test_the_order_of_the_dumps_plays_no_part(tmp_path):
    paths = []
    for rank, at in {0: 7, 1: 7, 2: 5, 3: 7}.items():
        paths.append(tmp_path / f"nccl_trace_rank_{rank}")
        paths[-1].write_bytes(pickle.dumps(dump(at)))
    assert flight_lines(paths, Reading()) == flight_lines(paths[::-1], Reading())


def test_dumps_of_many_ranks_are_read_soon(tmp_path):
    one = pickle.dumps(dump(500, world=16), protocol=2)
    for rank in range(15):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(one)
    found = diagnose(tmp_path)
    assert found.scope == {"rank": 15}


_REAL = """
import sys
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
folder, rank = sys.argv[1], int(sys.argv[2])
store = dist.FileStore(folder + "/dumped", 2)
dist.init_process_group("gloo", init_method="file://" + folder + "/start", rank=rank, world_size=2)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.barrier()
if rank == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)
else:
    store.get("dumped")  # waits
open(f"{folder}/nccl_trace_rank_{rank}", "wb").write(_dump_fr_trace())
if rank == 0:
    store.set("dumped", "yes")
    work.wait()
else:
    dist.all_reduce(torch.ones(4))
dist.barrier()
"""


@pytest.mark.slow
def test_dumps_that_torch_wrote_name_the_rank_that_did_not_come(tmp_path):
    """Test two gloo processes that write dumps while rank 0 waits in a collective for rank 1."""
    pytest.importorskip("torch._C._distributed_c10d")
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", _REAL, str(tmp_path), str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [one.communicate(timeout=120)[1] for one in both]
    finally:
        for one in both:
            one.kill()
    if any(one.returncode for one in both):
        pytest.skip(f"this torch dumps no trace of gloo: {errors}")
    reached = [len(read_dump(tmp_path / f"nccl_trace_rank_{rank}")["entries"]) for rank in (0, 1)]
    assert reached == [5, 4]
    lines, notes = said(tmp_path)
    assert notes == []
    assert [rank for rank, _ in lines] == [1]
    assert "rank 1 did not come to collective 5 (gloo:all_reduce)" in lines[0][1]
    assert diagnose(sorted(tmp_path.glob("nccl_trace*"))).scope == {"rank": 1}
