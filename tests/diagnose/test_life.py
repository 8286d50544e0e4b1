"""Test whether a job survived an error: steps of all dialects, counters and habitual errors."""

from itertools import pairwise

import pytest
from failures import raised, steps, watchdog
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose import diagnose, packaged_rules, scan
from holdfast.diagnose.explain.life import Before, Counters, Habits, OwnSteps, Steps, own_went_on
from holdfast.diagnose.logs.files import find_files
from holdfast.diagnose.rules.rules import ENDING

KEY = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 8, in f',
    "KeyError: 'a'",
]
CAUGHT = [
    "Traceback (most recent call last):",
    '  File "/opt/env/lib/python3.12/site-packages/kernels/load.py", line 8, in f',
    "ModuleNotFoundError: No module named 'fast_kernels'",
]


@pytest.fixture
def job(tmp_path):
    def written(*lines):
        (tmp_path / "job.log").write_text("".join(f"{line}\n" for line in lines))
        return diagnose(tmp_path / "job.log")

    return written


def survived(tmp_path, lines):
    """Return by line number whether the job survived each event."""
    (tmp_path / "job.log").write_text("".join(f"{line}\n" for line in lines))
    events = scan(find_files([tmp_path / "job.log"]).files, packaged_rules())
    return {one.line: one.recovered for one in events if one.rule.kind != ENDING}


# --- a second error ------------------------------------------------------------------------------

STARTING = [
    "2026-03-01 10:00:05,000 INFO mapped the shard alpha",
    "building the vocabulary",
    "rank topology computed",
    "tokenizer ready",
] * 6
"""Lines of a start, with neither steps nor counters."""


@pytest.mark.parametrize(("prefix", "is_sure"), [("", False), ("[rank0]: ", True)])
def test_a_process_that_raises_again_much_later_outlived_the_first_error(job, prefix, is_sure):
    """Test lines without a process name, which two processes may have printed."""
    lines = [f"{prefix}{line}" for line in [*CAUGHT, *STARTING, *KEY]]
    found = job(*lines, "srun: error: gn07: task 0: Exited with exit code 1")
    assert (found.reason, found.root_line.line) == ("KeyError", len(lines))
    assert (found.confidence > 0.8) is is_sure


def outlived(tmp_path, lines):
    """Return whether the process outlived the first error of the log."""
    (tmp_path / "job.log").write_text("".join(f"{line}\n" for line in lines))
    events = scan(find_files([tmp_path / "job.log"]).files, packaged_rules())
    return min(events, key=lambda one: one.line).outlived


def test_an_error_is_outlived_only_by_its_own_process_and_by_its_last_error(tmp_path):
    chained = "During handling of the above exception, another exception occurred:"
    assert outlived(tmp_path, [*CAUGHT, *STARTING, *KEY])
    assert not outlived(tmp_path, [*CAUGHT, *KEY])
    assert not outlived(tmp_path, [*CAUGHT, "", chained, "", *KEY])
    assert not outlived(tmp_path, [*CAUGHT, *STARTING])
    # The lines after the second error may come from another process.
    assert not outlived(tmp_path, [*CAUGHT, *STARTING, *KEY, *STARTING])
    # Another rank may have raised the second error.
    assert not outlived(tmp_path, [*CAUGHT, *steps(1, 0), *STARTING, *KEY])


# --- steps ---------------------------------------------------------------------------------------


def test_bars_that_count_something_else_push_no_step_out(tmp_path):
    """Test three steps after the error, followed by another kind of bar with a hundred redraws."""
    bar = "\r".join(
        f"Processed prompts: {n}%|## | {n}/100 [00:01<00:01, 9.1it/s]" for n in range(100)
    )
    lines = [*steps(0, 1, 2), *CAUGHT, *steps(0, 3, 4, 5), bar, *KEY]
    assert survived(tmp_path, lines) == {5: True, 12: False}


def test_a_bar_drawn_again_after_an_error_is_no_progress(tmp_path):
    """Test that tqdm draws its last state again when the program exits."""
    bar = " 12%|#2        | 41/620 [01:07<50:20,  4.98s/it]"
    for before in ([], [bar]):
        assert set(survived(tmp_path, [*before, *KEY, bar, bar]).values()) == {False}


@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_steps_that_a_closed_bar_shows_late_are_no_progress(tmp_path, prefix):
    """Test a bar drawn five steps before the error, and again when the error closes it."""

    def drawn(step):
        return f"{prefix} 12%|#2        | {step}/620 [01:07<50:20,  4.98s/it]"

    error = [f"{prefix}{line}" for line in KEY]
    lines = [drawn(36), *error, drawn(41), drawn(41)]
    assert survived(tmp_path, lines) == {4: False}
    assert survived(tmp_path, [*lines, drawn(42)]) == {4: True}


def test_two_counts_in_different_dialects_are_no_restart(tmp_path):
    """Test a bar at 100 after step 5000, which is no return to step 100."""
    own = OwnSteps()
    both = Steps()
    for step in (4000, 4500, 5000):
        both.note(1, step, own, is_rank=True)
    before = Before(own=dict(own.rises), job=both.so_far(), rises_seen=0)
    both.note(2, 100, own, is_rank=True)
    assert not both.went_on(before)
    for step in (5500, 6000, 6500):
        both.note(1, step, own, is_rank=True)
    assert both.went_on(before)
    assert own_went_on(own, before)


