"""Test the meaning of out-of-memory sizes: a large program, fragments or another process."""

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.explain.memory_need import memory_advice

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.11 GiB memory in use. Of the allocated "
    "memory {live} is allocated by PyTorch, and {idle} is reserved by PyTorch but unallocated."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 3; 11.17 GiB total capacity; 11.16 GiB already "
    "allocated; 3.00 MiB free; 11.16 GiB reserved in total by PyTorch)"
)


def new(asked, live, idle="10.00 MiB"):
    return NEW.format(asked=asked, live=live, idle=idle)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (new("96.00 GiB", "1.00 GiB"), "fits no device of this kind"),
        (new("2.00 GiB", "77.50 GiB"), "The program holds 77.5 GiB and asked for 2.0 GiB more"),
        (OLD, "holds 11.2 GiB and asked for 20 MiB more, and the device has 11.2 GiB"),
        (new("2.00 GiB", "60.00 GiB", "17.00 GiB"), "holds 17.0 GiB that no tensor uses"),
        (new("2.00 GiB", "20.00 GiB"), "something else holds the rest"),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 19.2G of 15.5G hbm. Exceeded by 3.7G.",
            "needs 19.2 GiB and the device has 15.5 GiB",
        ),
    ],
)
def test_what_the_sizes_say(tmp_path, line, says):
    assert says in (memory_advice(line) or "")
    (tmp_path / "job.log").write_text(line + "\n")
    found = diagnose(tmp_path)
    assert (found.reason, found.action, found.restart_helps) == (
        "OutOfMemoryError",
        "change_config",
        False,
    )
    assert says in found.mitigation


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: out of memory",
        "Tried to allocate nothing; the total capacity of the hall is 500",
        "",
    ],
)
def test_without_sizes_the_rule_speaks(line):
    assert memory_advice(line) is None
