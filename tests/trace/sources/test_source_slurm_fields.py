from datetime import UTC, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import BadUse
from holdfast.trace.schema import OUTCOMES, STATES
from holdfast.trace.sources.mig import mig_share
from holdfast.trace.sources.slurm.fields import (
    MAX_NODES,
    elapsed_s,
    exit_code_of,
    failure_reason,
    is_known,
    nodes_of,
    resources_of,
    state_of,
    zone_of,
)


@pytest.mark.parametrize(
    ("words", "state", "reason"),
    [
        ("COMPLETED", "COMPLETED", None),
        ("CANCELLED by 1000", "CANCELLED", None),
        ("CANCELLED+", "CANCELLED", None),
        ("FAILED", "FAILED", None),
        ("TIMEOUT", "TIMEOUT", None),
        ("DEADLINE", "TIMEOUT", None),
        ("NODE_FAIL", "NODE_FAIL", "NodeFailure"),
        ("BOOT_FAIL", "NODE_FAIL", "NodeFailure"),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY", "OutOfMemory"),
        ("PREEMPTED", "PREEMPTED", None),
        ("REQUEUED", "PREEMPTED", None),
        ("RUNNING", "RUNNING", None),
        ("COMPLETING", "RUNNING", None),
        ("SUSPENDED", "RUNNING", None),
        ("PENDING", "PENDING", None),
        ("RESIZING", "UNKNOWN", None),
        ("RUNNING,COMPLETING", "RUNNING", None),
        ("PENDING,REQUEUED", "PENDING", None),
        ("ODD,FAILED", "FAILED", None),
        ("ODD", "UNKNOWN", None),
        ("", "UNKNOWN", None),
    ],
)
def test_each_state_of_slurm_is_one_of_the_schema(words, state, reason):
    assert state_of(words) == (state, reason)
    assert state in STATES
    assert is_known(words) == (words not in ("ODD", ""))


def test_a_requeued_run_is_no_failure():
    assert OUTCOMES[state_of("REQUEUED")[0]] == "preempted"


def test_a_reason_is_kept_where_it_tells_of_a_failure():
    assert failure_reason("NonZeroExitCode") == "NonZeroExitCode"
    assert failure_reason("RaisedSignal:9(Killed)") == "RaisedSignal:9(Killed)"
    assert failure_reason("Priority") is None
    assert failure_reason(None) is None


@pytest.mark.parametrize(
    ("text", "code"), [("0:0", 0), ("3:0", 3), ("0:9", 137), ("1:15", 143), ("", None)]
)
def test_exit_codes(text, code):
    assert exit_code_of(text) == code


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_elapsed_time(days, hours, minutes, seconds):
    whole = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    assert elapsed_s(f"{days}-{hours:02}:{minutes:02}:{seconds:02}") == whole
    assert elapsed_s(f"{days * 24 + hours}:{minutes:02}:{seconds:02}") == whole
    assert elapsed_s(str(int(whole))) == whole


def test_elapsed_time_of_minutes_alone_and_of_none():
    assert elapsed_s("02:03.250") == 123
    assert elapsed_s("") is None
    with pytest.raises(ValueError, match="DAYS-HOURS"):
        elapsed_s("soon")


def test_gpus_are_not_counted_twice():
    both = resources_of("billing=96,cpu=96,energy=7K,gres/gpu:a100=8,gres/gpu=8,mem=500G,node=2")
    assert (both.gpu_num, both.gpu_model, both.cpu_num, both.mem_gb, both.node_num) == (
        8,
        "a100",
        96,
        500,
        2,
    )
    typed_alone = resources_of("cpu=1,gres/gpu:a100=2,gres/gpu:v100=1")
    assert (typed_alone.gpu_num, typed_alone.gpu_model) == (3, "a100+v100")
    assert resources_of("cpu=1,node=1").gpu_num == 0
    assert resources_of("") is None


def test_memory_units():
    gb = {"mem=1.5T": 1536, "mem=2000M": 2000 / 1024, "mem=1024K": 1 / 1024, "mem=1073741824": 1}
    assert {text: resources_of(text).mem_gb for text in gb} == gb


def test_slices_and_shares_of_gpus():
    sliced = resources_of("cpu=1,gres/gpu:1g.5gb=2,gres/gpu=2")
    assert sliced.gpu_num == pytest.approx(2 / 7)
    mixed = resources_of("gres/gpu=3,gres/gpu:a100=2,gres/gpu:a100_3g.20gb=1")
    assert mixed.gpu_num == pytest.approx(2 + 3 / 7)
    others = resources_of("cpu=1,gres/dcu:z100=4,gres/dcu=4,gres/npu=2,gres/nic=1")
    assert (others.gpu_num, others.gpu_model) == (6, "z100")
    assert resources_of("cpu=1,gres/shard=4").has_shares
    assert resources_of("cpu=1,gres/shard=4").gpu_num == 0


def test_the_shares_of_one_gpu_add_up():
    assert [
        7 * mig_share(f"nvidia.com/mig-{name}")
        for name in ("1g.5gb", "1g.10gb.me", "3g.40gb", "7g.80gb")
    ] == [pytest.approx(share) for share in (1, 1, 3, 7)]
    assert mig_share("2g.12gb") + 2 * mig_share("1g.6gb") == 1  # an A30 has four slices


def test_resources_that_cannot_be_read():
    with pytest.raises(ValueError, match="cpu=8"):
        resources_of("eight")
    with pytest.raises(ValueError, match="'many'"):
        resources_of("cpu=many")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ("n1",)),
        ("n[001-003,007],gpu1", ("n001", "n002", "n003", "n007", "gpu1")),
        ("n[8-11]", ("n8", "n9", "n10", "n11")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("a,b[2]-ib,c", ("a", "b2-ib", "c")),
        ("None assigned", None),
        ("", None),
    ],
)
def test_lists_of_nodes(text, names):
    assert nodes_of(text) == names


@given(st.sets(st.integers(0, 999), min_size=1, max_size=30))
def test_any_set_of_numbers_comes_back(numbers):
    text = "gpu[" + ",".join(f"{number:03}" for number in sorted(numbers)) + "]"
    assert nodes_of(text) == tuple(f"gpu{number:03}" for number in sorted(numbers))


@pytest.mark.parametrize(
    "text", ["n[1-999999]", "n[0-999]r[0-999]", "n[1-3", "n[x-y]", "n[3-1]", "n[]"]
)
def test_lists_of_nodes_that_are_damaged_or_too_long(text):
    with pytest.raises(ValueError, match="expected"):
        nodes_of(text)


def test_the_longest_list_of_nodes():
    assert len(nodes_of(f"n[1-{MAX_NODES}]")) == MAX_NODES


def test_zones():
    assert zone_of("+08:00").utcoffset(None) == timedelta(hours=8)
    assert zone_of("-0330").utcoffset(None) == -timedelta(hours=3, minutes=30)
    assert zone_of("UTC") is UTC
    assert zone_of("Asia/Shanghai") == ZoneInfo("Asia/Shanghai")
    for text in ("Mars/Phobos", "+99:00", "../etc/passwd", ""):
        with pytest.raises(BadUse, match=r"\+08:00"):
            zone_of(text)
