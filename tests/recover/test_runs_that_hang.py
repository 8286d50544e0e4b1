"""Real runs that hang, pause, or lose a rank or their launcher, and the ranks blamed for it."""

import pytest

GLOO_FAULTS = [
    (0, "lock = threading.Lock(); lock.acquire(); lock.acquire()"),
    (1, "while True: pass"),
    (0, "os._exit(0)"),
]
"""The faulty rank of each attempt, and its fault."""
GLOO = """
import os, pathlib, sys, threading, time
import torch
import torch.distributed as dist
import holdfast

run = holdfast.attach()
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
attempt = int(os.environ["HOLDFAST_ATTEMPT"])
faults = FAULTS
ckpt = holdfast.Checkpointer("checkpoints", every=100)
ckpt.restore({"model": model.module})

def fault():
    WHAT

for step in range(1, 4 * attempt + 5):
    model(torch.ones(2, 4)).sum().backward()
    ckpt.save(step, {"model": model.module})
    run.step(step)
    if step == 4 * attempt and attempt <= len(faults) and dist.get_rank() == faults[attempt - 1]:
        fault()
"""
"""Two ranks that wait for each other in the backward pass; a fault strikes in each attempt after a
step was reported.

Their Checkpointers go on looking into the store that rank 0 serves.
"""

ALONE = """
import os, pathlib, sys, time
import holdfast

run = holdfast.attach()
rank = int(os.environ["RANK"])
once = pathlib.Path("fault-happened")
attempt = os.environ["HOLDFAST_ATTEMPT"]
pathlib.Path(f"ready-{attempt}-{rank}").touch()
while len([*pathlib.Path().glob(f"ready-{attempt}-*")]) < 2:  # else one might end long before the other
    time.sleep(0.01)
for step in range(1, 10_000):
    time.sleep(0.02)
    run.step(step)
    if step == 8 and rank == 1 and not once.exists():
        once.touch()
        sys.exit(0)
    if pathlib.Path("finish").exists() or (step > 8 and attempt != "1"):
        break
"""
"""Two ranks that do not wait for each other; one leaves the other in the middle of the training."""

PAUSES = """
import os, time
import holdfast

run = holdfast.attach()
for step in range(1, 9):
    time.sleep(0.02)
    run.step(step)
    if step == 4 and os.environ["RANK"] == "0":
        time.sleep(4)
time.sleep(4)
"""
"""A rank pauses in the middle while the other goes on, and both pause after their last step."""


def one_incident(place):
    with place.ledger() as ledger:
        (incident,) = ledger.incidents()
    return incident


def cited(incident) -> str:
    return "\n".join(line["text"] for line in incident.diagnosis["evidence"])


@pytest.fixture(scope="module")
def faulty(shared_place):
    """A run of two ranks with one fault per attempt: its output and its incidents."""
    what = "\n".join(
        f"    if attempt == {number}:\n        {fault}"
        for number, (_, fault) in enumerate(GLOO_FAULTS, 1)
    )
    text = GLOO.replace("FAULTS", str([victim for victim, _ in GLOO_FAULTS]))
    script = shared_place.job(text.replace("    WHAT", what))
    limits = ["--hang-floor-s", "3", "--silence-limit-s", "15"]
    command = ["run", "--name", "r", "--nproc", "2", *limits, "--", "python", script]
    code, _, err = shared_place.holdfast(*command, timeout_s=400)
    assert code == 0, err
    with shared_place.ledger() as ledger:
        return err, ledger.incidents("r")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "only_silence"), [(1, False), (2, True)], ids=["lock", "busy"])
def test_a_rank_that_hangs_after_its_step_is_named(faulty, number, only_silence):
    err, incidents = faulty
    incident, (victim, _) = incidents[number - 1], GLOO_FAULTS[number - 1]
    assert (incident.kind, incident.rank, incident.step, incident.action) == (
        "hang",
        victim,
        4 * number,
        "restart",
    )
    assert "it stands in fault (job.py:" in cited(incident)
    assert f"rank {1 - victim} (pid " in cited(incident)
    assert "stands in the backward pass: _engine_run_backward" in cited(incident)
    assert ("since only silence is known" in cited(incident)) is only_silence
    of_it = err.split("detected: ")[number]
    assert ('run.section("evaluate"' in of_it) is only_silence
    assert ("--silence-limit-s" in of_it) is only_silence


@pytest.mark.slow
def test_a_rank_that_leaves_the_others_is_named_and_not_the_one_that_lost_it(faulty):
    (err, incidents), number = faulty, 3
    incident, (victim, _) = incidents[number - 1], GLOO_FAULTS[number - 1]
    assert (incident.kind, incident.rank, incident.action) == ("exit", victim, "restart")
    assert incident.diagnosis["decided_by"] == ["observer-left"]
    assert "exited with code 0 after step" in cited(incident)
    assert f"the job failed, rank {1 - victim}" not in err.split("detected: ")[number]


def test_a_rank_that_leaves_others_that_do_not_notice_has_failed(place):
    job = place.ranks(2, place.job(ALONE))
    code, _, err = place.holdfast("run", "--name", "r", "--", *job)
    assert code == 0, err
    incident = one_incident(place)
    assert (incident.kind, incident.rank, incident.action) == ("exit", 1, "restart")
    assert "rank 1 " in cited(incident)
    assert "exited with code 0 after step 8, while the others went on; it ended first" in cited(
        incident
    )
    assert incident.detected_at_s - incident.fault_at_s > 5


def test_an_error_of_a_rank_is_not_laid_on_one_that_completed(place):
    script = place.job(
        "import os, sys, pathlib, time, holdfast\n"
        "run = holdfast.attach()\nrun.step(1)\n"
        "if os.environ['RANK'] == '1':\n    pathlib.Path('done').touch()\n    sys.exit(0)\n"
        "while not pathlib.Path('done').exists():\n    time.sleep(0.01)\n"
        "time.sleep(1)\nraise KeyError('export')\n"
    )
    job = place.ranks(2, script)
    code, _, _ = place.holdfast("run", "--name", "r", "--", *job)
    assert code == 1
    incident = one_incident(place)
    assert (incident.rank, incident.diagnosis["reason"]) == (0, "KeyError")


def test_a_pause_that_no_section_marks_is_no_hang(place):
    job = place.ranks(2, place.job(PAUSES))
    code, _, err = place.holdfast("run", "--name", "r", "--hang-floor-s", "1", "--", *job)
    assert code == 0, err
    with place.ledger() as ledger:
        assert ledger.incidents() == []
        assert len(ledger.attempts("r")) == 1
