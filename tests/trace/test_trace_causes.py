"""Check the failure cause derived from a record."""

import pytest

from holdfast.trace.causes import CATEGORIES, Cause, cause_of


@pytest.mark.parametrize(
    ("state", "reason", "exit_code", "cause"),
    [
        ("FAILED", "NVLinkError", None, Cause("Infrastructure", "NVLinkError")),
        ("NODE_FAIL", None, None, Cause("Infrastructure", "NodeFailure")),
        # a recorded reason takes precedence
        ("NODE_FAIL", "KeyError", 1.0, Cause("Script", "KeyError")),
        ("OUT_OF_MEMORY", None, 137.0, Cause("Limit", "OUT_OF_MEMORY")),
        ("TIMEOUT", "", float("nan"), Cause("Limit", "TIMEOUT")),
        ("FAILED", None, 137.0, Cause("Signal", "SIGKILL")),
        ("FAILED", None, -11.0, Cause("Signal", "SIGSEGV")),
        ("FAILED", None, 1.0, Cause("Unknown", "unknown")),
        ("FAILED", None, 128.0, Cause("Unknown", "unknown")),
        ("FAILED", None, 255.0, Cause("Unknown", "unknown")),
        ("FAILED", None, float("nan"), Cause("Unknown", "unknown")),
        ("FAILED", "Evicted", None, Cause("Own", "Evicted")),
        ("FAILED", "Unknown", None, Cause("Unknown", "unknown")),
        (
            "FAILED",
            None,
            128.0 + 40,
            Cause("Signal", "signal 40"),
        ),  # a real-time signal has no name
    ],
)
def test_cause(state, reason, exit_code, cause):
    assert cause_of(state, reason, exit_code) == cause
    assert cause.category in CATEGORIES
