"""Real runs, real faults: two ranks, signals.

The jobs need no torch, and where the launcher does not matter, it needs none either.
"""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time

import pytest

import json_schemas
from holdfast.recover.leadership import SharedFolder

HOLDFAST = [sys.executable, "-m", "holdfast.cli.main"]

TRAIN = """
import os, sys, time, pathlib, signal
import holdfast

run = holdfast.attach()
rank = int(os.environ["RANK"])
once = pathlib.Path("fault-happened")
attempt = os.environ["HOLDFAST_ATTEMPT"]

def fault(step):
    if step == 8 and rank == 1 and not once.exists():
        once.touch()
        return True

start = int(pathlib.Path("progress").read_text()) if pathlib.Path("progress").exists() else 0
for step in range(start + 1, 21):
    time.sleep(0.02)
    if fault(step):
        FAULT
    run.step(step, loss=1 / step)
    print(f"step {step} loss {1 / step}")
    if rank == 0 and step % 5 == 0:
        pathlib.Path("progress-next").write_text(str(step))  # it may be killed at any moment
        os.replace("progress-next", "progress")
    (barrier := pathlib.Path(f"at-{attempt}-{rank}")).write_text(str(step))
    deadline = time.monotonic() + 60
    while True:
        other = pathlib.Path(f"at-{attempt}-{1 - rank}")
        text = other.read_text() if other.exists() else ""
        if text and int(text) >= step:
            break
        assert time.monotonic() < deadline
        time.sleep(0.005)
"""
"""Two ranks that wait for each other after every step, like collectives; they save every fifth."""

QUICK_HANG = ["--hang-floor-s", "1"]


def train(fault: str) -> str:
    return TRAIN.replace("FAULT", fault)


def only_run(place) -> str:
    with place.ledger() as ledger:
        (run,) = ledger.runs()
    return run.run_id


def incidents(place):
    with place.ledger() as ledger:
        return ledger.incidents()


def cited(incident) -> str:
    return "\n".join(line["text"] for line in incident.diagnosis["evidence"])


FAULTS = [
    (8, "os.kill(os.getpid(), signal.SIGKILL)"),
    (8, "os.kill(os.getpid(), signal.SIGKILL)"),
    (13, "os.kill(os.getpid(), signal.SIGSTOP)"),
    (18, "time.sleep(1000)"),
    (20, "raise KeyError('tokens')"),
]
"""At which step of each attempt, and what happens to rank 1 there."""


@pytest.fixture(scope="module")
def eventful(shared_place):
    """A run of a torchrun with a fault per attempt; the last ends it: place, exit code, outputs."""
    faults = "".join(
        f"    if (os.environ['HOLDFAST_ATTEMPT'], rank, step) == ('{attempt}', 1, {step}):\n        {fault}\n"
        for attempt, (step, fault) in enumerate(FAULTS, 1)
    )
    script = shared_place.job(TRAIN.replace("    if fault(step):\n        FAULT\n", faults))
    limits = [*QUICK_HANG, "--silence-limit-s", "15"]
    command = ["run", *limits, "--", "torchrun", "--nproc-per-node=2", script]
    done = shared_place.holdfast(*command, timeout_s=400)
    assert [incident.action for incident in incidents(shared_place)] == ["restart"] * 4 + ["stop"]
    return shared_place, *done


def test_a_killed_rank_is_found_and_the_run_goes_on(eventful):
    """A rank killed from outside twice at the same step is restarted twice."""
    place, _, out, _ = eventful
    for incident in incidents(place)[:2]:
        assert (incident.kind, incident.rank, incident.action) == ("exit", 1, "restart")
        assert "was killed by SIGKILL" in cited(incident)
        assert incident.diagnosis["restart_helps"]
        assert incident.fault_at_s <= incident.detected_at_s < incident.resumed_at_s
        assert incident.detected_at_s - incident.fault_at_s < 10.0
    with place.ledger() as ledger:
        attempts = ledger.attempts(only_run(place))
    assert {attempt.outcome for attempt in attempts} == {"failed"}
    assert [attempt.start_step for attempt in attempts] == [0, 5, 5, 10, 15]
    assert "[rank0] step 5 loss 0.2\n" in out
    listed = " ".join(place.look("incidents", "ls")[1].split())
    assert "Others" not in listed
    assert {"SIGKILL", "KeyError"} <= set(re.findall(r"\w+", listed))


