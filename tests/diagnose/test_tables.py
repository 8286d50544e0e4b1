"""Test that tables agree with their sources, and their rules precede the general ones."""

import pytest

from holdfast.core.errors import BadUse
from holdfast.diagnose.rules import code_tables
from holdfast.diagnose.rules.packaged import packaged_rules
from holdfast.diagnose.rules.rules import ROUTINE

XID = "NVRM: Xid (PCI:0000:4E:00): "


def found(line):
    rule, captures = packaged_rules().find(line)
    return rule, captures


def test_every_xid_has_one_row_and_says_where_it_comes_from():
    rows = code_tables.read_table("xid")
    assert [int(row["code"]) for row in rows] == list(range(1, 173))
    assert all(row["source"] for row in rows)
    assert len(code_tables.read_table("xid_nvlink5")) == 94


@pytest.mark.parametrize(
    ("line", "reason", "action"),
    [
        ("48, pid=7, name=python, An uncorrectable double bit error", "ECCError", "reset_gpu"),
        ("64, pid=7, name=python, Row Remapper: failed", "ECCError", "exclude_and_restart"),
        (
            "79, pid=7, name=python, GPU has fallen off the bus.",
            "NodeFailure",
            "exclude_and_restart",
        ),
        (
            "74, pid=7, name=python, NVLink: fatal error detected on link 8(0x1, 0x0)",
            "NVLinkError",
            "reset_gpu",
        ),
        ("13, pid=7, name=python, Graphics SM Warp Exception", "CUDAError", "restart"),
        (
            "45, pid=7, name=python, Ch 00000001 caused by previous Xid 149",
            "NVLinkError",
            "reset_gpu",
        ),
        ("45, pid=7, name=python, Ch 00000001 caused by previous Xid 31", "CUDAError", "restart"),
    ],
)
def test_an_xid_is_decoded_with_its_gpu_and_process(line, reason, action):
    rule, captures = found(XID + line)
    assert (rule.reason, rule.action) == (reason, action)
    assert captures["gpu"] == "0000:4E:00"


def test_the_link_of_an_xid_is_named():
    assert (
        found(XID + "74, pid=7, name=python, NVLink: fatal error detected on link 8(0x1, 0x0)")[1][
            "link"
        ]
        == "8"
    )
    assert (
        found(XID + "149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x0)")[1][
            "link"
        ]
        == "08"
    )


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (
            "145, RLW_REMAP Nonfatal XC0 i0 Link 04 (0x00000004 0x00000100 0x0)",
            "xid-145-rlw-remap-none",
        ),
        (
            "145, RLW_REMAP Nonfatal XC0 i0 Link 04 (0x00000004 0x00000001 0x0)",
            "xid-145-rlw-remap-program-ends",
        ),
        (
            "145, RLW_REMAP Nonfatal XC0 i0 Link 04 (0x00000004 0x00000101 0x0)",
            "xid-nvlink-traffic-lost",
        ),
        (
            "149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x020005c6 0x00000000 0x0)",
            "xid-149-netir-link-evt-netir-link-down-lost-by-its-peer-device-at-the-other-end",
        ),
    ],
)
def test_an_nvlink_unit_is_decoded_by_its_error_words(words, rule):
    assert found(XID + words)[0].id == rule


def test_a_notice_is_no_event():
    assert found(XID + "92, pid=7, name=python, High single-bit ECC error rate")[0].kind == ROUTINE


@pytest.mark.parametrize(
    ("line", "reason", "restart_helps"),
    [
        (
            "RuntimeError: cuda runtime error (39) : uncorrectable ECC error encountered at /x/THC.cpp:2",
            "ECCError",
            True,
        ),
        ("Check failed: cudaSuccess == stat (0 vs. 39)", "ECCError", True),
        (
            "THCudaCheck FAIL file=/x/THCStorage.c line=14 error=30 : unknown error",
            "CUDAError",
            True,
        ),
        ("Accelerator Fatal Error: call to cuCtxCreate returned error 214", "ECCError", True),
        (
            "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com for more information.",
            "CUDAError",
            True,
        ),
        ("RuntimeError: HIP error: invalid device ordinal", "CUDAError", False),
        ("RuntimeError: CUDA error: device-side assert triggered", "AssertionError", False),
    ],
)
def test_a_cuda_error_is_known_by_name_code_or_text(line, reason, restart_helps):
    rule, _ = found(line)
    assert (rule.reason, rule.restart_helps) == (reason, restart_helps)


def test_a_row_that_makes_no_sense_is_named(monkeypatch):
    row = dict.fromkeys(("what", "alone", "source"), "") | {
        "code": "7",
        "kind": "gremlin",
        "reason": "CUDAError",
        "action": "restart",
    }
    monkeypatch.setattr(code_tables, "read_table", lambda name: [row])
    with pytest.raises(BadUse, match="gremlin"):
        list(code_tables._xid_rules())
