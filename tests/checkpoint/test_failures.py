"""Test the messages about failed saves."""

import errno
import os
import re
import resource

import pytest
from images import order_of
from started_ranks import run_program

from holdfast.checkpoint.writer.commit import RankFailed
from holdfast.checkpoint.writer.process import explain
from holdfast.core.system_limits import advice_on, in_words

MORE_THAN_THERE_IS = 1 << 60


@pytest.mark.parametrize(
    "error",
    [TimeoutError("the other ranks had not finished after 5 s"), OSError(errno.EIO, "broke")],
)
def test_what_has_another_reason_is_not_said_to_be_a_full_disk(tmp_path, error):
    told = explain(order_of(tmp_path, 1), MORE_THAN_THERE_IS, error)
    assert str(error) in told
    assert "full" not in told


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_as_one(tmp_path, code):
    told = explain(order_of(tmp_path, 1), 1, OSError(code, os.strerror(code)))
    assert f"Step 1 was not saved: {tmp_path} is full: about 1 bytes are needed" in told


OPEN_FILES, _ = resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            errno.EMFILE,
            rf"`ulimit -n` allows a process {OPEN_FILES:,} open files\. .*Raise that limit .*`ulimit -n`",
        ),
        (
            errno.ENFILE,
            r"`sysctl fs.file-max` allows all processes of the node together [\d,]+ open files\. .*Raise",
        ),
        (
            errno.EFBIG,
            r"`ulimit -f` allows files of any size, and the file system does not\. .*another file system",
        ),
    ],
)
def test_a_limit_that_is_reached_is_named_with_what_to_do(tmp_path, code, told):
    error = OSError(code, os.strerror(code), str(tmp_path / "a"))
    assert re.search(rf"a'; {told}", explain(order_of(tmp_path, 1), 1, error))
    assert re.search(told.partition(r"\. ")[0], in_words(error))
    gone = explain(
        order_of(tmp_path / "gone", 1), 1, error
    )  # the folder cannot be listed, for example for lack of files
    assert re.search(rf"a'; {told}", gone), gone


def test_of_another_rank_s_limit_that_is_said_which_that_rank_has_told(tmp_path):
    told = explain(
        order_of(tmp_path, 1), 1, RankFailed("rank 1: too many; `ulimit -n` allows 7", errno.EMFILE)
    )
    assert "rank 1: too many; `ulimit -n` allows 7. " in told
    assert f"{OPEN_FILES:,}" not in told
    assert "Raise that limit" in told


def test_what_is_no_limit_is_said_as_it_is():
    for error in (ValueError("a"), OSError(errno.EIO, "broke")):
        assert in_words(error) == str(error)
        assert not advice_on(error)


REACHES = """
import contextlib, resource, sys
import torch
from holdfast import Checkpointer
from holdfast.core.errors import HoldfastError

def limit(name, allowed, *pids):
    for pid in (0, *pids):
        resource.prlimit(pid, name, (allowed, resource.RLIM_INFINITY if name == resource.RLIMIT_FSIZE else 10_000))

def attempt(step):
    try:
        print(checkpointer.save(step, state).result())
    except HoldfastError as error:
        print(error)

state = {"weights": torch.zeros(1_000_000), "small": torch.zeros(3)}
checkpointer = Checkpointer(sys.argv[1])
match sys.argv[2]:
    case "files of the trainer":
        limit(resource.RLIMIT_NOFILE, 64)
        files = []
        with contextlib.suppress(OSError):
            while True:
                files.append(open("/dev/null"))
        attempt(1)
        for free in range(1, 12):  # each call that opens a file is the one that fails
            for file in files[:free]:
                file.close()
            attempt(1 + free)
            with contextlib.suppress(OSError):
                while True:
                    files.append(open("/dev/null"))
            files = [file for file in files if not file.closed]
        try:
            Checkpointer(sys.argv[1])
        except HoldfastError as error:
            print(error)
    case "files of the writing process":
        checkpointer.save(0, state).result()  # so that the process has all arenas before it may open no more
        attempt(1)
        attempt(2)  # by now the writing process has both snapshots' memory
        pid = checkpointer._engine._writer.pid
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (4, 10_000))
        attempt(3)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 10_000))
        attempt(4)
    case "size in memory":
        limit(resource.RLIMIT_FSIZE, 3_000_000)
        attempt(1)
    case "size on the disk":
        attempt(1)
        limit(resource.RLIMIT_FSIZE, 3_000_000, checkpointer._engine._writer.pid)
        attempt(2)
        limit(resource.RLIMIT_FSIZE, 5_000_000, checkpointer._engine._writer.pid)
        attempt(3)
"""


def told_of(folder, reached):
    ended = run_program(REACHES, folder, reached)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_a_trainer_that_may_open_no_more_files(tmp_path):
    *saves, made = told_of(tmp_path, "files of the trainer")
    failed = [line for line in saves if "was not saved" in line]
    assert len(failed) > 2
    assert len(saves) == 12
    for line in failed:
        assert "`ulimit -n` allows a process 64 open files" in line
        assert line.endswith(
            "Raise that limit where the job is started (`ulimit -n`), or keep fewer files open in the script."
        )
    assert saves[-1] == str(tmp_path / "step-0000000012")
    assert "cannot be written ([Errno 24]" in made
    assert "`ulimit -n` allows a process 64 open files" in made


def test_a_writing_process_that_may_open_no_more_files(tmp_path):
    first, _, told, last = told_of(tmp_path, "files of the writing process")
    assert "`ulimit -n` allows a process 4 open files" in told
    assert "Raise that limit" in told
    assert (first, last) == (str(tmp_path / "step-0000000001"), str(tmp_path / "step-0000000004"))


def test_a_snapshot_in_memory_that_is_larger_than_a_file_may_be(tmp_path):
    (told,) = told_of(tmp_path, "size in memory")
    assert "`ulimit -f` allows a process files of 3,000,000 bytes" in told
    assert told.endswith("Raise that limit where the job is started (`ulimit -f unlimited`).")


def test_a_checkpoint_on_disk_that_is_larger_than_a_file_may_be(tmp_path):
    first, told, last = told_of(tmp_path, "size on the disk")
    assert "`ulimit -f` allows a process files of 3,000,000 bytes" in told
    assert f"The last good step is 1 ({first}). Raise that limit" in told
    assert last == str(tmp_path / "step-0000000003")


RESTORES = """
import os, resource, sys
import torch
import holdfast
from holdfast.core.errors import CheckpointError

state = {"t": torch.ones(10)}
with holdfast.Checkpointer(sys.argv[1]) as ckpt:
    ckpt.save(1, state)
ckpt, taken = holdfast.Checkpointer(sys.argv[1]), []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
try:
    ckpt.restore(state)
except CheckpointError as error:
    told = str(error)
for one in taken:
    os.close(one)
print(told)
print(ckpt.restore(state))
"""


def test_a_restore_that_may_open_no_more_files(tmp_path):
    told, step = run_program(RESTORES, tmp_path).stdout.splitlines()
    assert told.startswith("The state was not restored: [Errno 24]")
    assert "`ulimit -n` allows a process 64 open files. Raise that limit" in told
    assert step == "1"