def test_the_first_step_of_a_stream_is_no_progress_of_its_own():
    own, both = OwnSteps(), Steps()
    before = Before(own={}, job={}, rises_seen=0)
    both.note(1, 41, own, is_rank=True)
    assert not own_went_on(own, before)
    both.note(1, 42, own, is_rank=True)
    assert own_went_on(own, before)


# --- counters ------------------------------------------------------------------------------------

FORMS = {
    "words": "loop - update {n} ce={x}.41 z=0.004",
    "equals": "sweep: tick={n}, objective={x}.93",
    "of a total": "(pass {n}/90000) objective {x}",
    "colon": "objective:{x} tick:{n} rate:3.1",
    "with a clock": "12:05:{s} tick {n} objective {x}",
    "in brackets": "[{n}] objective {x}.2",
    "a path": "train/{n} objective {x}.2",
    "zeros before": "upd {n:07d}  objective={x}.2",
    "json": 'metrics {{"iter": {n}, "objective": {x}.2}}',
    "hosts before": "host-{x} engine[{x}]: pass {n} objective 0.{x}",
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def counted(form, numbers):
    return [form.format(n=n, x=n * 37 % 11, s=f"{n % 60:02}") for n in numbers]


@every_form
def test_a_counter_that_no_trainer_is_known_for_is_progress(tmp_path, form):
    lines = [*CAUGHT, *counted(form, range(1, 40)), *KEY]
    assert survived(tmp_path, lines) == {3: True, 45: False}


@every_form
def test_a_counter_that_stands_still_is_no_progress(tmp_path, form):
    lines = [*counted(form, range(1, 40)), *KEY, *counted(form, [39] * 40)]
    assert set(survived(tmp_path, lines).values()) == {False}


@pytest.mark.parametrize(
    "form",
    [
        "waiting for peers, {n} s elapsed",
        "retry {n} of the request",
        "monitor alive, tick {n}",
        "frame {n} of the stack",
        "12:00:{n}",
        "loss {x} throughput {x}",
    ],
)
def test_what_rises_while_nothing_goes_on_is_no_progress(tmp_path, form):
    lines = [*KEY, *counted(form, range(10, 90))]
    assert set(survived(tmp_path, lines).values()) == {False}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_counters_say_nothing_where_a_trainer_reports_its_steps(tmp_path, form):
    """Test steps that end at the error while another counter goes on."""
    lines = [*steps(0, *range(9)), *KEY, *counted(form, range(1, 90))]
    assert set(survived(tmp_path, lines).values()) == {False}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 999), min_size=30, max_size=30, unique=True))
def test_numbers_in_any_order_are_counters_only_if_they_rise(numbers):
    counters = Counters()
    counters.note(f"size={number} done".encode() for number in numbers)
    drops = sum(later < earlier for earlier, later in pairwise(numbers))
    if drops > 12:
        assert not counters.went_on(Before(own={}, job={}, rises_seen=0))
    risen = Counters()
    risen.note(f"size={number} done".encode() for number in sorted(numbers))
    assert risen.went_on(Before(own={}, job={}, rises_seen=0))


def test_counters_take_bounded_memory():
    counters = Counters()
    counters.note(f"{'x' * (n % 150)}{'y' * (n // 150)} n={n}".encode() for n in range(20_000))
    assert len(counters._by_place) <= 1024


# --- habits --------------------------------------------------------------------------------------


def generated(number):
    """Return the lines that a sandbox prints of a model's program."""
    return [
        f"sample {number}: Traceback (most recent call last):",
        f'  File "/box/{number}/answer.py", line 7, in <module>',
        "IndexError: list index out of range",
    ]


def test_an_error_that_was_survived_at_every_step_is_routine_the_last_time_too(job):
    used_to = [line for step in range(9) for line in (*generated(step), *steps(0, step))]
    found = job(*used_to, *generated(9), *watchdog(1))
    assert found.reason == "NCCLTimeoutError"
    assert job(*used_to[:4], *generated(9), *watchdog(1)).reason == "IndexError"


def test_the_same_words_raised_at_another_place_are_no_habit(job):
    used_to = [line for step in range(9) for line in (*generated(step), *steps(0, step))]
    found = job(*used_to, *raised(0, "IndexError: list index out of range"), *watchdog(1))
    assert found.reason == "IndexError"
    assert found.confidence > 0.6


def test_an_error_that_ended_each_attempt_is_no_habit(job):
    """Test four attempts with the same failure, each ended by the launcher's report."""
    attempt = [
        *steps(0, *range(9)),
        *raised(0, "KeyError: 'lr'"),
        "srun: error: n7: task 0: Exited with exit code 1",
    ]
    found = job(*attempt * 4)
    assert found.reason == "KeyError"
    assert found.confidence > 0.6


def test_habits_count_what_was_survived_and_not_how_often_it_was_said():
    habits = Habits()
    assert [habits.survived_before("rule", "text", progress) for progress in (1, 1, 1, 2, 3, 4)] == [
        0, 0, 0, 1, 2, 3,
    ]  # fmt: skip
    habits.note_end()
    assert habits.survived_before("rule", "text", 9) == 0
    assert habits.survived_before("rule", "another text", 9) == 0
