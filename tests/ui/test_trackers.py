"""The export of a run, read back by the trackers themselves, each in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sample_runs

from holdfast.core.accounting import summarize
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.telemetry import read_steps
from holdfast.ui import curves_of, export

TRACKERS = Path(__file__).parents[2] / ".venv" / "trackers"
installed = pytest.mark.skipif(
    not (TRACKERS / "tensorboard").exists(),
    reason="the trackers of tests/trackers.txt are not installed in .venv/trackers: make .venv/.trackers",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("trackers")
    with sample_runs.open_home(home) as ledger:
        sample_runs.faulty_run(ledger, home)
    return home


@pytest.fixture(scope="module")
def curves(home):
    with Ledger.open(ledger_url(home)) as ledger:
        return curves_of(ledger, home, "demo-1")


def program(*arguments, home, **variables):
    paths = os.pathsep.join([str(TRACKERS), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "HOLDFAST_HOME": str(home), "PYTHONPATH": paths, **variables}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=env
    )


def exported(tracker, folder, home, **variables):
    """Export by the command line, and return the JSON answer."""
    done = program(
        "-m", "holdfast.cli.main", "runs", "export", "demo-1", "--to", tracker, "-o", str(folder), "--json",
        home=home, **variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def read_back(script, *arguments, home, **variables):
    done = program("-c", script, *map(str, arguments), home=home, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_step_appears_once_as_it_was_last_made(curves, home):
    with Ledger.open(ledger_url(home)) as ledger:
        surviving = summarize(ledger, home, "demo-1").loss
    assert [one.step for one in curves.points] == list(range(1, 401)), "each step once"
    assert [one.values["loss"] for one in curves.points] == [
        one.value for one in surviving.surviving
    ]
    found = [
        (one.step, one.values["val_loss"]) for one in curves.points if "val_loss" in one.values
    ]
    assert found == [(one.step, one.value) for one in surviving.validation]
    at = {one.step: one.values for one in curves.points}
    assert [at[step]["holdfast/attempt"] for step in (80, 81, 180, 181, 280, 281)] == [
        1,
        2,
        2,
        3,
        3,
        4,
    ]
    assert [at[step]["holdfast/incidents"] for step in (80, 81, 400)] == [0, 1, 3]
    assert [step for step, _, _ in curves.incidents] == [93, 187, 312]


def test_rolled_back_steps_are_left_out_and_the_last_steps_before_a_failure_are_not(tmp_path):
    with sample_runs.open_home(tmp_path) as ledger:
        job = sample_runs.Scribe(ledger, tmp_path, "run-1")
        found = sample_runs.diagnosis("Killed", "killed", [])
        job.begin()
        job.train(93)
        job.fail("exit", 1, 0.1, found, "restart", "Restarted.")
        job.begin(80)
        job.train(85)
        job.fail("exit", 1, 0.1, found, "stop", "Stopped.")
        job.end("failed", 1, "Failed.")
        points = curves_of(ledger, tmp_path, "run-1").points
    assert [one.step for one in points] == list(range(1, 86))
    assert [one.step for one in points if one.values["holdfast/attempt"] == 2] == [
        81,
        82,
        83,
        84,
        85,
    ]


def test_two_records_of_a_step_become_one(home, tmp_path):
    copy = Path(shutil.copytree(home, tmp_path / "home"))
    path = RunPaths(copy, "demo-1").steps
    lines = path.read_bytes().splitlines(keepends=True)
    last = json.loads(lines[-1])
    lines.append(json.dumps({**last, "loss": None, "metrics": {"val_loss": 1.5}}).encode() + b"\n")
    path.write_bytes(b"".join(lines))
    assert len(list(read_steps(path))) == len(lines)
    with Ledger.open(ledger_url(copy)) as ledger:
        point = curves_of(ledger, copy, "demo-1").points[-1]
    assert (point.step, point.values["loss"]) == (last["step"], last["loss"])
    assert point.values["val_loss"] == 1.5


def test_a_run_without_steps_here_names_the_host_that_has_them(home, tmp_path):
    copy = Path(shutil.copytree(home, tmp_path / "home"))
    RunPaths(copy, "demo-1").steps.unlink()
    with Ledger.open(ledger_url(copy)) as ledger, pytest.raises(BadUse, match="node-17"):
        curves_of(ledger, copy, "demo-1")


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_with_the_command(
    curves, tmp_path, tracker, monkeypatch
):
    monkeypatch.setitem(sys.modules, tracker, None)
    monkeypatch.setenv("TRACKIO_DIR", "")
    with pytest.raises(HoldfastError, match=f"pip install {tracker}"):
        export(curves, tracker, tmp_path)


TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
found.Reload()
scalars = {tag: [(one.step, one.wall_time, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
texts = [(one.step, one.tensor_proto.string_val[0].decode()) for one in found.Tensors("holdfast/incident")]
print(json.dumps({"scalars": scalars, "texts": texts}))
"""


