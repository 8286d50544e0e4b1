"""Install the wheel in an environment of its own and run the demonstration, as a newcomer does."""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

import json_schemas
from holdfast.core.errors import BadUse
from holdfast.core.ledger import Ledger
from holdfast.core.paths import ledger_url
from holdfast.demo.demonstration import Demonstration
from holdfast.demo.faults import KINDS
from required import required_distributions

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build the wheel and the source distribution; return them in this order."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return sorted(folder.iterdir(), key=lambda path: path.suffix != ".whl")


@pytest.fixture(scope="module")
def demo(tmp_path_factory, dist):
    """Run `holdfast demo --json` once, from the wheel in an environment of its own.

    The environment has what `[train,report]` requires and nothing else. The demonstration is as
    short as its faults have room. The fixture is its folder and its answer.
    """
    folder = tmp_path_factory.mktemp("demo")
    wheel, _ = dist
    binaries = environment_of(wheel, folder / "empty")
    out = folder / "report"
    options = ["--seed", "7", "--steps", "96", "--out", out, "--json"]
    answer = run(binaries / "holdfast", "demo", *options)
    return out, json_schemas.check(json.loads(answer))


def environment_of(wheel, folder):
    """Make an environment with the wheel and its requirements; return the folder of its programs.

    The required packages are links to those of this environment. To unpack and compile them anew
    costs a third of what the demonstration costs.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in required_distributions("train", "report").values():
        for top in {path.parts[0] for path in distribution.files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    binaries = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python")
    run(*pip, "install", "--no-deps", wheel)
    run(*pip, "check")
    return binaries


def run(*command):
    """Run a command without the Python settings of the tests; return its standard output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "HOLDFAST_HOME")
    }
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_distributions_pass_twine(dist):
    run(sys.executable, "-m", "twine", "check", "--strict", *dist)


def test_five_faults_on_two_nodes_and_nobody_stepped_in(demo):
    _, answer = demo
    assert answer["interventions"] == 0
    assert answer["shortcomings"] == []
    rows = {row["fault"]: row for row in answer["faults"]}
    assert sorted(rows) == sorted(KINDS)
    for row in rows.values():
        assert row["seconds_to_detect"] >= 0
        assert row["seconds_to_restart"] > 0
        assert row["rank_seconds_lost"] > 0
        assert "went on from" in row["action"]
    assert "damaged" in rows["Checkpoint damaged"]["action"]
    assert "left out" in rows["Loss became NaN"]["action"]
    assert "found bad and replaced" in rows["Bad node"]["action"]


def test_each_fault_is_laid_at_the_right_door(demo):
    out, answer = demo
    rows = {row["fault"]: row for row in answer["faults"]}
    with Ledger.open(ledger_url(out / "holdfast")) as ledger:
        injected = {
            one.data["fault"]: one.data for one in ledger.events("faults", "fault_injected")
        }
        (left_out,) = ledger.events("faults", "leave_out")
        incidents = {one.step: one.kind for one in ledger.incidents("faults")}
        launches = [one.data["nodes"] for one in ledger.events("faults", "launched")]
        cordoned = [node.name for node in ledger.nodes() if node.is_cordoned]
    for fault in ("Rank killed", "Checkpoint damaged", "Rank frozen"):
        assert rows[fault]["rank"] == injected[fault]["rank"], fault
        assert rows[fault]["node"] == injected[fault]["node"], fault
    bad_batch = injected["Loss became NaN"]["step"] + 1
    assert left_out.data["first"] <= bad_batch <= left_out.data["last"] <= bad_batch + 3
    assert cordoned == [injected["Bad node"]["node"]]
    assert sorted(launches[0].values()) == ["node1", "node2"]
    assert set(launches[-1].values()) == {"node1", "node2", "node3"} - set(cordoned)
    assert {"anomaly", "hang", "exit"} == set(incidents.values())


def test_the_final_weights_are_bit_identical_and_stock_pytorch_says_so(demo):
    out, answer = demo
    assert answer["proof"]["identical"] is True
    assert answer["proof"]["sha256"] == answer["proof"]["reference_sha256"]
    loaded = []
    for run in ("faults", "reference"):
        path = max((out / "checkpoints" / run).glob("step-*"))
        metadata = dcp.FileSystemReader(path).read_metadata()
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "size") and name.startswith(("model.", "optimizer."))
        }
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(state, checkpoint_id=path)
        loaded.append(state)
    assert loaded[0].keys() == loaded[1].keys()
    assert len(loaded[0]) > 100
    for name, tensor in loaded[0].items():
        assert torch.equal(
            tensor.view(torch.uint8) if tensor.dim() else tensor,
            loaded[1][name].view(torch.uint8) if tensor.dim() else loaded[1][name],
        ), name


def test_the_users_own_error_stopped_the_second_run_at_once(demo):
    out, answer = demo
    assert answer["own_error"]["exit_code"] == 1
    assert "CorruptVocabulary" in answer["own_error"]["outcome"]
    with Ledger.open(ledger_url(out / "holdfast")) as ledger:
        assert len(ledger.attempts("own-error")) == 1


def test_no_process_of_it_is_left(demo):
    out, _ = demo
    home = str((out / "holdfast").absolute())
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if home in process.cmdline():
                left.append(process)
    assert left == []


def test_the_page_says_what_the_answer_says(demo):
    out, answer = demo
    page = (out / "report.html").read_text()
    assert answer["proof"]["sha256"] in page
    assert "CorruptVocabulary" in page
    assert all(kind in page for kind in KINDS)
    assert len(page) < 1_000_000


def test_the_benchmark_finds_nothing_wrong_with_it(demo, monkeypatch):
    """`make bench-quick` leaves `demo_seeds.py` out: it would run the same demonstration once more."""
    out, answer = demo
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("demo_seeds")
    shown = benchmark.shown_by(7, 100.0, out / "holdfast", 0)
    assert shown.failures == ()
    assert (shown.identical, shown.right, shown.interventions) == (True, len(KINDS), 0)
    rows = {row.measure: row for row in benchmark.rows_of([shown])}
    assert all(row.met for row in rows.values() if row.must is not None)
    detected_s = sorted(rows[f"{fault}: fault → detected, median"].ours for fault in KINDS)
    assert detected_s == sorted(row["seconds_to_detect"] for row in answer["faults"])


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(BadUse, match="another folder"):
        Demonstration(out=tmp_path).run(ignored)
    assert (tmp_path / "precious").read_text() == "x"


def test_a_length_without_a_last_checkpoint_is_refused_before_any_work(tmp_path):
    with pytest.raises(BadUse, match="not a multiple of 12"):
        Demonstration(out=tmp_path / "out", steps=205).run(ignored)
    assert not (tmp_path / "out").exists()


def ignored(*_event):
    """Ignore an event of a run."""
