"""Check an evaluation's requests to a cluster."""

import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.run.options import EvaluateOptions
from holdfast.evaluate.run.plan import Planned, describe_model
from holdfast.evaluate.types.engine import EngineSpec
from holdfast.evaluate.types.suite import Suite, TaskEntry

SUITE = Suite(name="s", entries=(TaskEntry(name="t"),))
OPENAI = {"kind": "openai", "url": "http://h:1/v1"}


def test_an_adapter_is_for_the_engine_hf_alone(tmp_path):
    for name in ("base/config.json", "base/model.safetensors", "lora/adapter_model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "lora/adapter_config.json").write_text("{}")
    adapter, base = str(tmp_path / "lora"), str(tmp_path / "base")
    manifest = describe_model(adapter, EvaluateOptions(base=base))
    assert (manifest.source, manifest.adapter) == (base, adapter)
    with pytest.raises(BadUse, match="engine hf applies and vllm does not"):
        describe_model(adapter, EvaluateOptions(base=base, engine=EngineSpec(kind="vllm")))


def wanted(spec, *, on="slurm", engines_per_node=0, sbatch_options=()):
    options = EvaluateOptions(
        engine=EngineSpec(**spec),
        on=on,
        engines_per_node=engines_per_node,
        sbatch_options=sbatch_options,
    )
    return Planned(suite=SUITE, model="m", manifest=None, options=options).nodes_wanted({"A": "1"})


@pytest.mark.parametrize(
    ("spec", "engines_per_node", "gpus"),
    [
        ({"device": "cuda"}, 0, 1),
        ({"device": "cuda"}, 4, 4),
        ({"kind": "vllm"}, 0, 1),
        ({"kind": "vllm", "tensor_parallel": 4}, 2, 8),
        ({"kind": "my:Engine", "device": "cuda"}, 0, 1),
        ({"kind": "my:Engine"}, 2, 0),
        ({}, 4, 0),
        ({"device": "cpu"}, 4, 0),
        ({"kind": "vllm", "device": "cpu"}, 0, 0),
        (OPENAI, 4, 0),
        ({"kind": "simulated", "device": "cuda"}, 4, 0),
    ],
)
def test_a_cluster_is_asked_for_the_gpus_that_engines_need(spec, engines_per_node, gpus):
    for on in ("slurm", "ray"):
        assert wanted(spec, on=on, engines_per_node=engines_per_node).gpus_per_node == gpus


@pytest.mark.parametrize(
    ("option", "gpus"),
    [
        ("--gres=gpu:a100:8", 0),
        ("--gpus-per-node=8", 0),
        ("--gpus 8", 0),
        ("-G8", 0),
        ("--tres-per-task=gres/gpu:2", 0),
        ("--exclusive", 0),
        ("--exclusive=user", 1),
        ("--gres=nvme:1", 1),
        ("--gpu-bind=closest", 1),
        ("--partition=gpu", 1),
    ],
)
def test_what_the_user_asks_slurm_for_is_not_asked_for_again(option, gpus):
    assert wanted({"kind": "vllm"}, sbatch_options=("--time=30", option)).gpus_per_node == gpus


def test_on_ray_it_is_said_that_nobody_asked_for_gpus():
    assert wanted({}, on="ray").note.startswith("Ray only gives GPUs that were requested")
    for spec in ({"device": "cpu"}, {"device": "cuda"}, {"kind": "vllm"}, OPENAI):
        assert not wanted(spec, on="ray").note
    for on in ("slurm", "local"):
        assert not wanted({}, on=on).note
