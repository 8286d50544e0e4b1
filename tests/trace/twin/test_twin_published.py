"""Compare the full-size twins' jobs with the published counts of the traces."""

import numpy as np
import pytest

NAMES = {"seren": "Seren", "kalos": "Kalos"}
CLUSTERS = ["kalos", pytest.param("seren", marks=pytest.mark.slow)]
CURVES = "acme_figure_curves"


@pytest.fixture(params=CLUSTERS)
def twin(request):
    return request.getfixturevalue(request.param)


def of_type(twin, name):
    if name == "ALL_GPU":
        return twin.gpu_num > 0
    return twin.gpu_num == 0 if name == "ALL_CPU" else twin.type == name


def test_every_published_count_of_durations_and_queues_is_met_exactly(twin, published):
    rows = [
        row
        for row in published(f"{CURVES}/exact_log2_cumulative_counts.csv")
        if row["cluster"] == NAMES[twin.cluster]
    ]
    wrong = []
    for row in rows:
        values = {"duration_s": twin.duration_s, "queue_s": twin.queue_s}[row["metric"]]
        own = values[of_type(twin, row["type"])]
        if (count := int((own <= int(row["x_le"])).sum())) != int(row["cum_count"]) or len(
            own
        ) != int(row["n_total"]):
            wrong.append((row, count))
    assert len(rows) >= 190
    assert not wrong


def test_the_jobs_by_gpu_count_are_met_exactly(twin, published):
    rows = [
        row
        for row in published(f"{CURVES}/exact_gpu_num_cumulative_jobs.csv")
        if row["cluster"] == NAMES[twin.cluster]
    ]
    own = twin.gpu_num[twin.gpu_num > 0]
    assert {int(row["gpu_num_le"]): int((own <= int(row["gpu_num_le"])).sum()) for row in rows} == {
        int(row["gpu_num_le"]): int(row["cum_jobs"]) for row in rows
    }


def test_gpu_time_by_gpu_count_is_within_a_tenth_of_a_point(twin, published):
    rows = [
        row
        for row in published(f"{CURVES}/gpu_num_cumulative_gpu_time_pct.csv")
        if row["cluster"] == NAMES[twin.cluster]
    ]
    time = twin.gpu_num * twin.duration_s
    for row in rows:
        own = 100 * time[twin.gpu_num <= float(row["gpu_num_le"])].sum() / time.sum()
        assert own == pytest.approx(float(row["cum_gpu_time_pct"]), abs=0.1), row


def test_gpu_time_by_type_is_within_a_tenth_of_a_point(twin, published):
    rows = [
        row
        for row in published(f"{CURVES}/fig4_treemap_shares.csv")
        if row["cluster"] == NAMES[twin.cluster]
    ]
    time = twin.gpu_num * twin.duration_s
    assert time.sum() == twin.gpu_time_s.sum()
    for row in rows:
        own = twin.type == row["type"]
        assert 100 * time[own].sum() / time.sum() == pytest.approx(
            float(row["gpu_time_pct"]), abs=0.11
        ), row
        assert 100 * own.sum() / (twin.gpu_num > 0).sum() == pytest.approx(
            float(row["job_count_pct"]), abs=0.06
        ), row


def test_the_boxes_of_figure_5_are_met_exactly(twin, published):
    for row in published(f"{CURVES}/fig5_box_gpu_num.csv"):
        if row["cluster"] != NAMES[twin.cluster]:
            continue
        own = twin.gpu_num[twin.type == row["type"]]
        q1, median, q3 = np.percentile(own, [25, 50, 75])
        reach = 1.5 * (q3 - q1)
        box = [own[own >= q1 - reach].min(), q1, median, q3, own[own <= q3 + reach].max()]
        names = ("whisker_low", "q1", "median", "q3", "whisker_high")
        assert box == [float(row[name]) for name in names], row


def test_states_by_jobs_and_by_gpu_time_are_within_a_point(twin, published):
    (row,) = [
        r
        for r in published("acme_cluster_summary/cluster_summary.csv")
        if r["id"] == NAMES[twin.cluster]
    ]
    gpu = twin.gpu_num > 0
    time = twin.gpu_num * twin.duration_s
    states = {
        "complete": twin.state == "COMPLETED",
        "cancel": twin.state == "CANCELLED",
        "fail": np.isin(twin.state, ["FAILED", "TIMEOUT", "NODE_FAIL"]),
    }
    for name, own in states.items():
        assert (own & gpu).sum() / gpu.sum() == pytest.approx(
            float(row[f"{name}_rate_gpu"]), abs=0.002
        )
        assert (own & ~gpu).sum() / (~gpu).sum() == pytest.approx(
            float(row[f"{name}_rate_cpu"]), abs=0.002
        )
        assert time[own].sum() / time.sum() == pytest.approx(
            float(row[f"{name}_rate_gpu_time"]), abs=0.002
        )


