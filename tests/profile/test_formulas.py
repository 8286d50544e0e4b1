"""Every formula against numbers that its source prints, or that follow from them by hand."""

import pytest

from holdfast.core.errors import BadUse
from holdfast.profile.formulas.flops import (
    flops_per_token,
    hardware_flops_per_token,
    peak_of,
    utilization,
)
from holdfast.profile.formulas.memory import (
    activation_bytes_per_layer,
    output_bytes,
    stage_memory,
    stage_parameters,
    state_bytes_per_parameter,
)
from holdfast.profile.formulas.pipeline import bubble_over_ideal, chunks_in_flight
from holdfast.profile.formulas.shape import Layout, Model

LLAMA_3_8B = Model(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, gated=True
)
GPT_22B = Model(layers=48, hidden=6144, heads=64, vocabulary=51200)
GPT_175B = Model(layers=96, hidden=12288, heads=96, vocabulary=51200)
GPT_530B = Model(layers=105, hidden=20480, heads=128, vocabulary=51200)
GPT_1T = Model(layers=128, hidden=25600, heads=160, vocabulary=51200)


def test_the_parameters_of_llama_3_8b_are_the_published_ones():
    assert LLAMA_3_8B.parameters == 8_030_261_248
    assert LLAMA_3_8B.matmul_parameters == 8_030_261_248 - 128_256 * 4096
    tied = Model(layers=32, hidden=4096, heads=32, vocabulary=128256, tied=True)
    untied = Model(layers=32, hidden=4096, heads=32, vocabulary=128256)
    assert untied.parameters - tied.parameters == 128_256 * 4096
    assert untied.matmul_parameters == tied.matmul_parameters == tied.parameters


def test_palm_540b_reaches_the_46_2_percent_that_its_paper_prints():
    # Appendix B and table 3: 540.35e9 parameters, L 118, H 48, Q 256, T 2048, 238.3e3 tokens/s on
    # 6,144 chips of 275 TFLOP/s; 45.7 % without attention. The shape's own parameters differ
    # (parallel layers), so N is put in directly.
    parameters, attention = 540.35e9, 12 * 118 * 48 * 256 * 2048
    a_chip = 238.3e3 / 6144
    assert utilization(6 * parameters + attention, a_chip, 275) == pytest.approx(0.462, abs=5e-4)
    assert utilization(6 * parameters, a_chip, 275) == pytest.approx(0.457, abs=5e-4)
    palm = Model(layers=118, hidden=18432, heads=48, head_size=256, vocabulary=256_000, tied=True)
    found = flops_per_token(palm, 2048, causal=False) - 6 * palm.matmul_parameters
    assert found == attention


@pytest.mark.parametrize(
    ("model", "sequences", "gpus", "step_s", "mfu"),
    [
        (GPT_22B, 4, 8, 1.10, 0.415),
        (GPT_175B, 64, 64, 13.75, 0.514),
        (GPT_530B, 280, 280, 37.83, 0.560),
        (GPT_1T, 512, 512, 71.49, 0.563),
    ],
)
def test_mfu_of_four_published_models_on_a100(model, sequences, gpus, step_s, mfu):
    # arXiv:2205.05198, table 5: full attention, s 2048, iteration times to two decimals.
    rate = sequences * 2048 / step_s / gpus
    flops = flops_per_token(model, 2048, causal=False)
    assert utilization(flops, rate, peak_of("NVIDIA A100-SXM4-80GB").tflops) == pytest.approx(
        mfu, rel=0.006
    )


@pytest.mark.parametrize(("sequence", "apart"), [(8192, 1.125), (131_072, 1.696)])
def test_full_and_causal_attention_of_llama_3_8b_lie_apart_as_worked_out(sequence, apart):
    full = flops_per_token(LLAMA_3_8B, sequence, causal=False)
    causal = flops_per_token(LLAMA_3_8B, sequence, causal=True)
    assert full / causal == pytest.approx(apart, abs=1e-3)


