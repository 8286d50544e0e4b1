"""Compare a trace read by many workers with one read by a single process: processes, real Slurm,
real Ray.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from fake_prometheus import Server, serving

from holdfast.cluster import workers
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.testing.slurm import PrivateSlurm
from holdfast.trace import characterize, convert, load, telemetry
from holdfast.trace.analyses.durations import gpu_job_duration
from holdfast.trace.spread import Part, load_spread
from holdfast.trace.twin import calibration, draw, write_jobs, write_telemetry


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Make two files of a twin of Kalos, a store of the same jobs, and telemetry, in a path with
    `=`.
    """
    folder = tmp_path_factory.mktemp("sources") / "cluster=kalos"
    folder.mkdir()
    write_jobs(draw(calibration("kalos"), 500, seed=3), folder / "whole.csv")
    lines = (folder / "whole.csv").read_text().splitlines(keepends=True)
    (folder / "parts").mkdir()
    for number in range(2):
        (folder / "parts" / f"part-{number}.csv").write_text(
            lines[0] + "".join(lines[1 + number :: 2])
        )
    (folder / "parts" / "readme").write_text("Dear diary\n")
    with load(folder / "whole.csv") as trace:
        convert(trace, folder / "store")
    write_telemetry(calibration("kalos"), folder / "telemetry", samples=100, gpus=8)
    for path in (folder / "telemetry").glob("*.csv"):
        if path.stem not in {"GPU_UTIL", "POWER_USAGE"}:
            path.unlink()
    return folder


def same(spread, alone):
    """Return True if two traces have equal aggregates and notes."""
    for name in (
        "job_counts",
        "job_durations",
        "job_queues",
        "job_hours",
        "job_users",
        "metric_values",
        "metric_hours",
    ):
        one, two = (
            trace.query(f"SELECT * FROM {trace.prepare(name)} ORDER BY ALL")
            for trace in (spread, alone)
        )
        assert list(one.columns) == list(two.columns), name
        assert len(one) == len(two) > 0, name
        for column in one.columns:
            if one[column].dtype.kind == "f":
                np.testing.assert_allclose(
                    one[column], two[column], rtol=1e-9, err_msg=f"{name}.{column}"
                )
            else:
                assert one[column].tolist() == two[column].tolist(), (name, column)
    assert spread.metrics == alone.metrics
    assert sorted(spread.clusters) == sorted(alone.clusters)


@pytest.fixture(scope="module")
def alone(sources):
    with load(sources / "whole.csv", metrics=[sources / "telemetry"]) as trace:
        yield trace


@pytest.fixture(scope="module")
def read_parts(sources, alone, tmp_path_factory):
    """Run workers that read the two files and their telemetry; return their results."""
    folder = tmp_path_factory.mktemp("read")
    given = {"metrics": [str(sources / "telemetry")], "folder": folder}
    with load_spread(str(sources / "parts"), workers=workers("local"), **given) as spread:
        same(spread, alone)
    return folder


@pytest.fixture
def own_parts(read_parts, tmp_path):
    """Copy these results to a folder that the test may change."""
    return shutil.copytree(read_parts, tmp_path / "parts")


@pytest.mark.parametrize("jobs", ["parts", "store"])
def test_local_workers_read_files_and_months_of_a_store(sources, alone, read_parts, tmp_path, jobs):
    folder = read_parts if jobs == "parts" else tmp_path
    given = {"metrics": [str(sources / "telemetry")], "folder": folder}
    given |= {"memory_limit_mb": 300} if jobs == "store" else {}
    with load_spread(str(sources / jobs), workers=workers("local"), **given) as spread:
        same(spread, alone)
        passed_over = [note for note in spread.notes if note.check == "files-passed-over"]
        assert [note.examples for note in passed_over] == {"parts": [("readme",)], "store": []}[
            jobs
        ]
        answer = characterize(spread)
        assert sum(entry.result is not None for entry in answer.entries) > 30
        left_out = {
            entry.analysis.name: entry.left_out for entry in answer.entries if entry.left_out
        }
        assert "job_utilisation" in left_out
    parts = {path.name for path in folder.glob("p-*") if path.is_dir()}
    assert len(parts) == {"parts": 2, "store": 4}[jobs] + 2
    # Finished parts are not read again: their results keep their times, and the merged trace is
    # equal.
    before = {path: path.stat().st_mtime_ns for path in folder.glob("p-*/manifest.json")}
    with load_spread(str(sources / jobs), workers=workers("local"), **given) as again:
        same(again, alone)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_store_of_telemetry_is_attached_as_it_is(sources, alone, read_parts, tmp_path):
    telemetry.convert(sources / "telemetry", tmp_path / "telemetry")
    before = sorted(read_parts.glob("p-*"))
    for given in (f"{tmp_path}/telemetry", f"Kalos-SYNTHETIC={tmp_path}/telemetry"):
        with load_spread(
            str(sources / "parts"), metrics=[given], workers=workers("local"), folder=read_parts
        ) as spread:
            same(spread, alone)
        assert sorted(read_parts.glob("p-*")) == before, "no worker read it"


@pytest.fixture(scope="module")
def parts_since(tmp_path_factory):
    """Run workers that read a part of the time; return their results."""
    return tmp_path_factory.mktemp("since")


