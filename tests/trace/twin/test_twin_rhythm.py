"""The twin in time: order, bursts, retries, drift, and queues that follow the load."""

from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest

from holdfast.trace.twin import calibration, draw
from holdfast.trace.twin.drawing import dealt_queues
from holdfast.trace.twin.placing import Demand, placed
from holdfast.trace.twin.rhythm import KALOS_PRETRAIN
from holdfast.trace.twin.sessions import anchored, lagged, order_statistics, retried
from holdfast.trace.twin.telemetry import xid_onsets

RETRY_WITHIN_S = 1800


@pytest.fixture(scope="module")
def real(published):
    """Statistics of the 183 completed pretraining jobs of Kalos in the order of their arrival, from the file."""
    rows = published("acme_kalos_converted/kalos_completed_pretrain_other_sft.csv")
    assert len(rows) == 319
    assert {row["state"] for row in rows} == {"COMPLETED"}
    columns = {
        name: np.array([float(row[name]) for row in rows if row["type"] == "Pretrain"])
        for name in ("arrival_s", "gpu_num", "duration_s")
    }
    order = np.argsort(columns["arrival_s"], kind="stable")
    assert len(order) == 183
    return order_statistics(
        columns["gpu_num"][order], columns["duration_s"][order], columns["arrival_s"][order]
    )


def test_the_constants_are_those_of_the_file(real):
    assert real == pytest.approx(KALOS_PRETRAIN, rel=0.002)


def test_completed_pretraining_follows_itself_as_the_real_jobs_do(kalos, real):
    own = (kalos.type == "Pretrain") & (kalos.state == "COMPLETED")
    found = order_statistics(kalos.gpu_num[own], kalos.duration_s[own], kalos.submit_s[own])
    assert found == pytest.approx(real, rel=0.15)


def test_a_batch_with_a_quota_keeps_its_turn_where_another_moves():
    hour = 3600
    crowd = Demand(
        batches=np.array([0, 1, 2]), gpu_nums=np.array([8, 8, 8]), begins_s=np.array([0, 0, 0]),
        ends_s=np.array([11, 1, 2]) * hour,
    )  # fmt: skip
    wanted_s, turns = np.array([4.0, 12.0, 5.0]) * hour, {}
    for reserved in (frozenset(), frozenset({1, 2})):
        turns[reserved] = placed(
            crowd, wanted_s=wanted_s, latest_s=np.full(3, 72.0 * hour), fixed={0: 4 * hour}, reserved=reserved,
            capacity_gpus=8, may_exceed_window=True, rng=np.random.default_rng(1),
        )  # fmt: skip
    without, in_turn = turns.values()
    assert without[2] < 4 * hour
    assert 15 * hour <= in_turn[2] < in_turn[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 7, 8])
def test_other_seeds_follow_themselves_as_the_real_jobs_do(real, seed):
    test_completed_pretraining_follows_itself_as_the_real_jobs_do(
        draw(calibration("kalos"), seed=seed), real
    )


def test_a_service_says_something_of_the_next_and_of_the_twentieth(kalos):
    own = (kalos.gpu_num > 0) & (kalos.state == "COMPLETED")
    for service_s in (kalos.run_s, kalos.duration_s):
        log_service = np.log(np.maximum(service_s[own], 1))
        assert lagged(log_service) == pytest.approx(0.69, rel=0.25)
        assert lagged(log_service, 20) == pytest.approx(0.42, rel=0.25)


def test_failures_are_tried_again_by_the_same_user_with_the_same_gpus(kalos):
    """Outside evaluation, whose batches fail in part."""
    failed = np.flatnonzero(
        (kalos.gpu_num > 0)
        & np.isin(kalos.state, ["FAILED", "NODE_FAIL"])
        & (kalos.type != "Evaluation")
    )
    again = 0
    for job in failed.tolist():
        since_s = kalos.submit_s - kalos.end_s[job]
        soon = (since_s >= 0) & (since_s <= RETRY_WITHIN_S)
        soon &= (kalos.user == kalos.user[job]) & (kalos.gpu_num == kalos.gpu_num[job])
        again += bool(soon.any())
    assert 0.25 < again / len(failed) < 0.7


def test_evaluations_wait_longer_while_the_cluster_is_full(kalos):
    gpu = kalos.gpu_num > 0
    waiting = np.flatnonzero(kalos.type == "Evaluation")
    starts, ends = (
        np.argsort(column[gpu], kind="stable") for column in (kalos.start_s, kalos.end_s)
    )
    held = np.zeros(len(waiting))
    for order, column, sign in ((starts, kalos.start_s, 1), (ends, kalos.end_s, -1)):
        sums = np.concatenate([[0], np.cumsum(kalos.gpu_num[gpu][order])])
        before = np.searchsorted(column[gpu][order], kalos.submit_s[waiting], side="right")
        held += sign * sums[before]
    queues = kalos.queue_s[waiting]
    fuller = held > np.median(held)
    assert np.median(queues[fuller]) > 3 * np.median(queues[~fuller])


