"""Check that the findings hold for the study's numbers, fail for their opposites, and name missing
input.
"""

import math

import pytest

from holdfast.trace.findings import MEASURES, ClusterNumbers, claims, findings

SEREN = {
    "gpu_job.median_duration_s": 122.0,
    "gpu_util.polarised_share": 0.94,
    "gpu_util.median_pct": 97.0,
    "gpu_job.share_of_jobs_at_most_1_gpu": 0.540,
    "gpu_job.share_of_gpu_time_at_most_1_gpu": 0.017,
    "gpu_job.share_of_gpu_time_from_256_gpus": 0.564,
    "evaluation.share_of_jobs": 0.649,
    "sft.share_of_jobs": 0.149,
    "pretrain.share_of_jobs": 0.009,
    "evaluation.share_of_gpu_time": 0.062,
    "mllm.share_of_gpu_time": 0.086,
    "pretrain.share_of_gpu_time": 0.695,
    "pretrain.median_duration_s": 400.0,
    "other.median_duration_s": 90.0,
    "evaluation.median_duration_s": 140.0,
    "evaluation.median_queue_s": 2.0,
    "pretrain.median_queue_s": 1.0,
    "evaluation.median_gpu_num": 1.0,
    "pretrain.median_gpu_num": 64.0,
    "sft.median_gpu_num": 8.0,
    "gpu_job.cancelled_share_of_jobs": 0.075,
    "gpu_job.cancelled_share_of_gpu_time": 0.664,
    "gpu_job.failed_share_of_jobs": 0.429,
    "gpu_job.failed_share_of_gpu_time": 0.124,
    "sm_active.median_pct": 50.2,
    "gpu_memory.over_share": 0.5,
    "cpu.median_pct": 8.0,
    "host_memory.over_half_share": 0.012,
    "ib_send.idle_share": 0.65,
    "gpu_power.idle_share": 0.302,
    "gpu_power.over_tdp_share": 0.221,
    "server_power.gpu_to_cpu": 5.04,
    "server_power.gpu_share": 0.66,
    "memory_hotter_c": 12.0,
    "failures.recorded.number": 2575.0,
    "failures.recorded.share_of_failures": 1.0,
    "failures.recorded.infrastructure.number": 281.0,
    "failures.recorded.infrastructure.share_of_failures": 0.11,
    "failures.recorded.infrastructure.share_of_gpu_time": 0.8206,
    "carbon.t_co2e": 321.7,
}


def asked(numbers, cluster="Seren"):
    return {
        finding.id: finding
        for finding in findings(
            {f"{cluster.lower()}.{k}": v for k, v in numbers.items()}, [cluster]
        )
    }


def test_every_claim_holds_for_the_studys_own_numbers():
    found = asked(SEREN)
    assert len(found) == len(claims()) >= 28
    assert {name for name, finding in found.items() if not finding.holds} == {"carbon.seren"}
    assert found["carbon.seren"].holds is None
    assert found["carbon.seren"].value == 321.7
    assert found["short-jobs.seren"].study == 122.0
    # 206 s of Helios over 122 s: the 1.7 of the study.
    assert found["shorter-than-before.seren"].value == pytest.approx(1.7, abs=0.02)
    assert (
        found["one-gpu-jobs-are-most.seren"].sentence
        == "Seren: 54.0% of the GPU jobs ask for at most one GPU."
    )


def test_under_thirty_jobs_there_is_no_verdict():
    few = asked(SEREN | {"gpu_job_num": 29.0})
    assert {finding.holds for finding in few.values()} == {None}
    assert few["short-jobs.seren"].value == 122.0
    assert "29 GPU jobs; from 30 on" in few["short-jobs.seren"].why
    assert asked(SEREN | {"gpu_job_num": 30.0})["short-jobs.seren"].holds is True


