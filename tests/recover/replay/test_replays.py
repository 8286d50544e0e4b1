"""A replay from the broken loss to the record of its class, across supervisors."""

import asyncio

import pytest

from holdfast.core.explanation import explain
from holdfast.core.ledger import Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.telemetry import StepRecord
from holdfast.recover.detectors.anomaly import Anomaly
from holdfast.recover.recorder import Recorder
from holdfast.recover.replay.replays import Replays
from holdfast.testing import FakeClock

NAN = float("nan")
ANOMALY = Anomaly(kind="not finite", first_step=8, step=9, value=NAN, batches=(7, 9))


class Records:
    """The records of a run whose loss breaks at step 8."""

    def __init__(self, home, ledger):
        self.home, self.ledger, self.paths = home, ledger, RunPaths(home, "r")
        begun = {"run_id": "r", "state": "running", "cwd": "/", "host": "h", "pid": 1}
        ledger.add_run(Run(**begun, command=["python"], options={}, started_at_s=0.0))
        self.clock, self.complaints, self.seen = FakeClock(), [], []
        self.recorder = Recorder(self.paths, ledger, self.clock, self.complaints.append)

    def replays(self):
        return Replays(self.recorder, self.paths.steps, observe=lambda *one: self.seen.append(one))

    def attempt(self, number, start, losses, *, nodes, anomaly=None):
        recorder = self.recorder
        recorder.attempt_began(number)
        recorder.launched({name: name for name in nodes})
        if start:
            recorder.event("restored", {"step": start})
        recorder.first_step(start, 1.0)
        for step, loss in enumerate(losses, start + 1):
            record = StepRecord(attempt=number, rank=0, step=step, at_s=1.0, step_s=0.1, loss=loss)
            recorder.step(record)
        if anomaly is not None:
            recorder.ends(None, anomaly)

    def incident(self, attempt):
        said = {"reason": "Others", "fingerprint": "f", "decided_by": ["observer-not-finite"]}
        moments = {"fault_at_s": 1.0, "detected_at_s": 1.0}
        named = {"run_id": "r", "attempt": attempt, "kind": "anomaly", "rank": None, "step": 9}
        return self.recorder.incident(Incident(**named, **moments, diagnosis=said))

    def anomaly_class(self, incident_id):
        return self.ledger.incident(incident_id).diagnosis.get("anomaly")


@pytest.fixture
def records(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        records = Records(tmp_path, ledger)
        yield records
        records.recorder.close()


LOSSES = [2.0, 1.9, 1.8, 1.7, 1.6, 1.5, 1.4]


async def broken_once(records):
    """Have a loss break, and a replay decided; return the incident."""
    records.attempt(1, 0, [*LOSSES, NAN, NAN], nodes=("a", "b"), anomaly=ANOMALY)
    replays = records.replays()
    assert (await replays.failed(1)).replays
    incident_id = records.incident(1)
    replays.begin(incident_id, ANOMALY)
    return incident_id


def test_a_replay_that_passes_names_the_hardware_also_after_another_supervisor_began(records):
    async def run():
        incident_id = await broken_once(records)
        replays = records.replays()  # of the next supervisor
        replays.passed(20)  # no attempt has begun since
        records.attempt(2, 5, [1.5, 1.4, 1.3, 1.2, 1.1], nodes=("b", "a"))
        replays.passed(9)
        assert not records.seen, "the step that followed the broken ones is awaited"
        replays.passed(10)
        while not records.seen:
            await asyncio.sleep(0)
        assert replays.take_suspects() == ["a", "b"]
        assert replays.take_suspects() == []
        records.replays().passed(99)  # nothing is left to decide
        return incident_id

    incident_id = asyncio.run(run())
    assert records.anomaly_class(incident_id)["class"] == "hardware"
    ((kind, data),) = records.seen
    assert (kind, data["class"]) == ("anomaly_class", "hardware")
    said = "Cause: the hardware. Attempt 2 has passed step 8"
    assert said in data["text"]
    assert said in records.ledger.incident(incident_id).explanation
    (story,) = explain(records.ledger, records.home, "r").incidents
    assert said in story.done
    assert records.complaints == []


@pytest.mark.parametrize("leads", [True, False])
def test_the_end_of_a_run_waits_for_the_present_finding(records, leads):
    """If another supervisor leads, the finding is left to that one."""

    async def run():
        incident_id = await broken_once(records)
        records.attempt(2, 5, [1.5, 1.4, 1.3, 1.2, 1.1], nodes=("b", "a"))
        replays = records.replays()
        replays.passed(10)
        await replays.close(leads=leads)
        return incident_id

    incident_id = asyncio.run(run())
    assert len(records.seen) == leads
    assert (records.anomaly_class(incident_id) or {}).get("class") == (
        "hardware" if leads else None
    )


def test_what_breaks_again_is_recorded_of_both_incidents(records):
    async def run():
        first = await broken_once(records)
        records.attempt(2, 5, [1.5, 1.4, NAN, NAN], nodes=("b", "a"), anomaly=ANOMALY)
        replays = records.replays()
        finding = await replays.failed(2)
        second = records.incident(2)
        replays.found(finding, second, 2)
        assert replays.take_suspects() == []
        return first, second

    for incident_id in asyncio.run(run()):
        assert records.anomaly_class(incident_id)["class"] == "data_or_model"


def test_a_loss_that_breaks_again_and_is_lived_with_has_its_class_too(records):
    async def run():
        first = await broken_once(records)
        records.attempt(2, 5, [1.5, 1.4, NAN, NAN], nodes=("b", "a"))
        records.replays().accepted(ANOMALY)
        while not records.seen:
            await asyncio.sleep(0)
        return first

    assert records.anomaly_class(asyncio.run(run()))["class"] == "data_or_model"


def test_records_that_cannot_be_read_are_no_reason_to_fail(records):
    async def run():
        incident_id = await broken_once(records)
        records.attempt(2, 5, [1.5, 1.4, 1.3, 1.2, 1.1], nodes=("b", "a"))
        with records.paths.steps.open("a") as journal:
            journal.write("garbage\n")
        replays = records.replays()
        replays.passed(10)
        while not records.seen:
            await asyncio.sleep(0)
        assert (await replays.failed(2)).kind == "cannot_tell"
        return incident_id

    assert records.anomaly_class(asyncio.run(run()))["class"] == "cannot_tell"
    assert len(records.complaints) == 2
