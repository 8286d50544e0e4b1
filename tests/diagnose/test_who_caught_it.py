"""Test the catchers of exceptions: tracebacks of exit handlers, finalizers, loggers and threads."""

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.logs.tracebacks import TracebackReader

LIBRARY = "/opt/env/lib/python3.12"
FRAME = f'  File "{LIBRARY}/site-packages/sink/writer.py", line 84, in drain'
HEADER = "Traceback (most recent call last):"
EXCEPTION = "ValueError: write to closed file"


def caught(*lines):
    """Return the catcher of each exception that ends a traceback."""
    reader = TracebackReader()
    raised = [reader.feed(clean_line(line.encode(), number)) for number, line in enumerate(lines)]
    return [one.caught for one in raised if one is not None]


INTRODUCTIONS = {
    "Error in atexit._run_exitfuncs:": "the interpreter",
    "Exception ignored in: <function Feed.__del__ at 0x7f00>": "the interpreter",
    "Exception ignored in atexit callback <function close at 0x7f00>:": "the interpreter",
    "Exception ignored on threading shutdown <module 'threading'>:": "the interpreter",
    "Exception ignored while calling deallocator <function Feed.__del__ at 0x7f00>:": "the interpreter",
    "Error in sys.excepthook:": "the interpreter",
    "--- Logging error ---": "the interpreter",
    "Exception in thread Thread-9 (most likely raised during interpreter shutdown):": "the interpreter",
    "Exception in thread Thread-9 (poll):": "a thread",
    "Task exception was never retrieved": "a thread",
    "Original exception was:": "nobody",
    "the step took 3 s": "nobody",
}


@pytest.mark.parametrize(("introduction", "who"), INTRODUCTIONS.items())
def test_the_line_before_the_header_says_who_caught_it(introduction, who):
    assert caught(introduction, HEADER, FRAME, EXCEPTION) == [who]
    assert caught(introduction, HEADER, FRAME, EXCEPTION, HEADER, FRAME, EXCEPTION) == [
        who,
        "nobody",
    ]


@pytest.mark.parametrize(
    ("path", "function", "who"),
    [
        (f"{LIBRARY}/multiprocessing/resource_tracker.py", "main", "the interpreter"),
        (f"{LIBRARY}/multiprocessing/util.py", "_run_finalizers", "the interpreter"),
        (f"{LIBRARY}/logging/__init__.py", "emit", "the interpreter"),
        (f"{LIBRARY}/weakref.py", "_exitfunc", "the interpreter"),
        ("/job/reader.py", "__del__", "the interpreter"),
        (f"{LIBRARY}/threading.py", "_bootstrap_inner", "a thread"),
        (f"{LIBRARY}/logging/__init__.py", "getLogger", "nobody"),
        ("/job/emit.py", "emit", "nobody"),
    ],
)
def test_the_outermost_frame_says_who_called(path, function, who):
    frame = f'  File "{path}", line 84, in {function}'
    assert caught(HEADER, frame, FRAME, EXCEPTION) == [who]
    deeper = [who] if who == "nobody" else ["nobody"]
    assert caught(HEADER, FRAME, frame, EXCEPTION) == deeper, "a deeper frame says nothing"


def test_a_marker_within_a_traceback_that_was_never_finished_counts():
    unfinished = [HEADER, FRAME, "    self.file.write(line)"]
    assert caught(*unfinished, "--- Logging error ---", HEADER, FRAME, EXCEPTION) == [
        "the interpreter"
    ]


def test_a_marker_counts_for_one_traceback():
    ended = ["Error in atexit._run_exitfuncs:", HEADER, FRAME, EXCEPTION]
    assert caught(*ended, HEADER, FRAME, "KeyError: 'x'") == ["the interpreter", "nobody"]


def test_a_dump_of_stacks_is_no_traceback():
    """Test a faulthandler dump, whose frames have no comma; the next exception is unrelated."""
    dump = [
        "Current thread 0x00007f00 (most recent call first):",
        f'  File "{LIBRARY}/threading.py", line 359 in wait',
    ]
    assert caught(*dump, "RuntimeError: said by somebody else") == []


@pytest.fixture
def job(tmp_path):
    def written(*lines):
        (tmp_path / "job.log").write_text("".join(f"{line}\n" for line in lines))
        return diagnose(tmp_path / "job.log")

    return written


ROOT = [HEADER, '  File "/job/train.py", line 8, in <module>', "KeyError: 'lr'"]
WATCHDOG = (
    "[rank1]:[E1121 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600043 milliseconds before timing out."
)


@pytest.mark.parametrize(
    "introduction", [one for one, who in INTRODUCTIONS.items() if who == "the interpreter"]
)
def test_what_python_went_on_after_is_no_root(job, introduction):
    ending = [introduction, HEADER, FRAME, EXCEPTION]
    for lines in ([*ROOT, *ending], [*ending, *ROOT]):
        found = job(*lines)
        assert (found.reason, found.root_text) == ("KeyError", "KeyError: 'lr'")
    assert job(WATCHDOG, *ending).reason == "NCCLTimeoutError"
    assert job(*ending).reason == "Unknown"


def test_a_full_disk_that_only_a_logging_handler_met_is_still_the_root(job):
    full = "OSError: [Errno 28] No space left on device"
    found = job("--- Logging error ---", HEADER, FRAME, full)
    assert (found.root_text, found.action) == (full, job(*ROOT[:2], full).action)


def test_an_exception_of_a_thread_gives_way_to_one_of_the_program(job):
    thread = ["Exception in thread Thread-9 (poll):", HEADER, FRAME, EXCEPTION]
    assert job(*thread, *ROOT).reason == "KeyError"
    assert job(*thread).reason == "ValueError", "where nothing else is seen"
    assert job(*thread, WATCHDOG).reason == "ValueError"


def test_a_launcher_that_labels_the_lines_of_one_traceback_differently(job):
    """Test an exit handler's exception that only neighbouring lines identify."""
    ending = ["Error in atexit._run_exitfuncs:", HEADER, FRAME, EXCEPTION]
    lines = [f"[default{rank}]:{line}" for rank, line in enumerate(ending)]
    assert job(WATCHDOG, *lines).reason == "NCCLTimeoutError"
