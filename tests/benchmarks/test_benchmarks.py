"""The benchmarks' rows, JSON and tables. No timings."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest

from holdfast.trace.telemetry.metrics import METRICS
from holdfast.trace.telemetry.scan import scan_wide

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEYS = ["measure", "ours", "peer", "limit", "unit", "must", "met"]


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("common.table")


def test_rows_are_written_as_a_list_of_objects_with_the_same_keys(table, tmp_path, capsys):
    rows = [
        table.Row(measure="restart", ours=1.5, peer=6.0, limit=0.25, unit="s"),
        table.Row(measure="recovered, of 5", ours=5, unit="rounds", must=table.Must("=", 5)),
        table.Row(measure="hang", ours=None, unit="s", must=table.Must("<=", 2)),
    ]
    file = tmp_path / "new" / "rows.json"
    table.report("Title", rows, notes=["[1] as it is"], json_file=file)
    written = json.loads(file.read_text())
    assert [list(row) for row in written] == [KEYS] * 3
    assert written[0] == dict(zip(KEYS, ["restart", 1.5, 6.0, 0.25, "s", None, None], strict=True))
    assert [(row["must"], row["met"]) for row in written[1:]] == [("= 5", True), ("<= 2", False)]
    printed = capsys.readouterr().out
    for text in ("Title", "restart", "1.50", "0.250", "= 5", "NO", "[1] as it is"):
        assert text in printed


@pytest.mark.parametrize(
    ("relation", "figure", "holds"),
    [
        ("=", 2.0, True),
        ("=", 2.1, False),
        ("<=", 2.0, True),
        ("<=", 2.1, False),
        (">=", 2.0, True),
        (">=", 1.9, False),
        ("<=", None, False),
    ],
)
def test_a_must_holds_or_not(table, relation, figure, holds):
    assert table.Must(relation, 2).holds(figure) is holds


@pytest.mark.parametrize("name", ["ours", "peer", "limit"])
def test_a_figure_that_json_has_not_is_refused(table, name):
    with pytest.raises(ValueError, match=f"restart: {name} is nan"):
        table.Row(measure="restart", unit="s", **{name: float("nan")})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (5.0, "5"),
        (0.00123, "0.00123"),
        (1.005, "1.00"),
        (52.74, "52.7"),
        (1234.5, "1234"),
    ],
)
def test_figures_have_three_digits(table, tmp_path, capsys, value, text):
    table.report("T", [table.Row(measure="m", ours=value, unit="s")])
    assert capsys.readouterr().out.splitlines()[4].split()[:2] == ["m", text]


def test_arguments_that_every_benchmark_has(table, tmp_path):
    args = table.parse_arguments("What it does.", ["--quick", "--json", "out.json", "--seed", "3"])
    assert (args.quick, args.json, args.seed) == (True, Path("out.json"), 3)
    args = table.parse_arguments(
        "What it does.", ["--only", "b", "--rounds", "2"], rounds=5, parts=("a", "b")
    )
    assert (args.only, args.rounds) == (["b"], 2)
    args = table.parse_arguments("What it does.", [])
    assert (args.quick, args.json, args.seed) == (False, None, 0)


def test_no_rounds_are_refused_in_a_sentence(table, capsys):
    with pytest.raises(SystemExit, match="2"):
        table.parse_arguments("What it does.", ["--rounds", "0"], rounds=5)
    assert "--rounds must be 1 or more, not 0" in capsys.readouterr().err


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_takes_the_options_and_says_what_it_measures(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--quick" in said
    assert "--json FILE" in said


@pytest.mark.parametrize(
    "results", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_kept_results_belong_to_a_benchmark_and_have_its_shape(results):
    assert any(
        results.stem == script.stem or results.stem.startswith(f"{script.stem}_")
        for script in BENCHMARKS.glob("*.py")
    )
    rows = json.loads(results.read_text())
    assert rows
    for row in rows:
        assert list(row) == KEYS
        assert (row["must"] is None) == (row["met"] is None)


def benchmark(monkeypatch, name):
    monkeypatch.syspath_prepend(BENCHMARKS)
    described = importlib.util.spec_from_file_location(
        f"benchmark_of_{name}", BENCHMARKS / f"{name}.py"
    )
    module = importlib.util.module_from_spec(described)
    monkeypatch.setitem(sys.modules, described.name, module)
    described.loader.exec_module(module)
    return module


def test_a_telemetry_file_of_several_years_ascends_and_repeats_nothing(monkeypatch, tmp_path):
    trace = benchmark(monkeypatch, "trace")
    trace.write_wide(tmp_path / "once.csv", gpus=16, samples=50, seed=0)
    trace.write_years(tmp_path / "once.csv", tmp_path / "GPU_UTIL.csv", 3)
    once, many = (
        (tmp_path / name).read_text().splitlines() for name in ("once.csv", "GPU_UTIL.csv")
    )
    assert many[:51] == once
    assert [line.partition(",")[2] for line in many[1:]] == 3 * [
        line.partition(",")[2] for line in once[1:]
    ]
    scan = scan_wide(tmp_path / "GPU_UTIL.csv", METRICS["GPU_UTIL"])
    assert (scan.rows, scan.duplicates, scan.backward_steps) == (150, [], 0)


def test_the_page_states_the_memory_of_a_report_that_was_measured():
    rows = json.loads((BENCHMARKS / "results/profile_report.json").read_text())
    most = [row for row in rows if "peak memory on 512 MiB" in row["measure"]]
    phases, counters = (row["ours"] / 1024 for row in most)
    assert all(row["met"] for row in most)
    page = (BENCHMARKS.parent / "docs/profile.md").read_text("utf-8")
    text = f"{phases:.1f} GiB of memory for 512 MiB of phases and\n{counters:.0f} GiB for 512 MiB of counters"
    assert text in page


@pytest.mark.parametrize(("noise_mib", "is_met"), [(0.3, True), (2.0, False)])
def test_a_quick_run_judges_the_growth_of_memory_and_no_extrapolation(
    monkeypatch, noise_mib, is_met
):
    module = benchmark(monkeypatch, "profile_report")
    figures = iter([(1.4, 102.8), (8.4, 115.2 + noise_mib)])
    monkeypatch.setattr(module, "measured", lambda *_: next(figures))
    *_, growth, extrapolated = module.rows_of("counters", None, 0, is_quick=True)
    assert (growth.met, extrapolated.met) == (is_met, None)
    assert extrapolated.ours > module.MAX_MIB, "which noise alone can lead to"
