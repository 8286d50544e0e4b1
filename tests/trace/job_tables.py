"""Make traces for tests: from data frames, real job records beside the repository, or published
counts.
"""

import tempfile
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest

from holdfast.trace.clusters import Cluster
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.reading import Reading
from holdfast.trace.trace import Trace

DATA = Path(__file__).parents[2] / "../shared/data"


def real(path: str) -> Path:
    """Return the path of a file of real data; skip the test if absent."""
    if not (DATA / path).exists():
        pytest.skip(f"no {path} beside the repository")
    return DATA / path


def trace_of(*frames: pd.DataFrame, duration: str = "run", compared=(), clusters=()) -> Trace:
    """Make a trace whose tables are the frames.

    The columns are names in `JOB_COLUMNS`; `cluster` is the same in all rows of a frame. Missing
    `run_s` and `queue_s` are computed from the times.
    """
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    known = {cluster.name: cluster for cluster in clusters}
    readings = []
    for number, frame in enumerate(frames):
        own = frame.copy()
        for column, ends in (
            ("run_s", ("start_at", "end_at")),
            ("queue_s", ("submit_at", "start_at")),
        ):
            if column not in own and set(ends) <= set(own):
                own[column] = (own[ends[1]] - own[ends[0]]).dt.total_seconds()
        connection.register("frame", own)
        columns = ", ".join(f'"{name}"::{JOB_COLUMNS[name]} AS "{name}"' for name in own.columns)
        connection.execute(f"CREATE TABLE jobs_{number} AS SELECT {columns} FROM frame")
        connection.unregister("frame")
        name = own["cluster"].iloc[0]
        cluster = known.get(name, Cluster(name=name, source="test"))
        readings.append(
            Reading(table=f"jobs_{number}", columns=frozenset(own.columns), clusters=(cluster,))
        )
    return Trace(
        connection,
        Path(tempfile.mkdtemp()),
        readings,
        duration=duration,
        compared=frozenset(compared),
    )


def made_up(seed: int = 0, rows: int = 3000, cluster: str = "Made up") -> pd.DataFrame:
    """Make jobs of every kind: with and without GPUs, types, users and pools, running, pending,
    fractions of GPUs.
    """
    random = np.random.default_rng(seed)
    submit = pd.Timestamp("2023-03-01") + pd.to_timedelta(
        np.sort(random.integers(0, 20 * 86400, rows)), unit="s"
    )
    queue = np.floor(random.lognormal(3, 2, rows)) * (random.random(rows) > 0.3)
    run = np.floor(random.lognormal(5, 2, rows))
    state = random.choice(
        [
            "COMPLETED",
            "CANCELLED",
            "FAILED",
            "TIMEOUT",
            "NODE_FAIL",
            "OUT_OF_MEMORY",
            "PREEMPTED",
            "RUNNING",
            "PENDING",
        ],
        rows,
        p=[0.4, 0.1, 0.3, 0.05, 0.03, 0.02, 0.05, 0.03, 0.02],
    )
    frame = pd.DataFrame(
        {
            "cluster": cluster,
            "job_id": [f"job-{number}" for number in range(rows)],
            "username": random.choice(
                ["ada", "bob", "cyd", "dan", None], rows, p=[0.5, 0.2, 0.15, 0.1, 0.05]
            ),
            "pool": random.choice(["east", "west", "north", None], rows),
            "type": random.choice(
                ["Pretrain", "Evaluation", "SFT", "Other", None],
                rows,
                p=[0.1, 0.5, 0.2, 0.15, 0.05],
            ),
            "state": state,
            "submit_at": submit,
            "start_at": submit + pd.to_timedelta(queue, unit="s"),
            "gpu_num": random.choice(
                [0, 0.25, 0.5, 1, 2, 3, 8, 16, 64], rows, p=[0.2, 0.05, 0.05, *[0.7 / 6] * 6]
            ),
            "cpu_num": random.choice([4.0, 16.0, 128.0], rows),
            "mem_gb": random.choice([32.0, 100.0, np.nan], rows),
        }
    )
    frame["end_at"] = frame["start_at"] + pd.to_timedelta(run, unit="s")
    frame.loc[frame["state"].isin(["RUNNING", "PENDING"]), "end_at"] = pd.NaT
    frame.loc[frame["state"] == "PENDING", "start_at"] = pd.NaT
    return frame


