"""Set up the tests of commands: the logs of a failed job, and the diagnosis that a run records."""

import json
from importlib import resources

import jsonschema
import pytest
from diagnose_calls import FAILED

STEPS = [f"step {step} loss {2.5 - step / 100:.3f}" for step in range(40)]
PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.{}]:{}"


@pytest.fixture
def diagnosis():
    """Return a diagnosis as an incident records it."""
    return {
        "schema": "holdfast.diagnosis",
        "version": 1,
        "reason": "KeyError",
        "category": "Script",
        "root_line": {"file": "rank-1.log", "line": 3, "text": "KeyError: 'x'"},
        "evidence": [
            {"file": "rank-1.log", "line": 3, "text": "KeyError: 'x' [bold]", "role": "root"}
        ],
        "scope": {"rank": 1},
        "action": "user_must_fix",
        "restart_helps": False,
        "mitigation": "Correct the script.",
        "confidence": 0.85,
        "decided_by": ["python-key-error"],
    }


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of 64 ranks in which rank 1 fails and the others lose their connection to it."""
    folder = tmp_path_factory.mktemp("job")
    for rank in range(64):
        peer = [
            "Traceback (most recent call last):",
            '  File "/job/train.py", line 30, in <module>',
            "    reduce()",
        ]
        end = FAILED if rank == 1 else [*peer, PEER.format(rank, 20000 + rank)]
        (folder / f"rank-{rank}.log").write_text("\n".join([*STEPS, *end]) + "\n")
    return folder


@pytest.fixture(scope="module")
def log(job):
    """Return the log of the rank that fails."""
    return job / "rank-1.log"


@pytest.fixture(scope="module")
def schema():
    """Return the published schema of a diagnosis."""
    text = (resources.files("holdfast.diagnose.explain") / "diagnosis.schema.json").read_text(
        "utf-8"
    )
    found = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(found)
    return found