@installed
def test_tensorboard_reads_the_curves_and_the_incidents(curves, home, tmp_path):
    folder = tmp_path / "tb"
    (folder / ".demo-1.partial").mkdir(parents=True)
    (folder / ".demo-1.partial" / "events.out.tfevents.1").write_bytes(
        b"of an export that was killed"
    )
    said = exported("tensorboard", folder, home)
    assert (said["schema"], said["steps"]) == ("holdfast.curves", 400)
    assert [one.name for one in folder.iterdir()] == ["demo-1"]
    assert len(list((folder / "demo-1").iterdir())) == 1
    found = read_back(TENSORBOARD, folder / "demo-1", home=home)
    loss = [(one.step, one.at_s, pytest.approx(one.values["loss"])) for one in curves.points]
    assert [tuple(one) for one in found["scalars"]["loss"]] == loss
    assert len(found["scalars"]["val_loss"]) == 8
    assert [step for step, _ in found["texts"]] == [93, 187, 312]
    assert "killed from outside" in found["texts"][0][1]
    again = program(
        "-m", "holdfast.cli.main", "runs", "export", "demo-1", "--to", "tensorboard", "-o", str(folder), home=home
    )  # fmt: skip
    assert again.returncode == 2
    assert "--output" in again.stderr


WANDB = """
import json, struct, sys
from wandb.proto.wandb_internal_pb2 import Record
# The file is LevelDB's log after a header of 7 bytes: blocks of 32 kB; crc, length and kind before each piece.
data, at, whole, rows, names = open(sys.argv[1], "rb").read(), 7, b"", [], []
while at + 7 <= len(data):
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    _, size, kind = struct.unpack_from("<IHB", data, at)
    whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):
        record = Record.FromString(whole)
        if record.HasField("history"):
            items = record.history.item
            rows.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
        if record.HasField("run"):
            keys = sorted(one.key or one.nested_key[0] for one in record.run.config.update)
            names.append([record.run.project, record.run.display_name, keys])
print(json.dumps({"rows": rows, "names": names}))
"""


@installed
def test_wandb_holds_the_curves_offline(curves, home, tmp_path):
    said = exported("wandb", tmp_path / "wb", home, WANDB_MODE="offline", WANDB_PROJECT="mine")
    assert "wandb sync" in said["outcome"]
    (path,) = (tmp_path / "wb").glob("wandb/offline-run-*/*.wandb")
    found = read_back(WANDB, path, home=home)
    assert found["names"][0][:2] == ["mine", "demo-1"]
    assert {"ettr", "incidents", "command"} <= set(found["names"][0][2])
    assert [one["_step"] for one in found["rows"]] == [one.step for one in curves.points]
    assert [one["loss"] for one in found["rows"]] == [one.values["loss"] for one in curves.points]


@installed
def test_wandb_without_a_login_is_refused_with_the_next_step(home, tmp_path):
    done = program(
        "-m", "holdfast.cli.main", "runs", "export", "demo-1", "--to", "wandb", "-o", str(tmp_path), home=home,
        HOME=str(tmp_path), WANDB_API_KEY="", NETRC=str(tmp_path / "none"), WANDB_MODE="online",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "wandb login" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps(SQLiteStorage.get_logs("holdfast", "demo-1")))
"""


@installed
def test_trackio_reads_the_curves(curves, home, tmp_path):
    folder = tmp_path / "tr"
    said = exported("trackio", folder, home)
    assert "trackio show" in said["outcome"]
    rows = read_back(TRACKIO, home=home, TRACKIO_DIR=str(folder))
    assert [one["step"] for one in rows] == [one.step for one in curves.points]
    assert [one["loss"] for one in rows] == [one.values["loss"] for one in curves.points]