OPPOSITES = {
    "gpu_job.median_duration_s": (3600.0, {"short-jobs", "shorter-than-before"}),
    "gpu_util.polarised_share": (0.3, {"polarised-utilisation"}),
    "gpu_util.median_pct": (48.0, {"high-median-utilisation"}),
    "gpu_job.share_of_jobs_at_most_1_gpu": (0.2, {"one-gpu-jobs-are-most"}),
    "gpu_job.share_of_gpu_time_at_most_1_gpu": (0.3, {"one-gpu-jobs-take-little"}),
    "gpu_job.share_of_gpu_time_from_256_gpus": (0.0, {"large-jobs-take-most"}),
    "sft.share_of_jobs": (0.8, {"evaluation-is-most-jobs"}),
    "mllm.share_of_gpu_time": (0.7, {"pretraining-takes-most-time"}),
    "other.median_duration_s": (30.0, {"pretraining-median-is-near"}),
    "pretrain.median_queue_s": (500.0, {"evaluation-waits-longest"}),
    "sft.median_gpu_num": (0.5, {"evaluation-asks-least"}),
    "gpu_job.cancelled_share_of_jobs": (0.3, {"few-jobs-are-cancelled"}),
    "gpu_job.cancelled_share_of_gpu_time": (0.1, {"cancelled-jobs-take-most"}),
    "gpu_job.failed_share_of_jobs": (0.1, {"many-jobs-fail"}),
    "gpu_job.failed_share_of_gpu_time": (0.4, {"failures-take-little"}),
    "sm_active.median_pct": (90.0, {"multiprocessors-half-idle"}),
    "gpu_memory.over_share": (0.139, {"gpu-memory-is-used"}),
    "cpu.median_pct": (90.0, {"cpus-are-underused"}),
    "host_memory.over_half_share": (0.6, {"host-memory-is-underused"}),
    "ib_send.idle_share": (0.2, {"infiniband-is-idle"}),
    "gpu_power.idle_share": (0.05, {"gpus-idle"}),
    "gpu_power.over_tdp_share": (0.08, {"gpus-above-tdp"}),
    "server_power.gpu_to_cpu": (1.5, {"gpu-server-draws-five-times"}),
    "server_power.gpu_share": (0.3, {"gpus-draw-two-thirds"}),
    "memory_hotter_c": (-2.0, {"memory-is-hotter"}),
    "failures.recorded.infrastructure.share_of_failures": (
        0.5,
        {"infrastructure-failures-are-few"},
    ),
    "failures.recorded.infrastructure.share_of_gpu_time": (
        0.1,
        {"infrastructure-failures-cost-most"},
    ),
}


@pytest.mark.parametrize("key", OPPOSITES)
def test_each_claim_fails_for_its_opposite_and_no_other_does(key):
    value, fail = OPPOSITES[key]
    found = asked({**SEREN, key: value})
    assert {
        name.removesuffix(".seren") for name, finding in found.items() if finding.holds is False
    } == fail


def test_every_claim_can_fail():
    assert {claim.id for claim in claims()} - {"carbon"} == set().union(
        *(fail for _, fail in OPPOSITES.values())
    )


def test_what_a_trace_lacks_cannot_be_told_and_is_named():
    found = asked({})
    assert all(finding.holds is None and finding.value is None for finding in found.values())
    assert found["evaluation-is-most-jobs.seren"].why == "The trace has no types of workload."
    nan = asked({**SEREN, "sm_active.median_pct": math.nan})
    assert nan["multiprocessors-half-idle.seren"].holds is None
    alone = asked({"evaluation.share_of_jobs": 1.0})  # without another type to compare with
    assert alone["evaluation-is-most-jobs.seren"].holds is None


CAUSES = ("infrastructure-failures-are-few", "infrastructure-failures-cost-most")


