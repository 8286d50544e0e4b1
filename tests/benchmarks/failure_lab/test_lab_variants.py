"""The laboratory's variants of a recorded log, and their labels."""

import json
import random
import re

import pytest

from failure_lab import noise
from failure_lab.program import Program
from failure_lab.programs import PROGRAMS
from failure_lab.record import record, root_lines, write_labels
from failure_lab.routines import NOISE
from failure_lab.run import Recording
from failure_lab.variants import (
    NOISE_LINES,
    RANKS,
    VARIANTS,
    label_of,
    read_recorded,
    variants,
    write_variants,
)
from holdfast.diagnose.rules.taxonomy import CATEGORIES

RANK0 = """\
 [2026-03-14 02:00:01] iteration        1/  500000 | lm loss: 1.2
[rank0]: Traceback (most recent call last):
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:4242
"""
RANK1 = """\
[883102.114203] NVRM: Xid (PCI:0000:4e:00): 74, NVLink: fatal error detected on link 6
[rank1]: Traceback (most recent call last):
[rank1]: torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution
"""
LAUNCHER = "E1122 06:22:10.123000 41 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1)\n"
PROGRAM = PROGRAMS["nvlink-xid74"]


@pytest.fixture
def recorded(tmp_path):
    recording = Recording(
        log=RANK1 + RANK0 + LAUNCHER,
        ranks={0: RANK0, 1: RANK1}, launcher=LAUNCHER, exit_code=1, timed_out=False, wall_s=1.0,
    )  # fmt: skip
    (outcome,) = record([PROGRAM], tmp_path, runner=lambda program: recording)
    assert outcome.problem is None
    (one,) = read_recorded(tmp_path)
    return one


def made(recorded, name, seed=0):
    # An order of the ranks that is the recorded one makes no variant.
    variant = next(
        one
        for some in range(seed, seed + 9)
        for one in variants(recorded, some)
        if one.name == name
    )
    label = label_of(recorded, variant)
    texts = [line.text for line in variant.lines]
    return texts, label


def test_the_recorded_log_has_the_label_of_its_program(recorded):
    assert recorded.label["root_lines"] == [1, 3]
    assert recorded.label["category"] == "Infrastructure"
    assert recorded.label["faulty"] == {"rank": 1}


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "root_removed"])
def test_the_lines_of_the_root_are_those_that_state_it(recorded, name):
    texts, label = made(recorded, name)
    assert label["root_lines"]
    assert label["root_lines"] == root_lines(PROGRAM, "\n".join(texts))


def test_the_ranks_come_in_another_order(recorded):
    texts, label = made(recorded, "permuted")
    assert texts == (RANK0 + RANK1 + LAUNCHER).splitlines()
    assert label["root_lines"] == [4, 6]


def test_sixty_four_ranks_of_which_one_is_faulty(recorded):
    texts, label = made(recorded, "ranks64")
    prefixed = [re.match(r"\[rank(\d+)\]: ", text) for text in texts[:-1]]
    assert {int(one[1]) for one in prefixed} == set(range(RANKS))
    rank = label["faulty"]["rank"]
    assert all(texts[number - 1].startswith(f"[rank{rank}]: ") for number in label["root_lines"])
    assert sum("Connection closed by peer" in text for text in texts) == RANKS - 1
    assert texts[-1] == LAUNCHER.rstrip()


def test_prefixes_and_times_are_stripped(recorded):
    texts, _ = made(recorded, "unprefixed")
    assert not any(text.startswith("[rank") for text in texts)
    texts, _ = made(recorded, "untimed")
    assert texts[0].startswith("NVRM: Xid")
    assert texts[3] == " iteration        1/  500000 | lm loss: 1.2"
    assert "06:22:10" not in texts[-1]


def test_the_tail_is_cut_after_the_first_lines_of_the_root(recorded):
    texts, label = made(recorded, "tail_cut")
    assert texts == RANK1.splitlines()[:1]
    assert label["root_lines"] == [1]


