"""The files: AcmeTrace's own forms, the simulators', telemetry."""

import csv
import re
from datetime import datetime

import numpy as np
import pytest

from holdfast.core.errors import BadUse
from holdfast.trace.twin import calibration, draw, export, write_jobs, write_telemetry
from holdfast.trace.twin.telemetry import curves

CURVES = {
    "seren": {
        "GPU_UTIL": "util_gpu_seren__GPU_UTIL_pct",
        "FB_USED": "util_gpu_seren__FB_USED_pct",
        "SM_ACTIVE": "util_gpu_seren__SM_ACTIVE_pct",
        "PIPE_TENSOR_ACTIVE": "util_gpu_seren__TC_ACTIVITY_pct",
        "POWER_USAGE": "gpu_power_seren__GPU_POWER_W",
        "GPU_TEMP": "gpu_temp_seren__GPU_TEMP_C",
        "MEMORY_TEMP": "gpu_temp_seren__MEMORY_TEMP_C",
        "NODE_CPU_UTILIZATION": "util_cpu_mem_seren__CPU_UTIL_pct",
        "NODE_MEMORY_UTILIZATION": "util_cpu_mem_seren__HOST_MEM_pct",
        "NODE_IB_SEND": "ib_seren__IB_SEND",
        "NODE_IB_RECEIVE": "ib_seren__IB_RECEIVE",
        "ipmi/GPU_AB_Power": "server_power__GPU_NODE_POWER_W",
        "ipmi/CPU_D_Power": "server_power__CPU_NODE_POWER_W",
    },
    "kalos": {
        "GPU_UTIL": "util_gpu_kalos_full__GPU_UTIL_pct",
        "FB_USED": "util_gpu_kalos_full__FB_USED_pct",
        "SM_ACTIVE": "util_gpu_kalos_full__SM_ACTIVE_pct",
        "PIPE_TENSOR_ACTIVE": "util_gpu_kalos_full__TC_ACTIVITY_pct",
        "POWER_USAGE": "gpu_power_kalos__GPU_POWER_W",
        "GPU_TEMP": "gpu_temp_kalos__GPU_TEMP_C",
        "MEMORY_TEMP": "gpu_temp_kalos__MEMORY_TEMP_C",
        "NODE_CPU_UTILIZATION": "util_cpu_mem_kalos__CPU_UTIL_pct",
        "NODE_MEMORY_UTILIZATION": "util_cpu_mem_kalos__HOST_MEM_pct",
    },
}


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_wide(path):
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return header, [row[0] for row in rows], np.array([row[1:] for row in rows], dtype=float)


@pytest.fixture(scope="module")
def telemetry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("telemetry")
    for cluster in CURVES:
        write_telemetry(calibration(cluster), folder / cluster, samples=700, seed=4, gpus=60)
    return folder


@pytest.mark.parametrize("cluster", ["seren", "kalos"])
def test_jobs_are_written_as_acmetrace_writes_them(cluster, tmp_path, published):
    jobs = draw(calibration(cluster), 4000, seed=2)
    write_jobs(jobs, tmp_path / "jobs.csv")
    rows = rows_of(tmp_path / "jobs.csv")
    real = published(f"acme_sample_rows/{cluster}_rows.csv")
    assert [*rows[0]] == [*(name for name in real[0] if name != "row_index"), "synthetic"]
    assert {row.pop("synthetic") for row in rows} == {"SYNTHETIC"}
    # Letters and digits stand for themselves, so that each column looks like the released one.
    for name in rows[0]:
        if name in {"job_id", "user"}:
            continue
        forms = [
            {
                re.sub(r"\d+", "9", row[name]) if name not in {"type", "state"} else ""
                for row in some
            }
            for some in (rows, real)
        ]
        # So few jobs hold no RUNNING one, whose end is empty.
        assert forms[0] - {""} == forms[1] - {""}, name
    assert {row["type"] for row in rows} <= {
        "Eval",
        "Pretrain",
        "Debug",
        "Other",
        "SFT",
        "MLLM",
        "CPU",
    }
    assert all(re.fullmatch(r"u[0-9a-f]{4}", row["user"]) for row in rows)
    assert all(
        re.fullmatch(r"\d{7}" if cluster == "seren" else r"dlc[0-9a-z]{13}", row["job_id"])
        for row in rows
    )
    for row in rows:
        submit, start = (
            datetime.fromisoformat(row[name]) for name in ("submit_time", "start_time")
        )
        assert (start - submit).total_seconds() == float(row["queue"])
        assert float(row["gpu_time"]) == float(row["duration"]) * float(row["gpu_num"])
        if row["state"] == "RUNNING":
            assert row["end_time"] == ""
            continue
        end = datetime.fromisoformat(row["end_time"])
        since = submit if cluster == "kalos" else start
        assert (end - since).total_seconds() == float(row["duration"])
        if cluster == "kalos":
            assert (row["fail_time"] != "") == (row["state"] in {"FAILED", "NODE_FAIL"})
            assert (row["stop_time"] != "") == (row["state"] == "CANCELLED")


