"""A rank's main thread: its stack in real processes, and the verdict on stacks of ranks."""

import json
import subprocess
import sys

import pytest

from holdfast.recover.channel import MAX_MESSAGE_BYTES, encode
from holdfast.recover.stacks import Activity, stand_of

READ = """
import json, os, threading, time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue
from holdfast.recover.stacks import thread_stacks

held = threading.Lock()
held.acquire()

exec("def wait_in_holdfast(): held.acquire()", holdfast := {"__name__": "holdfast.checkpoint.save", "held": held})
exec("def hook(script): script()", profile := {"__name__": "holdfast.profile.phases"})
exec("def run(script): script()", shim := {"__name__": "holdfast.recover.shim.script"})

def deadlock():
    import tempfile
    from pathlib import Path
    from holdfast.testing.rank_faults import RankFaults, order
    folder = Path(tempfile.mkdtemp())
    order(folder, 0, 1, "deadlock")
    RankFaults(folder, 0).before_backward([])

def enter_lock():
    with held:
        pass

def look():
    began_s = time.monotonic()
    while time.monotonic() - began_s < 60:
        threads = thread_stacks()
        functions = [function for _, _, function, _ in threads[0]["frames"]]
        if "block" in functions and CALL in threads[0]["call"]:
            break
    print(json.dumps(threads), flush=True)
    os._exit(0)

def block():
    BLOCK

OTHERS
threading.Thread(target=look, name="look", daemon=True).start()
block()
"""
"""Prints the stacks of a process whose main thread blocks, as soon as it does."""


def read(block: str, call: str, others: str = "") -> list[dict]:
    text = READ.replace("BLOCK", block).replace("CALL", repr(call)).replace("OTHERS", others)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("block", "call", "activity"),
    [
        ("held.acquire()", "acquire", Activity.LOCK),
        ("enter_lock()", "with", Activity.LOCK),
        ("Queue().get()", "acquire", Activity.LOCK),
        ("Future().result()", "acquire", Activity.LOCK),
        ("holdfast['wait_in_holdfast']()", "acquire", Activity.OTHER),
        ("profile['hook'](lambda: held.acquire())", "acquire", Activity.LOCK),
        ("deadlock()", "acquire", Activity.LOCK),
        ("shim['run'](lambda: held.acquire())", "acquire", Activity.LOCK),
        ("shim['run'](holdfast['wait_in_holdfast'])", "acquire", Activity.OTHER),
        ("held.acquire(timeout=1000)", "acquire", Activity.OTHER),
        ("threading.Event().wait(1000)", "acquire", Activity.OTHER),
        ("time.sleep(1000)", "sleep", Activity.OTHER),
        ("while True: pass", "", Activity.OTHER),
    ],
)
def test_a_wait_without_end_is_told_from_others(block, call, activity):
    stand = stand_of(read(block, call))
    assert stand.activity is activity
    assert any(frame.startswith("block (") for frame in stand.frames)


@pytest.mark.parametrize(
    ("call", "daemon", "activity"),
    [
        ("time.sleep(1000)", True, Activity.OTHER),
        ("held.acquire(True, 1000)", False, Activity.OTHER),
        ("threading.Event().wait(1000)", True, Activity.OTHER),
        ("shared.acquire()", True, Activity.OTHER),
        ("held.acquire()", False, Activity.LOCK),
    ],
    ids=[
        "one that sleeps",
        "one that gives up",
        "one that polls",
        "one that waits for a process",
        "one that waits",
    ],
)
def test_a_lock_that_another_thread_may_release_is_none(call, daemon, activity):
    other = "import multiprocessing\nshared = multiprocessing.Lock()\nshared.acquire()\n"
    other += "pool = ThreadPoolExecutor()\npool.submit(int).result()\n"
    other += f"def other():\n    {call}\nthreading.Thread(target=other, daemon={daemon}).start()\n"
    in_its_wait = "while not any(one['call'].startswith(('sleep', 'acquire', 'other')) for one in thread_stacks()): pass"  # noqa: E501
    assert stand_of(read("held.acquire()", "acquire", other + in_its_wait)).activity is activity


@pytest.mark.parametrize(
    ("block", "activity"),
    [
        ("shared.acquire()", Activity.OTHER),
        ("[held, shared][1].acquire()", Activity.OTHER),
        ("box.shared.acquire()", Activity.OTHER),
        ("box.held.acquire()", Activity.LOCK),
        ("re_entered.acquire()", Activity.LOCK),
        ("held.acquire()", Activity.LOCK),
    ],
)
def test_a_lock_that_another_process_may_release_is_none(block, activity):
    prelude = (
        "import multiprocessing\nfrom types import SimpleNamespace\n"
        "shared = multiprocessing.Lock()\nshared.acquire()\nbox = SimpleNamespace(held=held, shared=shared)\n"
        "re_entered, kept = threading.RLock(), threading.Event()\n"
        "def keep():\n    re_entered.acquire()\n    kept.set()\n    held.acquire()\n"
        "threading.Thread(target=keep, daemon=True).start()\nkept.wait()\n"
        "while not any(one['call'] == 'acquire/0' for one in thread_stacks()): pass\n"
    )
    assert stand_of(read(block, "acquire", prelude)).activity is activity