def test_the_root_is_removed(recorded):
    texts, label = made(recorded, "root_removed")
    assert (label["root_lines"], label["root_removed"]) == ([], True)
    assert root_lines(PROGRAM, "\n".join(texts)) == []


def test_noise_around_the_failure(recorded):
    befores = set()
    for seed in range(8):
        texts, label = made(recorded, "noisy", seed)
        assert NOISE_LINES - 100 < len(texts) < NOISE_LINES + 150
        assert root_lines(PROGRAM, "\n".join(texts)) == label["root_lines"]
        assert not any("lm loss: 1.2" in text for text in texts)
        befores.add(label["cascade_before_root"])
    assert befores == {True, False}


@pytest.mark.parametrize("trainer", list(NOISE))
def test_every_template_of_the_noise_can_be_filled(trainer):
    one = NOISE[trainer]
    every = [
        *one.start,
        one.step,
        *one.chatter,
        *(line for group in one.recovered for line in group),
    ]
    for template in every:
        noise._filled(template, random.Random(1), 3)
    draw = random.Random(3)
    text = noise.routine(trainer, draw, 400)
    assert 400 <= len(text) < 420
    assert noise.cascade(draw, 9)


def test_the_same_seed_makes_the_same_variants(recorded):
    first = [[line.text for line in one.lines] for one in variants(recorded, 5)]
    again = [[line.text for line in one.lines] for one in variants(recorded, 5)]
    assert first == again != [[line.text for line in one.lines] for one in variants(recorded, 6)]


def test_what_is_written_is_what_the_labels_say(recorded, tmp_path):
    count = write_variants(tmp_path, tmp_path / "out", seed=1)
    labels = [
        json.loads(line) for line in (tmp_path / "out" / "labels.jsonl").read_text().splitlines()
    ]
    assert len(labels) == count == len({label["id"] for label in labels})
    for label in labels:
        assert (
            root_lines(PROGRAM, (tmp_path / "out" / label["log"]).read_text())
            == label["root_lines"]
        )


@pytest.mark.parametrize(
    ("recording", "problem"),
    [
        (Recording(log="fine\n", exit_code=0, timed_out=False, wall_s=1.0), "it ended well"),
        (
            Recording(log="else\n", exit_code=1, timed_out=False, wall_s=1.0),
            "no line of it matches",
        ),
        (Recording(log="", exit_code=-9, timed_out=True, wall_s=1.0), "did not end"),
    ],
)
def test_a_log_without_its_failure_is_refused(tmp_path, recording, problem):
    (outcome,) = record([PROGRAM], tmp_path, runner=lambda program: recording)
    assert problem in outcome.problem
    assert not (tmp_path / "labels.jsonl").exists()
    assert (tmp_path / "rejected" / "nvlink-xid74.log").exists()


def test_a_label_of_a_program_that_is_gone_is_passed_over(tmp_path):
    write_labels(tmp_path, [{"id": "old", "program": "old"}])
    assert list(read_recorded(tmp_path)) == []


def test_every_reason_has_programs():
    known = [program.reason for program in PROGRAMS.values()]
    few = {reason for reason in CATEGORIES if known.count(reason) < 3}
    assert few == {"Unknown"}
    assert len(known) >= 100


def test_programs_are_distinct_and_complete():
    sources = [(program.source, tuple(program.files.items())) for program in PROGRAMS.values()]
    assert all(sources.count(source) == 1 for source in sources)
    for program in PROGRAMS.values():
        if program.launcher != "shell" and not program.id.startswith("syntax"):
            compile(program.source, program.name, "exec")


@pytest.mark.parametrize(
    "wrong",
    [
        {"reason": "Nonsense"},
        {"ranks": 5},
        {"dialect": "klingon"},
        {"launcher": "python", "ranks": 2},
    ],
)
def test_a_program_that_could_not_be_run_is_refused(wrong):
    given = {"id": "x", "reason": "KeyError", "cause": "c", "root": "r", "script": "", **wrong}
    with pytest.raises(ValueError, match="program x"):
        Program(**given)