def test_nothing_is_left_where_a_file_cannot_be_written(tmp_path, monkeypatch):
    jobs = draw(calibration("kalos"), 200)
    (tmp_path / "jobs.csv").write_text("before")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            write_jobs(jobs, tmp_path / "jobs.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.csv"]
    assert (tmp_path / "jobs.csv").read_text() == "before"


@pytest.mark.parametrize("cluster", list(CURVES))
def test_every_telemetry_curve_is_within_a_point_at_every_value(cluster, telemetry, published):
    for name, source in CURVES[cluster].items():
        _, _, values = read_wide(telemetry / cluster / f"{name}.csv")
        own = np.sort(values.ravel())
        own = own / 819.2 if name == "FB_USED" else own
        rows = published(f"acme_util/{source}.csv")
        value = np.array([float(row["value"]) for row in rows])
        percent = np.array([float(row["cdf_pct"]) for row in rows])
        for at in np.unique(value):
            same = percent[value == at]
            below = 100 * np.searchsorted(own, at - 1e-6, side="left") / len(own)
            at_most = 100 * np.searchsorted(own, at + 1e-6, side="right") / len(own)
            assert abs(at_most - same.max()) < 0.3, (name, at)
            assert abs(below - same.min()) < 0.3, (name, at)


@pytest.mark.parametrize("cluster", list(CURVES))
def test_the_metrics_of_a_gpu_move_together_and_in_phases(cluster, telemetry):
    folder = telemetry / cluster
    header, times, use = read_wide(folder / "GPU_UTIL.csv")
    assert header[0] == "Time"
    assert re.fullmatch(r"10\.140\.\d+\.\d+-0", header[1])
    assert len(header) == 1 + 64
    assert times[:2] == ["2023-08-01 00:00:00+08:00", "2023-08-01 00:00:15+08:00"]
    metrics = {
        name: read_wide(folder / f"{name}.csv")[2]
        for name in ("SM_ACTIVE", "POWER_USAGE", "GPU_TEMP", "FB_USED")
    }
    idle = use == 0
    # Idle draws idle power, and only idle does: every idle sample is below every busy one.
    assert metrics["POWER_USAGE"][idle].max() <= metrics["POWER_USAGE"][~idle].min()
    for name, least in (
        ("SM_ACTIVE", 0.9),
        ("POWER_USAGE", 0.85),
        ("GPU_TEMP", 0.8),
        ("FB_USED", 0.75),
    ):
        ranks = [
            np.argsort(np.argsort(values.ravel()))
            for values in (metrics["SM_ACTIVE"], metrics[name])
        ]
        assert np.corrcoef(*ranks)[0, 1] > least, name
    # Phases, not white noise: a sample says nearly all of the next, little of one hours later.
    power = metrics["POWER_USAGE"]
    assert np.corrcoef(power[:-1].ravel(), power[1:].ravel())[0, 1] > 0.95
    used, free = metrics["FB_USED"], read_wide(folder / "FB_FREE.csv")[2]
    assert (used + free == 81248).all()
    for name in ("SM_ACTIVE", "PIPE_TENSOR_ACTIVE", "DRAM_ACTIVE"):
        # Percent with three digits, as released.
        values = read_wide(folder / f"{name}.csv")[2]
        assert values.min() >= 0
        assert 1 < values.max() <= 100
        assert (values == np.round(values, 3)).all()
    xids = read_wide(folder / "XID_ERRORS.csv")[2]
    assert set(np.unique(xids)) <= {0, 31, 43, 45, 94}
    assert (np.diff((xids > 0).astype(int), axis=0) >= 0).all()