PREFETCH = """
import queue

def prefetch():  # as one over a DataLoader does
    while True:
        try:
            batches.put(read.get(timeout=1000))
        except queue.Empty:
            continue

batches, read = queue.Queue(), queue.Queue()
threading.Thread(target=prefetch, daemon=True).start()
while not any(one["call"].startswith("acquire/") for one in thread_stacks()): pass
"""


def test_a_prefetcher_that_waits_for_stalled_storage_may_go_on():
    assert stand_of(read("batches.get()", "acquire", PREFETCH)).activity is Activity.OTHER


def test_a_progress_bars_monitor_releases_no_lock():
    bar = "from tqdm import tqdm\nbar = tqdm(total=3)\n"
    bar += "while not any(one['module'] == 'tqdm._monitor' for one in thread_stacks()): pass\n"
    assert stand_of(read("held.acquire()", "acquire", bar)).activity is Activity.LOCK


def frame(module, function="f", line=1):
    return [module, module.rpartition(".")[2] + ".py", function, line]


def thread(
    *frames, call="", main=True, name="MainThread", daemon=False, ours=False, module="__main__"
):
    own = {
        "main": main,
        "name": name,
        "daemon": daemon,
        "ours": ours,
        "call": call,
        "frames": list(frames),
    }
    return {**own, "module": module}


@pytest.mark.parametrize(
    ("main", "activity"),
    [
        (
            thread(frame("torch.distributed.distributed_c10d", "all_reduce"), frame("__main__")),
            Activity.COLLECTIVE,
        ),
        (
            thread(frame("torch._ops"), frame("torch.distributed._functional_collectives")),
            Activity.COLLECTIVE,
        ),
        (thread(frame("torch.nn.parallel.distributed"), frame("__main__")), Activity.COLLECTIVE),
        (
            thread(frame("torch.autograd.graph", "_engine_run_backward"), frame("torch._tensor")),
            Activity.BACKWARD,
        ),
        (thread(frame("__main__"), call="item/0"), Activity.DEVICE),
        (thread(frame("__main__"), call="wait/0"), Activity.DEVICE),
        # A checkpoint is written, or the user's forward runs, below torch.distributed.
        (thread(frame("torch.distributed.checkpoint.filesystem"), call="write/1"), Activity.OTHER),
        (
            thread(frame("__main__"), frame("torch.nn.parallel.distributed"), call="sleep/1"),
            Activity.OTHER,
        ),
        # Holdfast waits for its own processes.
        (
            thread(frame("threading", "wait"), frame("__main__"), call="acquire/0", ours=True),
            Activity.OTHER,
        ),
        (thread(frame("threading", "wait"), frame("__main__"), call="acquire/0"), Activity.LOCK),
    ],
)
def test_activities_of_pytorch(main, activity):
    idle = thread(frame("multiprocessing.connection"), call="poll/1", main=False)
    assert (
        stand_of([main, {**idle, "module": "torch.utils.data._utils.pin_memory"}]).activity
        is activity
    )


def test_a_thread_of_holdfasts_releases_no_lock_of_the_user():
    main = thread(frame("threading", "wait"), frame("__main__"), call="acquire/0")
    receiving = thread(frame("socket", "readinto"), call="recv_into/2", main=False, daemon=True)
    assert stand_of([main, receiving]).activity is Activity.OTHER
    assert stand_of([main, {**receiving, "ours": True}]).activity is Activity.LOCK


def test_the_words_for_a_stack():
    stand = stand_of(
        [thread(frame("faults", "strike", 46), frame("__main__", "<module>", 23), call="sleep/1")]
    )
    assert stand.frames == ("strike (faults.py:46)", "<module> (__main__.py:23)")


def test_many_deep_threads_fit_into_a_message():
    deep = "".join(
        f"def f{'x' * 300}{n}(depth):\n    f{'x' * 300}{n}(depth - 1) if depth else held.acquire()\n"
        f"threading.Thread(target=f{'x' * 300}{n}, args=(50,), daemon=True).start()\n"
        for n in range(60)
    )
    threads = read("held.acquire()", "acquire", deep)
    assert len(encode({"kind": "stacks", "threads": threads})) <= MAX_MESSAGE_BYTES
    assert stand_of(threads).activity is Activity.OTHER, (
        "one that was left out may release the lock"
    )


@pytest.mark.parametrize(
    "threads", [[], [{}], [{"main": True}], [thread([1, 2])], "x", None, [None]]
)
def test_malformed_stacks_raise_what_the_supervisor_catches(threads):
    with pytest.raises((KeyError, TypeError, ValueError)):
        stand_of(threads)