def test_the_means_medians_and_maxima_of_kalos(kalos, published):
    (row,) = [
        r for r in published("acme_cluster_summary/cluster_summary.csv") if r["id"] == "Kalos"
    ]
    gpu = kalos.gpu_num > 0
    for kind, own in (("gpu", gpu), ("cpu", ~gpu)):
        for name, values in (("run", kalos.duration_s), ("que", kalos.queue_s)):
            assert values[own].mean() == pytest.approx(
                float(row[f"avg_{name}_time_{kind}"]), rel=0.01
            )
            assert np.median(values[own]) == float(row[f"med_{name}_time_{kind}"])
    assert kalos.gpu_num[gpu].mean() == pytest.approx(float(row["avg_gpu_num"]), rel=0.001)
    assert np.median(kalos.gpu_num[gpu]) == float(row["med_gpu_num"])
    assert kalos.gpu_num.max() == float(row["max_gpu"])
    assert kalos.duration_s[gpu].max() == float(row["max_run_time_gpu"])
    total = sum(float(row[f"{state}_gpu_time"]) for state in ("complete", "cancel", "fail"))
    assert kalos.gpu_time_s.sum() == pytest.approx(total, rel=0.002)


def test_kalos_counts_the_queue_in_its_durations(kalos):
    assert (kalos.queue_s >= 0).all()
    assert (kalos.duration_s >= kalos.queue_s).all()
    assert (kalos.end_s == kalos.submit_s + kalos.duration_s).all()


def test_gpus_held_never_exceed_the_cluster(twin):
    gpu = twin.gpu_num > 0
    ends = zip(twin.end_s[gpu].tolist(), (-twin.gpu_num[gpu]).tolist(), strict=True)
    starts = zip(twin.start_s[gpu].tolist(), twin.gpu_num[gpu].tolist(), strict=True)
    events = sorted([*ends, *starts])
    held = np.cumsum([change for _, change in events])
    assert held.max() == twin.peak_gpus
    assert twin.peak_gpus <= {"seren": 2288, "kalos": 2416}[twin.cluster]


def test_the_stated_dependences(twin):
    gpu = twin.gpu_num > 0
    assert (twin.node_num == np.maximum(np.ceil(twin.gpu_num / 8), 1)).all()
    assert (np.diff(twin.submit_s) >= 0).all()
    evaluation, pretrain = twin.type == "Evaluation", twin.type == "Pretrain"
    # Evaluation asks for least and waits longest.
    waits = {
        name: np.percentile(twin.queue_s[twin.type == name], 75)
        for name in np.unique(twin.type[gpu])
    }
    waits.pop("SFT" if twin.cluster == "kalos" else "", None)  # eight jobs
    assert max(waits, key=waits.get) == "Evaluation"
    assert np.median(twin.gpu_num[evaluation]) == 1
    # It comes in batches of about 60: most of it within a few seconds of another one of the same user.
    together = [
        np.diff(twin.submit_s[evaluation & (twin.user == user)])
        for user in np.unique(twin.user[evaluation])
    ]
    assert (np.concatenate(together) <= 15).mean() > 0.9
    alone = np.diff(twin.submit_s[pretrain])
    assert (alone <= 15).mean() < 0.2
    # A few users submit most; nobody does everything.
    shares = np.sort(np.unique(twin.user[gpu], return_counts=True)[1])[::-1] / gpu.sum()
    assert shares[: max(len(shares) // 20, 1)].sum() > 0.25
    assert len(np.unique(twin.user[pretrain])) <= 14
    # Cancelled jobs are few and hold most of the time; a long run on many GPUs fails more than a short one on few.
    cancelled = twin.state == "CANCELLED"
    assert cancelled[gpu].mean() < 0.1
    assert twin.gpu_time_s[cancelled].sum() > 0.6 * twin.gpu_time_s.sum()
    # Days are busier than nights, weekdays than weekends.
    offset_s = 8 * 3600 if twin.zone == "+08:00" else 0
    hours = (twin.submit_s + offset_s) // 3600
    by_hour = np.bincount(hours % 24, minlength=24)
    assert by_hour[10:18].sum() > 2.5 * by_hour[0:8].sum()
    by_day = np.bincount((hours // 24 + 3) % 7, minlength=7)
    assert by_day[:5].mean() > 1.3 * by_day[5:].mean()


def test_running_jobs_end_with_the_table(kalos):
    running = kalos.state == "RUNNING"
    assert running.sum() == 2
    snapshot = 1692199582  # 2023-08-16 15:26:22 UTC
    assert (kalos.end_s[running] == snapshot).all()
    assert kalos.end_s[~running].max() <= snapshot


def test_no_released_row_is_in_the_twin(kalos, published):
    real = {
        (round(float(row["duration_s"])), int(row["gpu_num"]))
        for row in published("acme_kalos_converted/kalos_completed_pretrain_other_sft.csv")
        if float(row["duration_s"]) > 10_000
    }
    own = kalos.duration_s > 10_000
    drawn = set(zip(kalos.duration_s[own].tolist(), kalos.gpu_num[own].tolist(), strict=True))
    # The longest job's duration is published by itself (cluster_summary.csv).
    assert len({pair for pair in real & drawn if pair[0] != 625740}) <= 2


def test_rare_states_are_as_many_as_in_the_released_first_tenth(seren):
    gpu = seren.gpu_num > 0
    shares = {
        state: ((seren.state == state) & gpu).sum() / gpu.sum()
        for state in ("TIMEOUT", "NODE_FAIL", "PREEMPTED")
    }
    assert shares["TIMEOUT"] == pytest.approx(54 / 45_059, rel=0.05)
    assert shares["NODE_FAIL"] == pytest.approx(44 / 45_059, rel=0.05)
    assert shares["PREEMPTED"] == pytest.approx(1_010 / 450_590, rel=0.05)