@pytest.mark.parametrize("prefix", ["", "Kalos-SYNTHETIC="])
def test_a_prometheus_is_asked_over_the_time_of_all_jobs(
    sources, alone, parts_since, tmp_path, monkeypatch, prefix
):
    monkeypatch.chdir(tmp_path)  # a folder with telemetry that is not part of the input
    shutil.copy(sources / "telemetry" / "POWER_USAGE.csv", tmp_path)
    given = {"metrics_step_s": 60.0, "metrics_folder": tmp_path / "fetched", "since": "2023-08-10"}
    server = Server()
    server.only = "DCGM_FI_DEV_GPU_UTIL"
    with (
        serving(server) as url,
        load_spread(
            str(sources / "parts"), metrics=[f"{prefix}{url}/?a=b"], workers=workers("local"),
            folder=parts_since, **given,
        ) as spread,
    ):  # fmt: skip
        assert spread.metrics == {"GPU_UTIL"}
        ((first, last),) = alone.query(
            "SELECT epoch(min(start_at)), epoch(max(end_at)) FROM jobs WHERE submit_at >= '2023-08-10'"
        ).rows()
        (asked_first, asked_last) = (
            min(one[0] for one in server.asked),
            max(one[1] for one in server.asked),
        )
        assert asked_first <= first < asked_first + 60
        assert asked_last - 60 < last <= asked_last
        assert spread.aggregate("metric_values")["n"].sum() == 3 * (
            (asked_last - asked_first) / 60 + 1
        )


def test_a_wrong_place_of_telemetry_is_named(sources, read_parts, tmp_path):
    given = {"workers": workers("local"), "folder": read_parts}
    for wrong, said in (
        ("nowhere", "nowhere"),
        (f"Sern={sources}/telemetry", "Sern="),
        ("Kalos-SYNTHETIC=", "has no value for"),
    ):
        with pytest.raises(BadUse, match=said):
            load_spread(str(sources / "parts"), metrics=[wrong], **given)
    with pytest.raises(BadUse, match="Leave out --on"):
        load_spread(f"sqlite:///{tmp_path}/ledger.db", **given)


def test_a_part_of_another_version_is_read_again(sources, monkeypatch):
    part = Part(jobs=str(sources / "whole.csv"), options={})
    before = part.name
    assert part.name == before
    monkeypatch.setattr("holdfast.trace.aggregates.sql", lambda _: "SELECT 1")
    assert part.name != before


def test_a_part_that_cannot_be_read_is_named_and_the_rest_is_kept(sources, tmp_path):
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "a.csv").write_text((sources / "parts" / "part-0.csv").read_text())
    broken = (sources / "parts" / "part-1.csv").read_text().splitlines()
    (jobs / "b.csv").write_text("\n".join([*broken[:3], broken[3].replace(",", ";"), *broken[4:]]))
    with pytest.raises(HoldfastError, match=r"b\.csv, line 4"):
        load_spread(str(jobs), workers=workers("local", limit=1), folder=tmp_path / "parts")
    (jobs / "b.csv").write_text((sources / "parts" / "part-1.csv").read_text())
    with load_spread(str(jobs), workers=workers("local"), folder=tmp_path / "parts") as trace:
        assert trace.query(f"SELECT sum(n) AS n FROM {trace.prepare('job_counts')}")["n"][0] == 500


def test_a_killed_part_leaves_nothing_half_and_is_read_again(sources, alone, own_parts):
    given = {"metrics": [str(sources / "telemetry")], "folder": own_parts}
    victim = next(path for path in own_parts.glob("p-part-0-*") if path.is_dir())
    for path in sorted(victim.rglob("*"), reverse=True):
        path.unlink()
    victim.rmdir()
    # Killed while writing: renames wait, so the process cannot finish before.
    building = victim.with_name(f".{victim.name}.tmp")
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom holdfast.trace import spread\n"
        "Path.replace = lambda *_: time.sleep(60)\nspread.main(sys.argv[1:])"
    )
    process = subprocess.Popen([sys.executable, "-c", script, victim.with_suffix(".json"), victim])
    while process.poll() is None and not building.exists():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not victim.exists()
    with load_spread(str(sources / "parts"), workers=workers("local"), **given) as trace:
        same(trace, alone)


@pytest.mark.slow
def test_a_slurm_array_reads_the_parts(sources, alone, tmp_path, tmp_path_factory, monkeypatch):
    if reason := PrivateSlurm.missing():
        pytest.skip(reason)
    with PrivateSlurm(tmp_path_factory.mktemp("s"), nodes=2, cpus=1) as slurm:
        for name in ("SLURM_CONF", "PATH"):
            monkeypatch.setenv(name, slurm.environment[name])
        command = [
            "-m",
            "holdfast.cli.main",
            "trace",
            "report",
            str(sources / "parts"),
            "--on",
            "slurm",
        ]
        command += ["--metrics", str(sources / "telemetry"), "--parts", str(tmp_path / "parts")]
        done = subprocess.run(
            [sys.executable, *command, "-o", str(tmp_path / "report"), "--json"],
            capture_output=True, text=True, timeout=240, check=False, env=os.environ,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["page"] == str(tmp_path / "report" / "index.html")
    assert len([path for path in (tmp_path / "parts").glob("p-*") if path.is_dir()]) == 4
    found = json.loads((tmp_path / "report" / "findings.json").read_text())["numbers"]
    expected = gpu_job_duration(alone).numbers
    assert {name: found[name] for name in expected} == pytest.approx(dict(expected))


@pytest.mark.slow
def test_ray_reads_the_parts(sources, alone, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'holdfast[ray]')")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    given = {"metrics": [str(sources / "telemetry")], "folder": tmp_path}
    with load_spread(str(sources / "parts"), workers=workers("ray", limit=2), **given) as spread:
        same(spread, alone)
