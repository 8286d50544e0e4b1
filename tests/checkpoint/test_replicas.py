"""State that several ranks have: which of them writes it, and what is said where it differs."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "replica_ranks.py"


def run(folder, world_size, *scenarios):
    """Return the outputs of ranks that went through scenarios, each of which checks itself."""

    def start(rank):
        command = [sys.executable, SCRIPT, folder, str(rank), str(world_size), *scenarios]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    processes = [start(rank) for rank in range(world_size)]
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(outputs)
    return outputs


def test_what_may_differ_is_written_by_the_lowest_rank_and_what_an_optimizer_owns_is_spread(tmp_path):
    run(tmp_path, 2, "what_differs_comes_from_rank_0", "rank_0_writes_all")


def test_of_three_ranks_the_lowest_that_has_an_entry_writes_it(tmp_path):
    run(tmp_path, 3, "the_lowest_rank_that_has_it_writes_it")