def test_recompute_adds_a_forward_pass_of_what_is_computed_again():
    full = flops_per_token(GPT_22B, 2048, causal=False)
    attention = 12 * 48 * 6144 * 2048

    def hardware(recompute):
        return hardware_flops_per_token(GPT_22B, 2048, causal=False, recompute=recompute)

    assert hardware("none") == full
    assert hardware("full") == pytest.approx(full * 4 / 3)
    assert hardware("selective") - full == pytest.approx(attention / 3)


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA L40S", 362),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI300X", 1300),
    ],
)
def test_the_peak_is_the_data_sheets(device, tflops):
    assert peak_of(device).tflops == tflops


@pytest.mark.parametrize(
    "device",
    [
        None,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-10C",
        "GRID A100-1-5C",
        "NVIDIA GH200 480GB",
        "Tesla V100-SXM2-16GB",
        "NVIDIA L40",
        "NVIDIA H200 NVL",
    ],
)
def test_no_peak_is_invented(device):
    with pytest.raises(BadUse, match="--peak-tflops"):
        peak_of(device)
    assert peak_of(device, 100.0).source == "stated by the user"
    with pytest.raises(BadUse, match="above 0"):
        peak_of(device, 0.0)


def test_zero_of_a_7_5b_model_on_64_ranks_takes_what_its_paper_prints():
    # arXiv:1910.02054, figure 1: 120 GB, 31.4 GB, 16.6 GB, 1.9 GB.
    found = [sum(state_bytes_per_parameter(zero=stage, shards=64)) * 7.5 for stage in (0, 1, 2, 3)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_megatron_keeps_18_bytes_and_6_plus_12_over_d():
    assert sum(state_bytes_per_parameter(fp32_gradients=True)) == 18
    assert sum(state_bytes_per_parameter(zero=1, shards=4, fp32_gradients=True)) == 6 + 12 / 4


def layout(**changed):
    return Layout(
        **{"sequence": 2048, "microbatch": 4, "tensor": 1, "recompute": "none", **changed}
    )


def test_the_attention_matrices_are_the_share_that_the_paper_prints():
    # arXiv:2205.05198, section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG; leaving it out saves 70
    # % and 65 %.
    for model, term, saved in ((GPT_175B, 80, 0.70), (GPT_530B, 64, 0.65)):
        sbh = 2048 * 4 * model.hidden
        whole = activation_bytes_per_layer(model, layout())
        assert whole == sbh * (34 + term)
        kept = activation_bytes_per_layer(model, layout(recompute="selective"))
        assert 1 - kept / whole == pytest.approx(saved, abs=0.005)


@pytest.mark.parametrize(
    ("changed", "bytes_a_number"),
    [
        ({}, 34 + 5 * 64 * 2048 / 6144),
        ({"tensor": 8}, 10 + 24 / 8 + 5 * 64 * 2048 / 6144 / 8),
        ({"tensor": 8, "sequence_parallel": True}, (34 + 5 * 64 * 2048 / 6144) / 8),
        ({"tensor": 8, "recompute": "selective"}, 10 + 24 / 8),
        ({"tensor": 8, "sequence_parallel": True, "recompute": "selective"}, 34 / 8),
        ({"tensor": 8, "recompute": "full"}, 2),
    ],
)
def test_activations_of_the_22b_model_in_each_row_of_table_2(changed, bytes_a_number):
    sbh = 2048 * 4 * 6144
    found = activation_bytes_per_layer(GPT_22B, layout(**changed))
    assert found == pytest.approx(sbh * bytes_a_number)


def test_the_feed_forward_size_counts_as_megatron_counts_it():
    wide = Model(layers=48, hidden=6144, heads=64, vocabulary=51200, ffn=6 * 6144)
    found = activation_bytes_per_layer(wide, layout(recompute="selective"))
    assert found == 2048 * 4 * 6144 * (18 + 4 * 6)


def test_the_output_layer_holds_its_input_and_the_logits():
    # 4·s·b·h·(1 + v/h)/t with s 2048, b 4, h 6144, v 51200, t 8.
    assert output_bytes(GPT_22B, layout(tensor=8)) == pytest.approx(
        4 * 2048 * 4 * (6144 + 51200) / 8
    )


def test_1f1b_holds_p_minus_i_microbatches():
    assert [chunks_in_flight(stage, 4, 32) for stage in range(4)] == [4, 3, 2, 1]
    assert [chunks_in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="stage 4"):
        chunks_in_flight(4, 4, 32)


def test_interleaved_1f1b_of_mt_nlg_holds_the_factor_of_its_paper():
    # L (1 + (p - 1)/(p v)) with L 105, p 35, v 3: 139 layers on the first stage, one layer a chunk.
    assert chunks_in_flight(0, 35, 280, 3) == 139 == round(105 * (1 + 34 / 105))
    assert chunks_in_flight(0, 4, 4, 2) == 8, "no more than there are"


def test_the_bubble_shrinks_with_microbatches_and_with_chunks():
    assert bubble_over_ideal(4, 32) == pytest.approx(3 / 32)
    assert bubble_over_ideal(8, 8, 2) == pytest.approx(7 / 16)


def test_a_stage_adds_up_by_hand():
    job = Layout(
        sequence=2048, microbatch=1, microbatches=8, tensor=8, pipeline=4, sequence_parallel=True
    )
    first, second, last = (stage_memory(GPT_22B, job, stage) for stage in (0, 1, 3))
    parameters = (12 * 12 * 6144**2 + 12 * 2 * 6144) / 8
    assert stage_parameters(GPT_22B, job, 1) == parameters
    assert stage_parameters(GPT_22B, job, 0) == parameters + 51200 * 6144 / 8
    assert second.weights + second.gradients + second.optimizer == 16 * parameters
    sbh = 2048 * 6144
    assert first.activations == pytest.approx(4 * 12 * 34 / 8 * sbh), "as if it held all 48 layers"
    assert last.activations == pytest.approx(12 * 34 / 8 * sbh)
    assert last.output == pytest.approx(4 * 2048 * (6144 + 51200) / 8)
    assert first.output == first.gathered == 0
    assert first.total == pytest.approx(sum(first.by_kind().values()))
    parts = sum(stage_parameters(GPT_22B, job, stage) for stage in range(4))
    assert parts * 8 == pytest.approx(GPT_22B.parameters)


def test_hierarchical_zero_shards_within_a_group_and_holds_two_gathered_layers():
    job = Layout(sequence=2048, data=2048, zero=3, shards=64, recompute="full")
    found = stage_memory(GPT_175B, job, 0)
    assert found.weights + found.gradients + found.optimizer == pytest.approx(
        16 * GPT_175B.parameters / 64
    )
    assert found.gathered == 2 * 2 * GPT_175B.layer_parameters
    sbh = 2048 * 12288
    assert found.activations == pytest.approx(96 * 2 * sbh + 34 * sbh)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"zero": 4}, "layout.zero is 4"),
        ({"recompute": "some"}, "none, selective or full"),
        ({"data": 8, "shards": 3}, "does not divide"),
        ({"pipeline": 0}, "layout.pipeline is 0"),
        ({"pipeline": 4, "chunks": 2, "microbatches": 6}, "multiples of its 4 stages"),
    ],
)
def test_a_layout_that_cannot_be_is_a_sentence(wrong, said):
    with pytest.raises(BadUse, match=said):
        Layout(**{"sequence": 2048, **wrong})


def test_a_model_that_cannot_be_is_a_sentence():
    with pytest.raises(BadUse, match=r"model.layers is 0"):
        Model(layers=0, hidden=8, heads=2, vocabulary=10)
    with pytest.raises(BadUse, match=r"Give model.head_size"):
        Model(layers=1, hidden=9, heads=2, vocabulary=10)
