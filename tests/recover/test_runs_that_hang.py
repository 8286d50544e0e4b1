"""Real runs that hang, pause, or lose a rank or their launcher: what is ended, and which rank is named."""

import signal

import psutil
import pytest

GLOO = """
import os, pathlib, sys, threading, time
import torch
import torch.distributed as dist
import holdfast

run = holdfast.attach()
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
once = pathlib.Path("fault-happened")
ckpt = holdfast.Checkpointer("checkpoints", every=100)
ckpt.restore({"model": model.module})

def fault():
    FAULT

for step in range(1, 13):
    model(torch.ones(2, 4)).sum().backward()
    ckpt.save(step, {"model": model.module})
    run.step(step)
    if step == 8 and dist.get_rank() == VICTIM and not once.exists():
        once.touch()
        fault()
"""
"""Two ranks that wait for each other in the backward pass; the fault strikes after a step was reported.

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


def gloo(fault: str, victim: int) -> str:
    return GLOO.replace("FAULT", fault).replace("VICTIM", str(victim))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "only_silence", "victim"),
    [
        ("lock = threading.Lock(); lock.acquire(); lock.acquire()", False, 0),
        ("time.sleep(10**6)", True, 1),
        ("while True: pass", True, 0),
    ],
    ids=["lock", "sleep", "busy"],
)
def test_a_rank_that_hangs_after_its_step_is_named(place, fault, only_silence, victim):
    script = place.job(gloo(fault, victim))
    limits = ["--hang-floor-s", "3", "--silence-limit-s", "3600" if not only_silence else "15"]
    code, _, err = place.holdfast(
        "run", "--name", "r", "--nproc", "2", *limits, "--", "python", script
    )
    assert code == 0, err
    incident = one_incident(place)
    assert (incident.kind, incident.rank, incident.step, incident.action) == (
        "hang",
        victim,
        8,
        "restart",
    )
    assert "it stands in fault (job.py:" in cited(incident)
    assert f"rank {1 - victim} (pid " in cited(incident)
    assert "stands in the backward pass: _engine_run_backward" in cited(incident)
    assert ("since only silence is known" in cited(incident)) is only_silence
    assert ('run.section("evaluate"' in err) is only_silence
    assert ("--silence-limit-s" in err) is only_silence


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "victim"), [("sys.exit(0)", 1), ("os._exit(0)", 0)])
def test_a_rank_that_leaves_the_others_is_named_and_not_the_one_that_lost_it(place, fault, victim):
    script = place.job(gloo(fault, victim))
    code, _, err = place.holdfast("run", "--name", "r", "--nproc", "2", "--", "python", script)
    assert code == 0, err
    incident = one_incident(place)
    assert (incident.kind, incident.rank, incident.action) == ("exit", victim, "restart")
    assert incident.diagnosis["decided_by"] == ["observer-left"]
    assert "exited with code 0 after step" in cited(incident)
    assert f"detected: the job failed, rank {1 - victim}" not in err


def test_a_rank_that_leaves_others_that_do_not_notice_has_failed(place):
    script = place.job(ALONE)
    code, _, err = place.holdfast("run", "--name", "r", "--nproc", "2", "--", "python", script)
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
    code, _, _ = place.holdfast("run", "--name", "r", "--nproc", "2", "--", "python", script)
    assert code == 1
    incident = one_incident(place)
    assert (incident.rank, incident.diagnosis["reason"]) == (0, "KeyError")


def test_a_pause_that_no_section_marks_is_no_hang(place):
    script = place.job(PAUSES)
    code, _, err = place.holdfast(
        "run", "--name", "r", "--nproc", "2", "--hang-floor-s", "1", "--", "python", script
    )
    assert code == 0, err
    with place.ledger() as ledger:
        assert ledger.incidents() == []
        assert len(ledger.attempts("r")) == 1


@pytest.mark.parametrize("victim", ["guard", "launcher"])
def test_a_killed_launcher_is_named_and_no_rank(place, victim):
    script = place.job(ALONE.replace("step == 8", "False"))
    with place.start("run", "--name", "r", "--nproc", "2", "--", "python", script) as process:
        place.wait_for_step("r", 12)
        guard = psutil.Process(process.pid).children()[0]
        (launcher,) = guard.children()
        {"guard": guard, "launcher": launcher}[victim].send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    incident = one_incident(place)
    assert (incident.kind, incident.rank, incident.action) == ("exit", None, "restart")
    assert "the launcher died after step" in cited(incident)
    assert "rank" not in incident.diagnosis["scope"]
    assert "detected: the job failed\n" in err
    assert incident.diagnosis["decided_by"] == ["observer-launcher"]