def test_telemetry_is_the_same_for_the_same_seed_and_in_blocks(tmp_path, monkeypatch):
    known = calibration("kalos")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_telemetry(known, tmp_path / name, samples=40, seed=seed, gpus=8)
    files = [(tmp_path / name / "POWER_USAGE.csv").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    monkeypatch.setattr("holdfast.trace.twin.telemetry._BLOCK_VALUES", 160)
    write_telemetry(known, tmp_path / "d", samples=45, seed=1, gpus=8)
    _, times, values = read_wide(tmp_path / "d" / "POWER_USAGE.csv")
    assert values.shape == (45, 8)
    assert len(set(times)) == 45


def test_other_months_are_cooler_than_august(tmp_path):
    known = calibration("seren")
    for month in ("2023-08", "2023-03"):
        write_telemetry(known, tmp_path / month, samples=20, start=f"{month}-10 00:00:00")
    summer, spring = (
        read_wide(tmp_path / month / "GPU_TEMP.csv")[2] for month in ("2023-08", "2023-03")
    )
    assert 2 <= np.median(summer) - np.median(spring) <= 6


def test_bad_telemetry_is_refused(tmp_path):
    with pytest.raises(BadUse, match="Give 1 or more of each"):
        write_telemetry(calibration("kalos"), tmp_path, samples=0)
    with pytest.raises(BadUse, match="Write it like"):
        write_telemetry(calibration("kalos"), tmp_path, samples=1, start="yesterday")
    with pytest.raises(BadUse, match="no telemetry of 'philly'"):
        curves("philly")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def some():
    return draw(calibration("kalos"), 3000, seed=1)


def test_sia_form(some, tmp_path, published):
    export(some.columns(), tmp_path / "x.csv", "sia", zone=some.zone)
    rows = rows_of(tmp_path / "x.csv")
    assert list(rows[0]) == list(published("philly_sia/philly.csv")[0])
    assert len(rows) == ((some.gpu_num > 0) & (some.run_s > 0)).sum()
    row = rows[0]
    assert float(row["gpu_time"]) == float(row["duration"]) * int(row["num_gpus"])
    datetime.fromisoformat(row["timestamp"])


def test_helios_form(some, tmp_path, published):
    export(some.columns(), tmp_path / "x.csv", "helios", name="Kalos")
    rows = rows_of(tmp_path / "x.csv")
    assert list(rows[0]) == [
        name for name in published("acme_sample_rows/helios_rows.csv")[0] if name != "row_index"
    ]
    assert len(rows) == 3000
    for row in rows[:50]:
        start, end = (datetime.fromisoformat(row[name]) for name in ("start_time", "end_time"))
        assert (end - start).total_seconds() == int(row["duration"])


def test_tethys_form_and_tiresias_form(some, tmp_path, published):
    export(some.columns(), tmp_path / "x.csv", "tethys")
    rows = rows_of(tmp_path / "x.csv")
    real = published("acme_kalos_converted/converted_kalos_trace.csv")
    assert list(rows[0]) == list(real[0])
    gpu = (some.gpu_num > 0) & (some.run_s > 0)
    gpus = [float(row["gpu_workers"]) * float(row["gpu_per_worker"]) for row in rows]
    assert gpus == some.gpu_num[gpu].tolist()
    assert [int(row["num_iteration"]) / 2 for row in rows] == some.run_s[gpu].tolist()
    assert {row["profiled_network"] for row in rows} == {row["profiled_network"] for row in real}
    export(some.columns(), tmp_path / "y.csv", "tiresias")
    assert [int(row["num_gpu"]) for row in rows_of(tmp_path / "y.csv")] == some.gpu_num[
        gpu
    ].tolist()


def test_standard_workload_format(some, tmp_path):
    export(some.columns(), tmp_path / "x.swf", "swf", name="Kalos")
    lines = (tmp_path / "x.swf").read_text().splitlines()
    comments = [line for line in lines if line.startswith(";")]
    assert "; Version: 2.2" in comments
    table = np.array([line.split() for line in lines[len(comments) :]], dtype=int)
    assert table.shape == ((some.gpu_num > 0).sum(), 18)
    gpu = some.gpu_num > 0
    assert (table[:, 0] == np.arange(1, len(table) + 1)).all()
    assert (table[:, 2] == some.queue_s[gpu]).all()
    assert (table[:, 3] == some.run_s[gpu]).all()
    assert (table[:, 4] == some.gpu_num[gpu]).all()
    assert ((table[:, 10] == 1) == (some.state[gpu] == "COMPLETED")).all()


def test_an_export_needs_its_columns_and_a_known_format(some, tmp_path):
    with pytest.raises(BadUse, match="Choose one of sia, helios, tiresias, tethys, swf"):
        export(some.columns(), tmp_path / "x", "csv")
    with pytest.raises(BadUse, match="no column 'gpu_num'"):
        export(
            {"submit_s": some.submit_s, "queue_s": some.queue_s, "duration_s": some.run_s},
            tmp_path / "x",
            "swf",
        )
    least = {
        "submit_s": np.array([10, 5]),
        "queue_s": np.array([0, 0]),
        "duration_s": np.array([3, 4]),
        "gpu_num": np.array([1, 2]),
    }
    for name in ("sia", "helios", "tiresias", "tethys", "swf"):
        export(least, tmp_path / name, name)
    assert (tmp_path / "tiresias").read_text().splitlines()[1].startswith("1,2,0,")


@pytest.mark.parametrize("form", ["sia", "helios", "tiresias", "tethys", "swf"])
def test_jobs_of_which_a_time_is_unknown_are_left_out(tmp_path, form):
    numbers = {"submit_s": 10.0, "queue_s": 1.0, "duration_s": 3.0, "gpu_num": 1.0}
    jobs = {column: np.full(5, value) for column, value in numbers.items()}
    for row, column in enumerate(numbers):
        jobs[column][row] = np.nan
    assert export(jobs, tmp_path / "out", form) == 1
    lines = [
        line for line in (tmp_path / "out").read_text().splitlines() if not line.startswith(";")
    ]
    assert len(lines) == (1 if form == "swf" else 2)
    with pytest.raises(BadUse, match="None of 4 jobs has all of submit_s"):
        export({column: values[:4] for column, values in jobs.items()}, tmp_path / "other", form)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
