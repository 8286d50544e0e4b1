"""Check that the coordinator starts fast, since it may restart often."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "lm_eval", "inspect_ai", "datasets", "numpy")


def test_the_coordinator_imports_neither_torch_nor_a_harness():
    code = "import sys, holdfast.evaluate.coordinator.server; print(*sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=240
    )
    assert "holdfast.evaluate.policy.decisions" in said.stdout.split()
    assert [name for name in HEAVY if name in said.stdout.split()] == []