def test_the_longest_waits_go_to_the_highest_load_and_fit_under_their_ceilings():
    rng = np.random.default_rng(1)
    load, ceiling = rng.permutation(500).astype(float), np.full(500, 10_000)
    ceiling[load > 400] = 5
    queues = np.concatenate([np.full(120, 3), np.arange(380) + 10])
    dealt = dealt_queues(
        rng.permutation(queues), np.zeros(500, dtype=np.int64), np.arange(500), np.zeros(500, dtype=np.int64),
        ceiling, rng, load=load,
    )  # fmt: skip
    assert sorted(dealt) == sorted(queues)
    assert (dealt <= ceiling).all()
    free = load <= 400
    assert np.corrcoef(load[free], dealt[free])[0, 1] > 0.7


def test_a_retry_comes_its_pause_after_the_failure_and_a_chain_of_them_follows_on():
    moments = np.array([0.0, 10.0, 20.0, 5000.0])
    ends = np.array([100, 200, 300, 1])
    retries, pauses = np.array([False, True, True, False]), np.array([9.0, 60.0, 30.0, 9.0])
    assert retried(moments, ends, retries, pauses).tolist() == [0.0, 160.0, 390.0, 5000.0]


def test_an_anchor_fixes_how_many_jobs_have_come_and_keeps_the_order():
    rng = np.random.default_rng(3)
    parts = np.cumsum(rng.exponential(size=200))
    parts /= parts[-1] + 1
    come = np.cumsum(np.full(200, 1 / 200))
    moved = anchored(parts, come, 0.1)
    assert (np.diff(moved) > 0).all()
    assert come[moved <= 0.1].max() == pytest.approx(0.1, abs=0.006)
    assert (anchored(parts, come, 0.0) == parts).all()


def test_a_batch_without_room_moves_to_the_same_hour_of_another_day():
    hour = 3600
    full = Demand(
        batches=np.array([0, 1]), gpu_nums=np.array([8, 8]), begins_s=np.array([0, 0]),
        ends_s=np.array([11 * hour, hour]),
    )  # fmt: skip
    starts = placed(
        full, wanted_s=np.array([4.0, 12.0]) * hour, latest_s=np.full(2, 72.0 * hour), fixed={0: 4 * hour},
        capacity_gpus=8, may_exceed_window=True, rng=np.random.default_rng(1),
    )  # fmt: skip
    assert 15 * hour < starts[1] < 17 * hour
    longer = replace(full, ends_s=np.array([24 * hour, hour]))
    starts = placed(
        longer, wanted_s=np.array([4.0, 14.0]) * hour, latest_s=np.full(2, 72.0 * hour), fixed={0: 4 * hour},
        capacity_gpus=8, may_exceed_window=True, rng=np.random.default_rng(1),
    )  # fmt: skip
    assert starts[1] == 38 * hour


@pytest.mark.slow
def test_the_first_tenth_of_seren_is_mostly_fine_tuning(seren):
    gpu = seren.type[seren.gpu_num > 0]
    first = gpu[: len(gpu) // 10]
    assert (first == "SFT").sum() == pytest.approx(25_781, rel=0.25)
    assert (first == "Evaluation").sum() == pytest.approx(2_965, rel=0.25)
    assert (gpu == "Evaluation").mean() > 0.6


def test_the_drift_of_seren_puts_the_published_parts_into_its_first_tenth():
    known = calibration("seren")
    jobs = known.cells.sum(axis=(1, 2))
    first = dict(zip(known.types, jobs * (1 / 6) ** known.rhythm.drift, strict=True))
    assert first["SFT"] == pytest.approx(25_781)
    assert first["Evaluation"] == pytest.approx(2_965)
    assert sum(first.values()) - first["CPU"] == pytest.approx(45_059)


def events(seconds, pause_s=300):
    """Onsets of each event: those without a pause."""
    ordered = np.sort(seconds)
    return np.diff(np.flatnonzero([True, *(np.diff(ordered) > pause_s), True]))


def test_xids_come_in_bursts_with_the_rate_and_the_codes_of_kalos(published):
    rows = published("acme_kalos_xid/xid_onsets.csv")
    real_s = np.array([datetime.fromisoformat(row["t"]).timestamp() for row in rows])
    real = events(real_s)
    drawn = [
        xid_onsets(2344, int(376.5 * 3600 / 15), np.random.default_rng(seed)) for seed in range(20)
    ]
    assert np.mean([len(some) for some in drawn]) == pytest.approx(len(rows), rel=0.25)
    ours = [events(np.array([15 * sample for sample, _, _ in some])) for some in drawn]
    assert np.mean([len(some) for some in ours]) == pytest.approx(len(real), rel=0.25)
    for sizes in (real, np.concatenate(ours)):
        # Nearly all onsets come 50 or more at once.
        assert sizes[sizes >= 50].sum() > 0.9 * sizes.sum()
    large = np.concatenate(ours)
    assert large[large >= 50].mean() == pytest.approx(real[real >= 50].mean(), rel=0.2)
    codes = [code for some in drawn for _, _, code in some]
    for code in (43, 31):
        part = np.mean([row["code"] == str(code) for row in rows])
        assert np.mean(np.array(codes) == code) == pytest.approx(part, abs=0.02)
