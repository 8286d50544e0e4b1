"""Test programs that a job runs, judges or quotes: only its own tracebacks can be the root."""

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.programs import Programs, is_in_quotes

PATHS = {
    "numbered": lambda n: f"/sandbox/run_{n}/solution.py",
    "temporary": lambda n: f"/tmp/tmp{chr(97 + n % 26)}x{n}_q/main.py",
    "hashed": lambda n: f"/cells/{(n + 7) * 0x9E3779B1 % (1 << 32):08x}/cell.py",
}
ERRORS = [
    "KeyError: 'b'",
    "AssertionError",
    "ZeroDivisionError: division by zero",
    "NameError: name 'x' is not defined",
]


def traceback(path, error, intro=""):
    return [
        f"{intro}Traceback (most recent call last):",
        f'  File "{path}", line 7, in <module>',
        "    f()",
        error,
    ]


def judged(path, errors=ERRORS):
    """Return a log of a job that runs programs and reports on them at each step."""
    lines = []
    for step in range(1, 13):
        lines.append(f"step {step} loss {3 - step / 10:.2f}")
        lines += traceback(
            path(step), errors[step % len(errors)], intro=f"[judge] program {step} printed: "
        )
        lines.append("[judge] score -0.5")
    return lines


@pytest.fixture
def job(tmp_path):
    def write_and_diagnose(lines):
        (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
        return diagnose(tmp_path / "job.log")

    return write_and_diagnose


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_generated_program_is_no_root_though_the_job_ends_after_the_last(job, path):
    assert job(judged(path)).reason == "Unknown"


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_the_job_s_own_traceback_among_them_is_the_root(job, path):
    own = traceback("/job/train.py", "KeyError: 'warmup'")
    for lines in (judged(path) + own, judged(path)[:-5] + own + judged(path)[-5:]):
        assert job(lines).root_text == "KeyError: 'warmup'"


def test_one_that_reads_like_no_other_before_is_generated_too(job):
    lines = judged(PATHS["numbered"], errors=["KeyError: 'b'"])
    last = traceback(
        "/sandbox/run_99/solution.py",
        "RecursionError: maximum recursion depth exceeded",
        "[judge] and: ",
    )
    assert job(lines + last).reason == "Unknown"


def test_copies_of_the_script_that_fail_at_once_are_the_job_s(job):
    """Test ranks that run in their own folders, in a log without rank names."""
    steps = [f"step {step} loss 2" for step in range(9)]
    copies = [
        line
        for rank in range(8)
        for line in traceback(f"/scratch/rank_{rank}/train.py", "KeyError: 'a'")
    ]
    assert job(steps + copies).reason == "KeyError"


def test_attempts_in_numbered_folders_are_the_job_s(job):
    lines = []
    for attempt in range(5):
        lines += [f"step {step} loss 2" for step in range(attempt * 5, attempt * 5 + 9)]
        lines += traceback(f"/runs/attempt-{attempt}/train.py", "KeyError: 'a'")
        lines.append("srun: error: node0007: task 0: Exited with exit code 1")
    assert job(lines).reason == "KeyError"


def test_a_traceback_that_a_job_s_words_introduce_gives_way_to_one_that_nothing_does(job):
    reported = traceback("/lab/answer.py", "ValueError: no answer", intro="the grader says ")
    own = traceback("/job/train.py", "ValueError: the learning rate is negative")
    for lines in (reported + own, own + reported):
        assert job(lines).root_text == "ValueError: the learning rate is negative"


def test_a_logger_s_words_before_the_only_traceback_do_not_hide_it(job):
    lines = traceback("/job/train.py", "KeyError: 'a'", intro="training failed with ")
    assert job([f"step {step} loss 2" for step in range(5)] + lines).reason == "KeyError"


def test_progress_must_lie_between_programs_and_no_end():
    programs = Programs()
    for number in range(9):
        programs.note(f"/run_{number}/a.py", introduced=True, progress=1)
    assert not programs.is_generated("/run_3/a.py")
    for number in range(3):
        programs.note(f"/run_{number}/a.py", introduced=True, progress=2 + number)
        programs.note_end()
    assert not programs.is_generated("/run_3/a.py")
    for number in range(3):
        programs.note(f"/run_{number}/a.py", introduced=True, progress=9 + number)
    assert programs.is_generated("/run_77/a.py")
    assert not programs.is_generated("/run/a.py")


def test_the_same_program_again_is_not_generated():
    programs = Programs()
    for progress in range(9):
        programs.note("/job-7/train.py", introduced=False, progress=progress)
    assert not programs.is_generated("/job-7/train.py")
    assert programs.is_own_folder("/job-7/other.py")


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        (r"""result={'stderr': 'Traceback:\n  File "a.py"\nHERE: out of memory\n'}""", True),
        (r'stdout "a\nHERE"', True),
        (r"it's a\nHERE", False),
        ("msg='HERE'", False),
        (r"'done\n' HERE", False),
        (r'say "x\" y\nHERE"', True),
        ("HERE", False),
    ],
)
def test_what_stands_in_quotes_with_escaped_line_ends_is_quoted(text, quoted):
    assert is_in_quotes(text, text.index("HERE")) is quoted


def test_a_log_within_a_log_gives_way_to_the_job_s_own_word(job):
    said = "CUDA out of memory. Tried to allocate 2.00 GiB."
    inner = rf"""tool returned {{'out': '', 'err': 'loading\ntorch.OutOfMemoryError: {said}\n'}}"""
    own = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 2 has 79.10 GiB."
    for lines in ([inner, own], [own, inner]):
        assert "96.00 MiB" in job(["step 1 loss 2", *lines]).root_text
