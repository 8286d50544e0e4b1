"""The simulator predicts live runs within 5 %, from inputs measured elsewhere."""

import importlib
import json
import shutil
from pathlib import Path

import pytest

from holdfast.testing.injector import KINDS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_the_ettr_of_the_recorded_storm_is_predicted(part):
    live = part("simulating.live")
    measured = live.figures("chaos")["storm: ETTR, by the lost-time account"]
    found = live.storm(60)
    assert found.ettr == pytest.approx(measured, rel=live.WITHIN)
    assert found.ettr_low < found.ettr < found.ettr_high
    lost_s = sum(found.lost_s.values())
    assert live.STORM_S / (live.STORM_S + lost_s) == pytest.approx(found.ettr, rel=1e-3)


def test_the_storm_that_is_predicted_is_the_one_that_runs(part):
    live, chaos = part("simulating.live"), part("chaos")
    storm = (chaos.STORM_S, chaos.MTBF_S, chaos.STEP_S, chaos.SAVE_EVERY, chaos.BOOT_S)
    assert storm == (live.STORM_S, live.MTBF_S, live.STEP_S, live.SAVE_EVERY, live.BOOT_S)
    kinds = [*live.JOB, *live.NODE, *live.HARMLESS, live.SPIKE]
    assert sorted(kinds) == sorted(KINDS), "each kind is of one class"
    counts = live.faults()
    assert counts.total() == live.figures("chaos")["storm: faults that took effect"]
    ending = counts.total() - sum(counts[kind] for kind in live.HARMLESS)
    one = live.storm_scenario()
    assert live.STORM_S / one.mean_time_to_failure_s() == pytest.approx(ending)
    # A damaged checkpoint costs an older one, but no further failure.
    assert one.saves.damaged == counts["damaged checkpoint"] / ending


def test_no_input_follows_from_the_storms_own_outcome(part, tmp_path):
    live = part("simulating.live")
    for name in ("recover", "detection", "checkpoint"):
        shutil.copy(live.RESULTS / f"{name}.json", tmp_path)
    before = live.storm(3, results=tmp_path)
    assert before == live.storm(3)
    rows = json.loads((tmp_path / "recover.json").read_text())
    for row in rows:
        if "first new step, median" in row["measure"] and row["ours"] is not None:
            row["ours"] *= 3
    (tmp_path / "recover.json").write_text(json.dumps(rows))
    assert live.storm(3, results=tmp_path).ettr < before.ettr, "the measured restart counts"


@pytest.mark.parametrize("place", [0, -1])
def test_the_makespan_of_the_recorded_evaluation_is_predicted(part, place):
    """One node with history, and sixteen without, which is furthest off."""
    live = part("simulating.live")
    setting, history = live.EVALUATIONS[place]
    measured_s = live.emulated_s(setting, history=history)
    predicted_s = live.evaluation_s(setting, history=history)
    assert predicted_s == pytest.approx(measured_s, rel=live.WITHIN)
