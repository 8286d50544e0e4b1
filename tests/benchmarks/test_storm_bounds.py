"""The bounds of a storm's ETTR."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def storm_bounds(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("recovering.storm_bounds")


def incident(detected_at_s, restart_s):
    return SimpleNamespace(
        incident=SimpleNamespace(detected_at_s=detected_at_s),
        seconds_to_restart=restart_s,
        fault_at_s=detected_at_s,
    )


def test_each_incident_costs_the_median_of_its_kind_or_the_recorded_time(storm_bounds):
    faults = [
        ("rank killed", 10.0),
        ("rank killed", 50.0),
        ("bad batch", 80.0),
        ("shim killed", 90),
    ]
    incidents = [incident(11.0, 2.0), incident(51.0, 4.0), incident(82.0, 8.0)]
    summary = SimpleNamespace(incidents=incidents, wall_s=100.0)
    own, recorded, lines = storm_bounds.bounds(faults, summary, {"rank killed": 1.0})
    assert own == pytest.approx(1 - (2 * (1 + 3) + 10) / 100)
    assert recorded == pytest.approx(1 - (2 * 1 + 10) / 100)
    assert ("rank killed", 2, 2, "1.0", "3.0", "1.0") in lines
    assert ("shim killed", 1, 0, "0.0", "0.0", "") in lines


def test_the_recorded_costs_are_those_of_recover(storm_bounds):
    costs = storm_bounds.recorded_costs()
    assert costs.keys() == storm_bounds.MEASURED_BY_RECOVER.keys()
    assert min(costs.values()) > 0
