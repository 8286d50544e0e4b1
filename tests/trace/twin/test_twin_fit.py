"""A twin of any trace."""

import numpy as np
import pytest

from holdfast.core.errors import BadUse
from holdfast.trace.twin import draw, fit
from holdfast.trace.twin.bins import bin_of
from holdfast.trace.twin.fitting import _merged


@pytest.fixture(scope="module")
def trace():
    """A small trace of its own making: two types, three users, an outlier, rare GPU counts."""
    rng = np.random.default_rng(0)
    count = 4000
    types = rng.choice(["Pretrain", "Evaluation"], p=[0.1, 0.9], size=count)
    gpus = np.where(
        types == "Pretrain",
        rng.choice([64, 128, 256], size=count),
        rng.choice([0, 1, 2, 8], size=count),
    )
    durations = np.floor(np.exp(rng.normal(np.where(types == "Pretrain", 7.5, 4.5), 1.4)))
    gpus[:3], durations[0] = 77, 4_321_987
    return {
        "submit_s": np.sort(1.7e9 + np.floor(rng.random(count) * 30 * 86400)),
        "queue_s": np.floor(rng.exponential(60, size=count)),
        "duration_s": durations,
        "gpu_num": gpus,
        "type": types,
        "state": rng.choice(["COMPLETED", "FAILED", "CANCELLED"], p=[0.6, 0.3, 0.1], size=count),
        "user": rng.choice(["alice", "bob", "carol"], p=[0.7, 0.2, 0.1], size=count),
        "cpu_num": np.maximum(gpus * 12, 2),
    }


def test_a_fitted_twin_has_the_counts_of_its_trace(trace):
    jobs = draw(fit(trace, capacity_gpus=8192), seed=3)
    assert len(jobs) == len(trace["gpu_num"])
    gpu = trace["gpu_num"] > 0
    for name in ("Pretrain", "Evaluation"):
        own, theirs = jobs.type == name, gpu & (trace["type"] == name)
        assert own.sum() == theirs.sum()
        curves = [
            np.cumsum(np.bincount(bin_of(column), minlength=26))
            for column in (jobs.duration_s[own], trace["duration_s"][theirs])
        ]
        # Merged bins: a few jobs, not more.
        assert np.abs(curves[0] - curves[1]).max() <= 12
        assert np.median(jobs.gpu_num[own]) == np.median(trace["gpu_num"][theirs])
    assert (
        abs(np.median(jobs.duration_s[jobs.gpu_num > 0]) - np.median(trace["duration_s"][gpu])) <= 1
    )
    assert abs(np.median(jobs.queue_s[jobs.gpu_num > 0]) - np.median(trace["queue_s"][gpu])) <= 1
    time = (trace["gpu_num"] * trace["duration_s"])[1:].sum()
    assert jobs.gpu_time_s.sum() > 0.9 * time
    for state in ("COMPLETED", "FAILED", "CANCELLED"):
        assert (jobs.state == state).sum() == pytest.approx((trace["state"] == state).sum(), abs=2)
    users = np.sort(np.unique(jobs.user, return_counts=True)[1] / len(jobs))[::-1]
    assert users == pytest.approx([0.7, 0.2, 0.1], abs=0.05)
    assert set(np.unique(jobs.cpu_num[jobs.gpu_num > 0] / jobs.gpu_num[jobs.gpu_num > 0])) == {12.0}


def test_no_name_and_no_row_goes_into_a_twin(trace):
    known = fit(trace)
    jobs = draw(known)
    assert not {"alice", "bob", "carol"} & set(jobs.user.tolist())
    rows = {
        tuple(row)
        for row in zip(
            *(trace[name].tolist() for name in ("submit_s", "queue_s", "duration_s", "gpu_num")),
            strict=True,
        )
    }
    drawn = set(
        zip(
            *(
                column.tolist()
                for column in (jobs.submit_s, jobs.queue_s, jobs.run_s, jobs.gpu_num)
            ),
            strict=True,
        )
    )
    assert len(rows & drawn) < 3


