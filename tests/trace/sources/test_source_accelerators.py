import pytest

from holdfast.trace.sources.kubernetes.resources import of_pod


def asked(annotations=None, **spec):
    resources = spec.pop("resources", {})
    return of_pod({"containers": [{"resources": {"limits": resources}}], **spec}, annotations)


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        ({"google.com/tpu": "4"}, 4),
        ({"aws.amazon.com/neuron": "16"}, 16),
        ({"huawei.com/Ascend910": "8"}, 8),
        ({"huawei.com/Ascend310P": "1"}, 1),
        ({"cambricon.com/mlu": "8"}, 8),
        ({"hygon.com/dcu": "8"}, 8),
        ({"mthreads.com/gpu": "8"}, 8),
        ({"amd.com/gpu": "8"}, 8),
        ({"amd.com/cpx_nps4": "8"}, 1),
        ({"nvidia.com/GH100_H100_SXM5_80GB": "8"}, 8),
        ({"volcano.sh/vgpu-number": "2"}, 2),
        ({"volcano.sh/vgpu-number": "2", "volcano.sh/vgpu-cores": "25"}, 0.5),
        ({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": "30"}, 0.3),
        ({"aliyun.com/gpu-core.percentage": "50", "aliyun.com/gpu-mem": "8"}, 0.5),
        ({"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "50"}, 0.5),
        ({"tencent.com/vcuda-core": "200"}, 2),
        ({"nvidia.com/mig-1g.10gb": "7"}, 1),
    ],
)
def test_accelerators_of_every_vendor_are_counted(resources, gpus):
    request = asked(resources=resources)
    assert request.gpu_num == pytest.approx(gpus)
    assert not request.uncounted


@pytest.mark.parametrize(
    "resources",
    [
        {"nvidia.com/gpu.shared": "2"},
        {"aliyun.com/gpu-mem": "8"},
        {"huawei.com/Ascend910-2c": "1"},
        {"aws.amazon.com/neuroncore": "2"},
        {"nvidia.com/GRID_T4-4Q": "1"},
        {"example.com/new-npu": "1"},
    ],
)
def test_a_share_of_unknown_size_is_named(resources):
    request = asked(resources=resources)
    assert (request.gpu_num, request.uncounted) == (0, frozenset(resources))


def test_memory_alone_says_no_share_of_a_virtual_gpu():
    request = asked(resources={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"})
    assert (request.gpu_num, request.uncounted) == (0, {"nvidia.com/gpu", "nvidia.com/gpumem"})


@pytest.mark.parametrize(
    "resources", [{"nvidia.com/hostdev": "1"}, {"rdma/hca": "1"}, {"cpu": "8"}, {"nvidia.com/gpu": "0"}]
)  # fmt: skip
def test_other_devices_are_no_gpus(resources):
    request = asked(resources=resources)
    assert (request.gpu_num, request.uncounted) == (0, frozenset())


def test_fractions_of_run_ai_are_in_its_annotations():
    assert asked({"gpu-fraction": "0.5"}).gpu_num == 0.5
    assert asked({"gpu-fraction": "0.5", "gpu-fraction-num-devices": "4"}).gpu_num == 2
    assert asked({"gpu-memory": "4000"}).uncounted == {"gpu-memory"}


def test_a_dynamic_resource_claim_is_named():
    request = asked(resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "h100"}])
    assert request.uncounted == {"resourceClaims/gpu"}