def philly() -> pd.DataFrame:
    """Read 82,247 real jobs of Philly, without start time and state."""
    own = pd.read_csv(real("philly_sia/philly.csv"), dtype={"cluster": str})
    return pd.DataFrame(
        {
            "cluster": "Philly",
            "pool": own["cluster"],
            "submit_at": pd.to_datetime(own["timestamp"]),
            "run_s": own["duration"].astype(float),
            "gpu_num": own["num_gpus"].astype(float),
        }
    )


def openb() -> pd.DataFrame:
    """Read 8,152 real pods of Alibaba's openb, some with a part of a GPU."""
    own = pd.read_csv(real("alibaba_v2023_openb/openb_pod_list_default.csv"))
    start, end = own["scheduled_time"], own["deletion_time"]
    return pd.DataFrame(
        {
            "cluster": "openb",
            "job_id": own["name"],
            "pool": own["qos"],
            "state": own["pod_phase"].map(
                {"Succeeded": "COMPLETED", "Failed": "FAILED", "Running": "RUNNING"}
            ),
            "submit_at": pd.to_datetime(own["creation_time"], unit="s"),
            "start_at": pd.to_datetime(start, unit="s"),
            "end_at": pd.to_datetime(end, unit="s"),
            "gpu_num": np.where(
                own["num_gpu"] == 1, own["gpu_milli"] / 1000, own["num_gpu"]
            ).astype(float),
            "cpu_num": own["cpu_milli"] / 1000,
            "mem_gb": own["memory_mib"] / 1024,
        }
    )


def kalos() -> pd.DataFrame:
    """Read 319 real completed jobs of Kalos, without start time."""
    own = pd.read_csv(real("acme_kalos_converted/kalos_completed_pretrain_other_sft.csv"))
    return pd.DataFrame(
        {
            "cluster": "Kalos",
            "type": own["type"].replace("Other_or_SFT", "Other"),
            "state": own["state"],
            "submit_at": pd.Timestamp("2023-05-17 11:30:13")
            + pd.to_timedelta(own["arrival_s"], unit="s"),
            "run_s": own["duration_s"].astype(float),
            "gpu_num": own["gpu_num"].astype(float),
        }
    )


def published(metric: str) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """Read the published curves of Acme.

    Also make a frame of jobs per cluster that fit the curves' bins.
    """
    curves = pd.read_csv(real("acme_figure_curves/exact_log2_cumulative_counts.csv"))
    curves = curves[(curves["metric"] == metric) & curves["cluster"].isin(["Seren", "Kalos"])]
    frames = {}
    for cluster, known in curves[~curves["type"].str.startswith("ALL")].groupby("cluster"):
        last = known.groupby("type").tail(1)  # The queues' curves end before the last job.
        beyond = last.assign(
            **{"x_le": last["x_le"] * 2, "count_in_(x/2,x]": last["n_total"] - last["cum_count"]}
        )
        rows = pd.concat([known, beyond])
        jobs = rows["count_in_(x/2,x]"].to_numpy(int)
        upper = np.repeat(rows["x_le"].to_numpy(int), jobs)
        # Use whole seconds over each bin; the first bin holds 0 and 1.
        inside = np.arange(len(upper)) % np.where(upper > 1, upper // 2, 2)
        kinds = np.repeat(rows["type"], jobs).to_numpy()
        column = "run_s" if metric == "duration_s" else metric
        frames[cluster] = pd.DataFrame(
            {"cluster": cluster, "type": kinds, "gpu_num": 1.0, column: upper - inside}
        )
    return curves, frames


def gpu_jobs(frame: pd.DataFrame) -> pd.DataFrame:
    """Select the GPU jobs of a frame; compute `run_s`, `queue_s` and `gpu_time_s`."""
    own = frame[frame["gpu_num"] > 0].copy()
    if "run_s" not in own:
        own["run_s"] = (own["end_at"] - own["start_at"]).dt.total_seconds()
    if "queue_s" not in own and "start_at" in own:
        own["queue_s"] = (own["start_at"] - own["submit_at"]).dt.total_seconds()
    own["gpu_time_s"] = own["gpu_num"] * own["run_s"]
    return own


def rows_of(table, **equal):
    """Select the rows whose columns equal the given values, as a data frame."""
    frame = table.df()
    for name, value in equal.items():
        frame = frame[frame[name] == value]
    return frame


def assert_cdf(rows, values, weights, column):
    """Check every row of a CDF's table against the data."""
    values, weights = np.asarray(values, float), np.asarray(weights, float)
    expected = [weights[values <= x].sum() / weights.sum() for x in rows[column]]
    assert rows["share_at_most"].tolist() == pytest.approx(expected, abs=1e-9)
    assert rows[column].iloc[0] == values.min()
    assert rows[column].iloc[-1] == values.max()