def test_a_frozen_rank_is_named_and_the_run_goes_on(eventful):
    incident = incidents(eventful[0])[2]
    assert (incident.kind, incident.rank, incident.action) == ("hang", 1, "restart")
    assert "rank 1" in cited(incident)
    assert "process state T" in cited(incident)


def test_a_rank_that_waits_for_ever_is_named_because_it_is_behind(eventful):
    incident = incidents(eventful[0])[3]
    assert (incident.kind, incident.rank) == ("hang", 1)
    assert "behind the others at step 17" in cited(incident)


def test_an_error_of_the_users_own_stops_the_run_at_once(eventful):
    place, code, _, err = eventful
    assert code == 1
    incident = incidents(place)[4]
    assert (incident.action, incident.diagnosis["reason"]) == ("stop", "KeyError")
    assert incident.diagnosis["root_line"]["text"].endswith("KeyError: 'tokens'")
    assert "A restart does not mend this. KeyError: " in err
    with place.ledger() as ledger:
        assert len(ledger.attempts(only_run(place))) == 5


def test_a_rank_that_dies_at_the_same_step_again_is_not_restarted_for_ever(place):
    """And a spent budget is an exit code of its own; a resume keeps the options and takes new ones."""
    fault = "os.kill(os.getpid(), signal.SIGKILL if attempt == '1' else signal.SIGSEGV)"
    script = place.job(train(fault).replace("not once.exists()", "True"))
    options = ["--name", "r", "--log-max-mib", "8", "--max-restarts", "0"]
    code, _, err = place.holdfast("run", *options, "--", *place.ranks(2, script))
    assert code == 3
    assert "--max-restarts" in err
    code, _, err = place.holdfast("run", "--resume", "r", "--max-restarts", "7")
    assert code == 1
    assert "The same root came back" in err
    assert [incident.action for incident in incidents(place)] == ["stop", "restart", "stop"]
    with place.ledger() as ledger:
        options = ledger.run("r").options
    assert (options["log_max_mib"], options["restarts"]["max_restarts"]) == (8, 7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--", "python", "no-such-script.py"], "There is no script 'no-such-script.py'"),
        (["--", "no-such-program"], "There is no program 'no-such-program'"),
        (["--", "a/job.py"], "Run a script by its interpreter: holdfast run -- python a/job.py"),
        (["--", "./job.sh"], "./job.sh is not executable. Run: chmod +x ./job.sh, or"),
        (["--", ""], "There is no program ''"),
        (["--", "."], "There is no program '.'"),
        ([], "Nothing to run"),
        (["--nproc", "0", "--", "python", "job.py"], "--nproc is 0; it must be at least 1"),
        (
            ["--window-s", "-1", "--", "python", "job.py"],
            "--window-s is -1.0; it must be more than 0",
        ),
        (["--name", "a/b", "--", "python", "job.py"], "--name 'a/b'"),
        (["--resume", "no-such-run"], "There is no run 'no-such-run'"),
        (["--resume", "x", "--", "python", "job.py"], "leave the command and --name out"),
        (["--", "torchrun", "--max-restarts", "3", "job.py"], "Holdfast restarts the job itself"),
        (["--", "torchrun", "--nnodes=2", "job.py"], "2 nodes need a rendezvous"),
        (["--nnodes=2", "--", "python", "job.py"], "--rendezvous HOST:PORT"),
        (["--rendezvous=n1:1", "--", "python", "job.py"], "give --nnodes N too"),
        (["--nnodes=2", "--rendezvous=n1", "--", "python", "job.py"], "HOST:PORT"),
        (
            ["--nnodes=2", "--rendezvous=no-such-host.invalid:29500", "--", "python", "job.py"],
            "has no address",
        ),
        (["--spares=1", "--", "python", "job.py"], "--spares is for a Slurm step"),
        (["--", "torchrun", "--no-python", "job.sh"], "holdfast run --nproc N"),
        (["--", "torchrun", "--run-path", "job.py"], "holdfast run --nproc N"),
    ],
)
def test_bad_use_is_one_clear_sentence(place, arguments, said):
    place.job("")
    (place.folder / "job.sh").touch()
    code, out, err = place.look("run", *arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert out == ""


def test_a_missing_script_of_torchrun_ends_in_its_diagnosis(place):
    code, _, err = place.holdfast("run", "--", *place.ranks(1, "no-such-script.py"))
    assert code == 1
    assert "FileNotFoundError" in err
    assert "no-such-script.py" in err


def test_a_flood_of_output_is_bounded_and_said_and_so_is_exit_0_without_a_step(place):
    mib = 24
    script = place.job(
        "import sys\nline = 'x' * 1023 + '\\n'\n"
        f"for _ in range({mib} * 1024):\n    sys.stdout.write(line)\nprint('the end')"
    )
    options = ["--no-echo", "--log-max-mib", "4"]
    code, _, err = place.holdfast("run", *options, "--", *place.ranks(1, script))
    assert code == 0, err
    dropped = int(re.search(r"and (\d+) MiB before them dropped", err)[1])
    assert mib - 6 < dropped < mib
    assert "--log-max-mib" in err
    assert "without reporting a step" in err
    assert "holdfast.attach()" in err
    logs = place.paths(only_run(place)).logs
    kept_bytes = sum(log.stat().st_size for log in logs.rglob("rank-0.log*"))
    assert 2 * 2**20 < kept_bytes <= 5 * 2**20
    _, out, _ = place.holdfast("logs", only_run(place), "--rank", "0")
    assert out.endswith("the end\n")
    assert len(out) == kept_bytes


ENDLESS = """
import os, subprocess, sys, time
import holdfast

run = holdfast.attach()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
step = 0
while True:
    step += 1
    time.sleep(0.05)
    run.step(step)
"""
"""Trains for ever, without a Checkpointer, beside a child of its own in a session of its own."""


def test_ctrl_c_leaves_no_process(place):
    """Until then the run is going, and cannot be resumed or removed."""
    job = place.ranks(2, place.job(ENDLESS))
    with place.start("run", "--name", "r", "--", *job) as process:
        place.wait_for_step("r", 3)
        for command in (["run", "--resume", "r"], ["runs", "rm", "r"]):
            code, _, err = place.look(*command)
            assert (code, "still going" in err) == (2, True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert process.returncode == 4
    assert "Stopped by Ctrl-C." in err
    assert "No checkpoint was saved" in err
    place.nothing_is_left()


UNTIL_FINISHED = """
import os, pathlib, time
import holdfast

run = holdfast.attach()
attempt = os.environ["HOLDFAST_ATTEMPT"]
pathlib.Path(f"at-{attempt}-{os.environ['RANK']}").touch()
step = 1000 * int(attempt)
while not pathlib.Path("finish").exists():
    step += 1
    time.sleep(0.05)
    run.step(step)
"""
"""Ranks that do not wait for each other; each attempt gets further than the one before."""


def test_whatever_is_killed_no_process_is_left_and_the_run_goes_on(place):
    """kill -9 of the node's process, and of each one between it and the ranks.

    No rank is blamed for a launcher.
    """
    job = place.ranks(2, place.job(UNTIL_FINISHED))
    with place.start("run", "--name", "r", "--", *job) as process:
        place.wait_for_step("r", 1003)
        process.kill()
        process.communicate(timeout=240)
    place.wait_until(lambda: not place.processes())
    assert place.json("runs", "ls")["runs"][0]["state"] == "lost"
    with place.start("run", "--resume", "r") as process:
        for attempt, victim in enumerate(["shim", "guard", "launcher"], 2):
            for rank in range(2):
                place.wait_until((place.folder / f"at-{attempt}-{rank}").exists)
            place.wait_for_step("r", 1000 * attempt + 3)
            guard = place.child(process, "guard")
            (launcher,) = guard.children()
            shims = launcher.children()
            whole = {guard, *guard.children(recursive=True)}
            {"guard": guard, "launcher": launcher, "shim": shims[1]}[victim].kill()
            place.wait_for_step("r", 1000 * (attempt + 1) + 3)
            place.nothing_is_left(whole)
        (place.folder / "finish").touch()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert err.count("detected: the job failed\n") == 2
    with place.ledger() as ledger:
        outcomes = [attempt.outcome for attempt in ledger.attempts("r")]
        assert outcomes == ["failed"] * 4 + ["completed"]
        assert ledger.run("r").state == "completed"
        assert ledger.events("r", "supervisor_lost")
        of_shim, *of_launcher = ledger.incidents("r")
    assert (of_shim.kind, of_shim.rank, of_shim.action) == ("exit", 1, "restart")
    assert len(of_launcher) == 2
    for incident in of_launcher:
        assert (incident.kind, incident.rank, incident.action) == ("exit", None, "restart")
        assert "the launcher died after step" in cited(incident)
        assert "rank" not in incident.diagnosis["scope"]
        assert incident.diagnosis["decided_by"] == ["observer-launcher"]


def test_a_killed_supervisor_or_agent_ends_no_rank(place):
    """The next one takes over the attempt that is going on.

    A rank that is killed meanwhile is not missed.
    """
    job = place.ranks(2, place.job(UNTIL_FINISHED))
    with place.start("run", "--name", "r", "--", *job) as process:
        place.wait_for_step("r", 1003)
        guard = place.child(process, "guard")
        ranks = {one.pid for one in guard.children(recursive=True)}
        for victim in ("agent", "supervisor_process"):
            place.child(process, victim).kill()
            place.wait_for_step("r", place.last_step("r") + 20)
        assert ranks <= {one.pid for one in guard.children(recursive=True)}
        assert incidents(place) == []
        with place.ledger() as ledger:
            place.wait_until(lambda: ledger.events("r", "supervisor_followed"))
        agent = place.child(process, "agent")
        agent.suspend()
        (rank,) = (
            one
            for one in guard.children(recursive=True)
            if one.cmdline()[1:] == ["-u", "job.py"] and one.environ()["RANK"] == "1"
        )
        place.child(process, "supervisor_process").kill()
        rank.kill()
        agent.kill()
        place.wait_for_step("r", 2003)
        (place.folder / "finish").touch()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    (incident,) = incidents(place)
    assert (incident.kind, incident.rank, incident.action) == ("exit", 1, "restart")
    with place.ledger() as ledger:
        assert [one.outcome for one in ledger.attempts("r")] == ["failed", "completed"]
        assert len(ledger.events("r", "supervisor_followed")) == 2
    assert SharedFolder(place.paths("r")).sign()[0] == 3


def test_node_and_guard_killed_together_leave_no_rank(place):
    job = place.ranks(2, place.job(UNTIL_FINISHED))
    with place.start("run", "--name", "r", "--", *job) as process:
        place.wait_for_step("r", 3)
        guard = place.child(process, "guard")
        guard.suspend()
        os.kill(process.pid, signal.SIGKILL)
        guard.kill()
        process.communicate(timeout=240)
    place.wait_until(lambda: not place.processes())


@pytest.mark.slow
def test_detached_runs_need_no_terminal(place):
    """Started from a shell whose session ends, followed, stopped and removed with other commands.

    Since there is no Checkpointer, the stop runs the script's own handler of SIGTERM.
    """
    script = place.job(
        "import signal, sys, time, pathlib, holdfast\nrun = holdfast.attach()\n"
        "def save(*_):\n    pathlib.Path('saved').write_text('x')\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nstep = 0\n"
        "while True:\n    step += 1\n    time.sleep(0.05)\n    run.step(step)\n"
        "    print('step', step)\n"
    )
    options = ["--detach", "--name", "r", "--json"]
    command = [*HOLDFAST, "run", *options, "--", *place.ranks(1, script)]
    shell = subprocess.run(
        [sys.executable, "-c", f"import subprocess, sys; sys.exit(subprocess.call({command!r}))"],
        cwd=place.folder,
        env=place.environment,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert shell.returncode == 0, shell.stderr
    assert json_schemas.check(json.loads(shell.stdout))["state"] == "running"
    place.wait_for_step("r", 3)
    (listed,) = place.json("runs", "ls")["runs"]
    assert listed["state"] == "running"
    assert listed["step"] >= 3, "though the ledger gets the step at the end of the attempt"
    with place.start("logs", "r", "-f") as follower:
        assert "step" in follower.stdout.readline()
        code, out, err = place.look("runs", "stop", "r")
        assert code == 0, err
        assert "Stopped by" in out
        assert (place.folder / "saved").exists()
        follower.communicate(timeout=240)
    assert place.json("runs", "show", "r")["state"] == "stopped"
    assert place.look("runs", "stop", "r")[0] == 2
    assert place.look("runs", "rm", "r")[0] == 0
    assert not place.paths("r").root.exists()
    assert place.json("runs", "ls")["runs"] == []
    # Nobody waits for the detached process, which may still be at the exit of its interpreter.
    place.wait_until(lambda: not place.processes())


def test_a_suspended_supervisor_blames_nobody(place):
    """SIGSTOP of supervisor and agent for longer than the hang limit: no incident when they go on."""
    job = place.ranks(2, place.job(UNTIL_FINISHED))
    with place.start("run", "--name", "r", *QUICK_HANG, "--", *job) as process:
        place.wait_for_step("r", 1003)
        suspended = [place.child(process, name) for name in ("agent", "supervisor_process")]
        for one in suspended:
            one.suspend()
        (place.folder / "finish").touch()
        time.sleep(3.0)
        for one in suspended:
            one.resume()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert incidents(place) == []


def test_a_full_disk_under_the_records_costs_records_and_not_the_training(
    place, small_disk, fill, monkeypatch
):
    """Ledger, journal and logs are on a full disk: the job, with its files elsewhere, completes."""
    monkeypatch.setattr(type(place), "home", small_disk / "home")
    waits = "while not pathlib.Path('filled').exists(): time.sleep(0.01)"
    script = place.job(train(waits).replace("range(start + 1, 21)", "range(start + 1, 200)"))
    job = place.ranks(2, script)
    with place.start("run", "--name", "r", "--no-echo", "--", *job) as process:
        place.wait_for_step("r", 5)
        fill(small_disk / "ballast")
        (place.folder / "filled").touch()
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert (place.folder / "progress").read_text() == "195"
    assert "The job completed." in err
    assert "full" in err or "No space" in err


@pytest.mark.parametrize("waits", ["for nothing", "for the guard"])
def test_ctrl_c_while_the_job_is_being_started(place, waits):
    script = place.job(ENDLESS)
    with place.start("run", "--name", "r", "--", "python", script) as process:
        assert "attempt 1" in process.stderr.readline()
        if waits == "for the guard":
            place.child(process, "guard")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
    assert process.returncode == 4


def test_a_closed_terminal_stops_the_run(place):
    """A pseudo-terminal that goes away: SIGHUP, and every write to it fails."""
    script = place.job(ENDLESS)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*HOLDFAST, "run", "--name", "r", "--", *place.ranks(1, script)],
        cwd=place.folder,
        env=place.environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),  # noqa: PLW1509
    )
    os.close(theirs)
    place.wait_for_step("r", 3)
    os.close(ours)
    assert process.wait(timeout=240) == 4
    with place.ledger() as ledger:
        assert ledger.run("r").outcome.startswith("Stopped by a closed terminal.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "frozen",
    [
        "guard",
        "agent",
    ],
)
def test_a_frozen_process_does_not_make_a_run_unstoppable(place, frozen):
    script = place.job(ENDLESS)
    with place.start("run", "--name", "r", "--", *place.ranks(1, script)) as process:
        place.wait_for_step("r", 3)
        place.child(process, frozen).suspend()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
    assert process.returncode == 4