def test_causes_are_judged_where_enough_are_recorded_and_what_is_not_is_said():
    few = asked(
        {**SEREN, "failures.recorded.number": 99.0, "failures.recorded.infrastructure.number": 11.0}
    )
    enough = asked(
        {**SEREN, "failures.recorded.number": 100.0, "failures.recorded.share_of_failures": 0.013}
    )
    nodes = asked(
        {
            **SEREN,
            "failures.recorded.number": 281.0,
            "failures.recorded.infrastructure.share_of_failures": 1,
        }
    )
    for claim in CAUSES:
        assert few[f"{claim}.seren"].holds is None
        assert "Only 99 failures" in few[f"{claim}.seren"].why
        assert enough[f"{claim}.seren"].holds is True
        assert "98.7%" in enough[f"{claim}.seren"].why
        # A scheduler that records only node failures gives no share of them.
        assert nodes[f"{claim}.seren"].holds is None


def test_what_the_study_pools_is_asked_of_all_clusters_together():
    numbers = {f"{slug}.{key}": value for slug in ("seren", "mine") for key, value in SEREN.items()}
    numbers |= {f"all.{key}": value for key, value in SEREN.items()}
    numbers["all.failures.recorded.infrastructure.share_of_failures"] = 0.5
    found = findings(numbers, ["Seren", "Mine"])
    assert len(found) == 2 * (len(claims()) - 2) + 2
    few, most = found[-2:]
    assert [few.id, most.id] == [f"{claim}.all" for claim in CAUSES]
    assert few.holds is False
    assert most.sentence.startswith(
        "All clusters: infrastructure failures take 82.1% of the GPU time"
    )
    assert most.holds is True


def test_types_of_few_jobs_are_not_compared():
    few = {
        **SEREN,
        "other.n": 8.0,
        "other.median_duration_s": 1.0,
        "pretrain.n": 641.0,
        "evaluation.n": 18471.0,
    }
    assert asked(few)["pretraining-median-is-near.seren"].value == pytest.approx(400 / 140)
    assert ClusterNumbers({"x.other.n": 8.0, "x.other.share": 1.0}, "X").by_type("share") == {
        "other": 1.0
    }


def test_another_cluster_sees_the_studys_numbers_in_words():
    found = asked(SEREN, cluster="Mine")
    assert found["short-jobs.mine"].study == "2 min 02 s (Seren), 2 min 04 s (Kalos)"
    compared = asked({**SEREN, "gpu_job.times_shorter_least": 0.5}, cluster="Mine")
    assert (
        compared["shorter-than-before.mine"].holds is False
    )  # compared with the trace's own values, not the published ones


def test_the_claims_are_well_formed():
    assert len({claim.id for claim in claims()}) == len(claims())
    for claim in claims():
        assert bool(claim.number) != bool(claim.measure), claim.id
        assert {claim.measure, claim.decides} - {""} <= set(MEASURES), claim.id
        assert claim.asks.startswith("{cluster}: ")
        assert claim.asks.endswith(".")
        assert "{value}" in claim.asks
    used = {claim.measure for claim in claims()} | {claim.decides for claim in claims()}
    assert set(MEASURES) == used - {""}


@pytest.mark.parametrize(
    ("numbers", "claim", "said"),
    [
        ({"gpu_job.median_duration_s": 122.0}, "shorter-than-before", "is 1.69 times shorter than"),
        ({"gpu_job.median_duration_s": 9760.0}, "shorter-than-before", "is 47.4 times longer than"),
        ({"gpu_job.median_duration_s": 9760.0}, "short-jobs", "runs 2 h 43 min."),
        (
            {"evaluation.median_queue_s": 907.0, "sft.median_queue_s": 1000.0},
            "evaluation-waits-longest",
            "evaluation waits 9% less than",
        ),
        (
            {"evaluation.median_queue_s": 15.0, "sft.median_queue_s": 10.0},
            "evaluation-waits-longest",
            "evaluation waits 50% longer than",
        ),
        (
            {"evaluation.median_queue_s": 50_000.0, "sft.median_queue_s": 10.0},
            "evaluation-waits-longest",
            "evaluation waits 5,000 times as long as",
        ),
    ],
)
def test_ratios_and_times_are_told_in_words(numbers, claim, said):
    assert said in asked(numbers)[f"{claim}.seren"].sentence
