from itertools import pairwise

import pytest

from holdfast.evaluate.run.node_kind import node_kind

INFORMATION = "driver/nvidia/gpus/0000:01:00.0/information"


@pytest.fixture
def kind(tmp_path):
    """Return a function that writes files below a made root and returns the kind of such a node."""
    packages = tmp_path / "packages"
    (packages / "torch-2.13.0.dist-info").mkdir(parents=True)

    def of(files=None, environment=None):
        for path, content in (files or {}).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content)
        return node_kind(environment or {}, [str(packages), "/is/not/there"], tmp_path)

    return of


def test_the_kind_changes_with_all_that_numerics_depend_on(kind, tmp_path):
    kinds = [
        kind(),
        kind({"proc/cpuinfo": "model name : A\nflags : avx2\nbogomips : 1\n\nmodel name : B\n"}),
        kind({"proc/cpuinfo": "model name : A\nflags : avx2 avx512f\nbogomips : 1\n"}),
        kind({"packages/torch-2.14.0.dist-info/RECORD": ""}),
        kind({"dev/nvidia0": "", f"proc/{INFORMATION}": "Model: H100\n", "proc/driver/nvidia/version": "580"}),
        kind({"proc/driver/nvidia/version": "581"}),
        kind({f"proc/{INFORMATION}": "Model: H200\n"}),
        kind(environment={"CUDA_VISIBLE_DEVICES": "0"}),
        kind(environment={"MKL_CBWR": "COMPATIBLE"}),
    ]  # fmt: skip
    assert all(kinds)
    assert all(before != after for before, after in pairwise(kinds))


def test_the_kind_is_the_same_for_the_same_node(kind):
    cpu = "model name : A\nflags : avx2\nbogomips : {}\ncpu MHz : {}\n"
    first = kind({"proc/cpuinfo": cpu.format(1, 2)}, {"HOME": "/a"})
    assert kind({"proc/cpuinfo": cpu.format(3, 4)}, {"HOME": "/b"}) == first


@pytest.mark.parametrize("files", [{"dev/nvidia0": ""}, {"dev/kfd": ""}])
def test_an_unreadable_accelerator_has_no_kind(kind, files):
    assert kind(files) == ""


def test_this_machine_has_a_steady_kind():
    assert node_kind() == node_kind()
