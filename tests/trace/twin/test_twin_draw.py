"""Check that a draw of any size is deterministic, scaled, and within the cluster."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import BadUse
from holdfast.trace.twin import calibration, draw, write_jobs
from holdfast.trace.twin.bins import bin_of


def binned(jobs):
    """Jobs by type, GPUs and bin of duration together, and by type and bin of queue."""
    durations, queues = bin_of(jobs.duration_s).tolist(), bin_of(jobs.queue_s).tolist()
    types = jobs.type.tolist()
    return (
        Counter(zip(types, jobs.gpu_num.tolist(), durations, strict=True)),
        Counter(zip(types, queues, strict=True)),
        Counter(jobs.state[jobs.gpu_num > 0].tolist()),
    )


@pytest.mark.parametrize("cluster", ["seren", "kalos"])
def test_the_same_seed_gives_the_same_bytes_and_another_other_rows_with_the_same_counts(
    cluster, tmp_path
):
    drawn = [draw(calibration(cluster), 3000, seed=seed) for seed in (7, 7, 8)]
    files = [tmp_path / f"{number}.csv" for number in range(3)]
    for jobs, file in zip(drawn, files, strict=True):
        write_jobs(jobs, file)
    first, again, other = (file.read_bytes() for file in files)
    assert first == again
    assert len(set(first.split(b"\n")) & set(other.split(b"\n"))) <= 2  # the header and the end
    assert binned(drawn[0]) == binned(drawn[2])


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(1, 6000), seed=st.integers(0, 2**32), cluster=st.sampled_from(["seren", "kalos"])
)
def test_every_size_scales_the_counts_and_stays_within_the_cluster(n, seed, cluster):
    known = calibration(cluster)
    jobs = draw(known, n, seed=seed)
    assert len(jobs) == n
    for number, name in enumerate(known.types):
        own = jobs.type == name
        of_type = known.cells[number].sum() * n / known.jobs
        assert abs(own.sum() - of_type) < 1.001
        for values, cells in (
            (jobs.duration_s, known.cells[number].sum(axis=0)),
            (jobs.queue_s, known.queue_cells[number]),
        ):
            curve = np.cumsum(np.bincount(bin_of(values[own]), minlength=len(cells)))
            assert np.abs(curve - np.cumsum(cells) * n / known.jobs).max() < 2.001
    by_gpus = np.array([(jobs.gpu_num <= value).sum() for value in known.gpu_nums])
    assert np.abs(by_gpus - np.cumsum(known.cells.sum(axis=(0, 2))) * n / known.jobs).max() < 3
    assert jobs.peak_gpus <= known.capacity_gpus
    assert (jobs.queue_s >= 0).all()
    assert (jobs.run_s >= 0).all()
    assert (np.diff(jobs.submit_s) >= 0).all()
    assert len(np.unique(jobs.job_id)) == n


def test_more_jobs_than_the_trace_had_take_longer_not_more_gpus():
    known = calibration("kalos")
    jobs = draw(known, 2 * known.jobs)
    assert jobs.peak_gpus <= known.capacity_gpus
    assert jobs.gpu_time_s.sum() == pytest.approx(2 * known.gpu_time_s, rel=0.01)
    assert jobs.submit_s[-1] - jobs.submit_s[0] == pytest.approx(2 * known.window_s, rel=0.05)


def test_bad_sizes_and_clusters_are_refused_with_a_next_step():
    with pytest.raises(BadUse, match="Give 1 or more"):
        draw(calibration("kalos"), 0)
    with pytest.raises(BadUse, match="one of seren, kalos"):
        calibration("philly")


def test_columns_count_durations_from_the_start():
    jobs = draw(calibration("kalos"), 500)
    columns = jobs.columns()
    assert (columns["duration_s"] == jobs.end_s - jobs.start_s).all()
    assert {len(column) for column in columns.values()} == {500}
