"""Records of each kind, and a check that any database returns them unchanged."""

from dataclasses import replace

from holdfast.core.ledger import Attempt, Checkpoint, Event, Incident, Ledger, Run, Verdict

RUN = Run(
    run_id="a",
    state="running",
    command=["python", "train.py", "é\udc80"],
    options={"nproc": 2},
    cwd="/x",
    host="h",
    pid=1,
    started_at_s=1.25,
)
ATTEMPT = Attempt(run_id="a", number=1, started_at_s=2.0)
EVENT = Event(run_id="a", attempt=1, at_s=3.0, kind="restored", rank=1, data={"step": 3})
INCIDENT = Incident(
    run_id="a",
    attempt=1,
    kind="exit",
    rank=1,
    step=9,
    fault_at_s=4.0,
    detected_at_s=4.5,
    diagnosis={"reason": "x"},
)
CHECKPOINT = Checkpoint(
    run_id="a",
    attempt=1,
    step=5,
    path="p",
    state="written",
    size_bytes=1 << 40,
    stall_s=0.5,
    committed_at_s=3.5,
)


def check_that_records_come_back(url, ledger):
    """Check that records added to `ledger` are found by another ledger opened at `url`."""
    ledger.add_run(RUN)
    ledger.add_attempt(ATTEMPT)
    ledger.add_event(EVENT)
    ledger.add_checkpoint(CHECKPOINT)
    key = ledger.add_incident(INCIDENT)
    verdict = Verdict(name="n1", outcome="bad", probability=0.98, evidence="e")
    ledger.add_verdicts([verdict], at_s=5.0, by="a", cordons=["n1"])
    with Ledger.open(url) as other:
        assert other.runs() == [RUN]
        (node,) = other.nodes()
        assert (node.name, node.cordoned_at_s, node.cordoned_by) == ("n1", 5.0, "a")
        assert node.verdicts[0]["probability"] == node.probability == 0.98
        assert other.run("a") == RUN
        assert other.attempts("a") == [ATTEMPT]
        assert other.events("a") == other.events("a", "restored") == [EVENT]
        assert other.events("a", "proof") == []
        assert other.checkpoints("a") == [CHECKPOINT]
        assert (
            other.incidents()
            == other.incidents("a")
            == [other.incident(key)]
            == [replace(INCIDENT, incident_id=key)]
        )
        assert other.incidents("b") == []
