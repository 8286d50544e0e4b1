"""Test that the events of a scan are bounded, and skipped lines carry no information."""

import random

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.explain.scan import KEPT_PER_RULE, Event, scan
from holdfast.diagnose.logs.files import find_files
from holdfast.diagnose.rules.packaged import packaged_rules

KEY_ERROR = "Traceback (most recent call last):\n  File \"/job/t.py\", line 8, in f\n    g()\nKeyError: 'a'\n"


def events(path):
    return scan(find_files([path]).files, packaged_rules())


def words(number, seed):
    """Return lines that all have different shapes."""
    draw = random.Random(seed)
    return "".join(f"{''.join(draw.choices('abcdefghij', k=40))} ordinary\n" for _ in range(number))


def test_events_of_a_rule_are_bounded(tmp_path):
    log = tmp_path / "x.log"
    log.write_text(
        "".join(f"[rank{rank}]: ValueError: {'x' * (rank % 99)}\n" for rank in range(5000))
    )
    assert 0 < len(events(log)) < 100


def test_the_last_error_is_kept_whatever_came_before(tmp_path):
    """Test an error after thousands of survived ones."""
    log = tmp_path / "x.log"
    survived = "".join(
        f"ValueError: sample {'x' * (at % 50)}\nstep {at} loss 2.1\n" for at in range(3000)
    )
    log.write_text(
        survived
        + "step 3000 loss 2.1\n"
        + KEY_ERROR.replace("KeyError: 'a'", "ValueError: the end")
    )
    found = diagnose(log)
    assert (found.reason, found.root_text) == ("ValueError", "ValueError: the end")
    assert found.root_line.line == 6005


def test_many_files_take_little_memory(tmp_path, measured):
    """Test that the memory for ordinary lines does not grow with the number of files."""
    for rank in range(60):
        (tmp_path / f"rank-{rank}.log").write_text(words(5000, rank))
    (tmp_path / "rank-7.log").write_text(words(5000, 7) + KEY_ERROR)
    reason, _, grown_mib = measured(tmp_path)
    assert reason == "KeyError"
    assert grown_mib < 30


def test_many_streams_in_one_log_take_little_memory(tmp_path, measured):
    log = tmp_path / "job.log"
    with log.open("w") as file:
        for rank in range(8000):
            file.write(
                f"[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]: step 3 loss 2.1\n"
            )
        file.write(KEY_ERROR)
    reason, _, grown_mib = measured(log)
    assert reason == "KeyError"
    assert grown_mib < 100


def test_lines_that_look_like_errors_take_little_memory(tmp_path, measured):
    """Test lines that no rule matches, each with different words."""
    draw = random.Random(3)
    log = tmp_path / "job.log"
    with log.open("w") as file:
        for _ in range(15_000):
            file.write(f"{draw.getrandbits(40):x} error of {draw.getrandbits(60):x}\n")
        file.write(KEY_ERROR)
    reason, _, grown_mib = measured(log)
    assert reason == "KeyError"
    assert grown_mib < 30


def test_lines_met_again_mean_the_same(tmp_path):
    """Test that a repeated line keeps its meaning."""
    log = tmp_path / "x.log"
    log.write_text(
        ("Connection refused by 10.0.0.1\nstep 1 loss 2\nall is well 7\n" * 500) + "ValueError: b\n"
    )
    found = events(log)
    assert max(event.line for event in found if "refused" in event.text) == 3 * 499 + 1
    assert any(event.text == "ValueError: b" for event in found)


@pytest.mark.parametrize("world", [1, 4, 64, 512])
def test_an_error_while_starting_was_survived_however_many_ranks_print_steps(tmp_path, world):
    log = tmp_path / "x.log"
    down = "[ 13.1] mlx5_core 0000:17:00.0: mlx5_0: Link DOWN\n"
    steps = "".join(
        f"[rank{rank}]: step {step} loss 2.1\n" for step in range(30) for rank in range(world)
    )
    log.write_text(down + steps + KEY_ERROR.replace("KeyError: 'a'", "ValueError: b"))
    found = diagnose(log)
    assert found.reason == "ValueError"
    assert [one.role for one in found.evidence if one.line == 1] == ["recovered"]


def test_errors_without_signs_of_life_between_them_are_weighed_once(tmp_path, monkeypatch):
    """Test that the time for a log of only errors does not grow with the kept events."""
    weighed = []
    recovered = Event.recovered.fget
    monkeypatch.setattr(
        Event, "recovered", property(lambda event: weighed.append(event) or recovered(event))
    )
    log = tmp_path / "x.log"
    log.write_text("".join(f"ValueError: {'x' * length}\n" for length in range(500)))
    assert len(events(log)) == 2 * KEPT_PER_RULE
    assert len(weighed) == KEPT_PER_RULE