def test_what_few_jobs_share_is_merged(trace):
    known = fit(trace)
    assert 77 not in known.gpu_nums  # three jobs only
    groups = known.cells.sum(axis=2)
    assert groups[groups > 0].min() >= 5
    # The one long job's bin is not its own any more.
    assert (trace["duration_s"] > 2**20).sum() == 1
    assert known.cells[:, :, bin_of(np.array([4_321_987.0]))[0]].sum() < 1
    assert 4_321_987 not in draw(known).duration_s


def test_bins_of_few_jobs_are_spread_over_their_neighbours():
    counts = np.array([3.0, 0.0, 2.0, 10.0, 0.0, 1.0])
    assert _merged(counts).tolist() == [5 / 3, 5 / 3, 5 / 3, 11 / 3, 11 / 3, 11 / 3]
    assert _merged(np.array([0.0, 2.0, 0.0])).tolist() == [0.0, 2.0, 0.0]


def test_a_rare_type_and_a_rare_state_are_not_kept(trace):
    changed = dict(trace)
    changed["type"] = trace["type"].astype(object)
    changed["type"][10:13] = "Secret"
    changed["state"] = trace["state"].astype(object)
    changed["state"][20:23] = "NODE_FAIL"
    changed["type"][30], changed["user"] = None, None
    known = fit({name: column for name, column in changed.items() if column is not None})
    assert "Secret" not in known.types
    assert "NODE_FAIL" not in known.states


def test_a_small_trace_is_refused(trace):
    small = {name: column[:99] for name, column in trace.items()}
    with pytest.raises(BadUse, match=r"The trace has 99 jobs .* Fit a longer stretch"):
        fit(small)
    with pytest.raises(BadUse, match="no column 'queue_s'"):
        fit({name: column for name, column in trace.items() if name != "queue_s"})


def test_a_crowded_trace_takes_longer_rather_than_more_gpus(trace):
    crowded = dict(trace) | {"submit_s": 1.7e9 + np.arange(4000.0)}
    jobs = draw(fit(crowded, capacity_gpus=300))
    assert jobs.peak_gpus <= 300
    with pytest.raises(BadUse, match="cannot hold the trace's job of 256"):
        fit(trace, capacity_gpus=200)


def test_jobs_that_have_not_ended_are_left_out(trace):
    changed = {name: column.copy() for name, column in trace.items()}
    changed["state"] = changed["state"].astype("U9")
    changed["state"][:10] = "RUNNING"
    changed["duration_s"][10:20] = np.nan
    changed["queue_s"][20:25] = -5
    known = fit(changed)
    assert known.jobs == len(trace["gpu_num"]) - 25
    assert "RUNNING" not in known.states


def test_a_twin_of_real_jobs_of_another_cluster(published):
    rows = published("philly_sia/philly.csv")
    trace = {
        "submit_s": np.array([row["timestamp"] for row in rows], dtype="datetime64[s]").astype(
            float
        ),
        "queue_s": np.zeros(len(rows)),
        "duration_s": np.array([float(row["duration"]) for row in rows]),
        "gpu_num": np.array([int(row["num_gpus"]) for row in rows]),
    }
    known = fit(trace, name="philly")
    jobs = draw(known, seed=1)
    assert jobs.peak_gpus <= known.capacity_gpus
    assert jobs.gpu_time_s.sum() == pytest.approx(
        (trace["gpu_num"] * trace["duration_s"]).sum(), rel=0.01
    )
    assert jobs.duration_s.mean() == pytest.approx(trace["duration_s"].mean(), rel=0.01)
    assert np.median(jobs.duration_s) == np.median(trace["duration_s"])
    for gpus in (1, 2, 4, 8, 16):
        assert (jobs.gpu_num == gpus).sum() == pytest.approx(
            (trace["gpu_num"] == gpus).sum(), abs=30
        )
