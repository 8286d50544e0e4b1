"""Write the ledger of a demo's three runs without running a job."""

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.ledger import Attempt, Checkpoint, Event, Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.telemetry import StepJournal, StepRecord

EPOCH_S = 1_790_000_000.0
HOSTILE_LINE = "RuntimeError: <script>alert('x')</script> & \x1b[31mred\x1b[0m \u202etxt.exe https://evil.example/a.png"


def diagnosis(
    reason: str, category: str, lines: list[tuple[str, int, str, str]], **more: Any
) -> dict[str, Any]:
    evidence = [
        {"file": file, "line": line, "text": text, "role": role} for file, line, text, role in lines
    ]
    root = next(
        (
            {k: v for k, v in item.items() if k != "role"}
            for item in evidence
            if item["role"] == "root"
        ),
        None,
    )
    return {
        "schema": "holdfast.diagnosis",
        "version": 1,
        "reason": reason,
        "category": category,
        "root_line": root,
        "evidence": evidence,
        "scope": {"ranks": [1]},
        "action": "restart",
        "restart_helps": True,
        "mitigation": "Nothing to mend: restart from the newest checkpoint.",
        "confidence": 0.95,
        "decided_by": ["exit_signal"],
    } | more


@dataclass
class Scribe:
    """Writes a run step by step under its own clock."""

    ledger: Ledger
    home: Path
    run_id: str
    step_s: float = 0.21
    now_s: float = EPOCH_S
    attempt: int = 0
    step: int = 0
    saved: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.run_id)
        self.ledger.add_run(
            Run(
                run_id=self.run_id,
                state="running",
                command=["python", "-m", "holdfast.demo.train", "--steps", "400"],
                options={"nproc": 2},
                cwd="/home/ada/tryout",
                host="node-17",
                pid=4711,
                started_at_s=self.now_s,
            )
        )
        self.journal = StepJournal(RunPaths(self.home, self.run_id).steps)

    def begin(self, step: int = 0, passed_over: list[dict[str, Any]] | None = None) -> None:
        self.attempt += 1
        self.ledger.add_attempt(
            Attempt(run_id=self.run_id, number=self.attempt, started_at_s=self.now_s)
        )
        self.now_s += 3.1
        if step:
            data = {"step": step, "path": f"checkpoints/step-{step}", "restore_s": 0.31}
            self.event("restored", **data, passed_over=passed_over or [])
            self.now_s += 0.4
        self.step = step
        self.first = True

    def event(self, kind: str, /, **data: Any) -> None:
        row = Event(
            run_id=self.run_id,
            attempt=self.attempt,
            at_s=self.now_s,
            kind=kind,
            rank=data.get("rank"),
            data=data,
        )
        self.ledger.add_event(row)

    def train(self, until: int, *, every: int = 20) -> None:
        while self.step < until:
            self.step += 1
            took_s = self.step_s * self.random.uniform(0.93, 1.1) + (0.9 if self.first else 0.0)
            self.now_s += took_s
            loss = 1.9 + 3.7 * math.exp(-self.step / 90) + self.random.gauss(0, 0.05)
            metrics = {}
            if self.step % 50 == 0:
                metrics["val_loss"] = 2.0 + 3.65 * math.exp(-self.step / 90)
            if self.first:
                changes = {"start_step": self.step - 1, "first_step_at_s": self.now_s}
                self.ledger.set_attempt(self.run_id, self.attempt, **changes)
                for incident in self.ledger.incidents(self.run_id):
                    if incident.resumed_at_s is None:
                        changes = {"resumed_at_s": self.now_s, "restored_step": self.step - 1}
                        self.ledger.set_incident(incident.incident_id, **changes)
            self.first = False
            self.journal.append(
                StepRecord(
                    attempt=self.attempt,
                    rank=0,
                    step=self.step,
                    at_s=self.now_s,
                    step_s=took_s,
                    loss=loss,
                    metrics=metrics,
                )
            )
            if metrics:
                self.now_s += 0.6
            if self.step % every == 0:
                self.save()

    def save(self) -> None:
        stall_s = self.random.uniform(0.05, 0.11)
        self.now_s += stall_s
        self.ledger.add_checkpoint(
            Checkpoint(
                run_id=self.run_id,
                attempt=self.attempt,
                step=self.step,
                path=f"checkpoints/step-{self.step}",
                state="written",
                size_bytes=9_871_204,
                stall_s=stall_s,
                committed_at_s=self.now_s,
            )
        )

    def fail(
        self, kind: Any, rank: int, after_s: float, found: dict[str, Any], action: str, why: str
    ) -> None:
        fault_at_s, self.now_s = self.now_s, self.now_s + after_s
        self.ledger.add_incident(
            Incident(
                run_id=self.run_id,
                attempt=self.attempt,
                kind=kind,
                rank=rank,
                step=self.step,
                fault_at_s=fault_at_s,
                detected_at_s=self.now_s,
                diagnosis=found,
                action=action,
                explanation=why,
            )
        )
        self.now_s += 0.3
        changes = {"outcome": "failed", "ended_at_s": self.now_s, "last_step": self.step}
        self.ledger.set_attempt(self.run_id, self.attempt, **changes)
        self.now_s += 1.0

    def end(self, state: Any, exit_code: int, outcome: str) -> None:
        self.now_s += 0.7
        if state == "completed":
            changes = {"outcome": "completed", "ended_at_s": self.now_s, "last_step": self.step}
            self.ledger.set_attempt(self.run_id, self.attempt, **changes)
        changes = {
            "state": state,
            "ended_at_s": self.now_s,
            "exit_code": exit_code,
            "outcome": outcome,
        }
        self.ledger.set_run(self.run_id, **changes)
        self.journal.close()


def faulty_run(ledger: Ledger, home: Path, run_id: str = "demo-1") -> None:
    job = Scribe(ledger, home, run_id)
    job.begin()
    job.train(93)
    job.now_s += 0.1
    job.event(
        "fault_injected", fault="SIGKILL", detail="Rank 1 was killed with SIGKILL.", rank=1, step=93
    )
    killed = diagnosis(
        "Rank 1 was killed from outside with SIGKILL",
        "killed",
        [
            (
                "logs/attempt-001/observer.log",
                1,
                "rank 1 (pid 4810) ended by SIGKILL after step 93",
                "root",
            ),
            (
                "logs/attempt-001/rank-0.log",
                212,
                (
                    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection "
                    "closed by peer [127.0.0.1]:38213"
                ),
                "cascade",
            ),
            (
                "logs/attempt-001/launcher.log",
                18,
                (
                    "W1121 02:11:04.204000 4801 torch/distributed/elastic/multiprocessing/api.py:1012] Sending process "
                    "4809 closing signal SIGTERM"
                ),
                "teardown",
            ),
        ],
    )
    job.fail(
        "exit",
        1,
        0.08,
        killed,
        "restart",
        "A kill from outside says nothing against the job: restart 1 of 3.",
    )
    job.begin(80)
    job.train(187)
    job.event(
        "fault_injected",
        fault="SIGSTOP",
        detail="Rank 0 was frozen with SIGSTOP.",
        rank=0,
        step=187,
    )
    frozen = diagnosis(
        "Rank 0 stopped moving: no step for 5.1 s, 24 times the median step",
        "hang",
        [
            (
                "logs/attempt-002/observer.log",
                1,
                "rank 0 (pid 4933) is stopped (state T) since step 187",
                "root",
            )
        ],
        confidence=0.9,
    )
    job.fail(
        "hang",
        0,
        5.13,
        frozen,
        "restart",
        "A frozen rank does not come back: killed and restarted, 2 of 3.",
    )
    job.begin(180)
    job.train(312)
    job.now_s += 0.05
    detail = "One byte of checkpoint 300 was flipped, then rank 1 raised."
    job.event("fault_injected", fault="damaged checkpoint", detail=detail, rank=1, step=312)
    crash = diagnosis(
        "Rank 1 raised an exception of unknown cause",
        "unknown",
        [("logs/attempt-003/rank-1.log", 97, HOSTILE_LINE, "root")],
        confidence=0.4,
    )
    job.fail(
        "exit",
        1,
        0.11,
        crash,
        "restart",
        "Not seen before at this step: one restart is worth a try, 3 of 3.",
    )
    reason = "shard 1 (__1_0.distcp) has checksum 5b1c9e02, its manifest says 91d7a4f0"
    job.begin(280, [{"step": 300, "path": "checkpoints/step-300", "reason": reason}])
    job.train(400)
    job.end("completed", 0, "Completed at step 400 after 3 restarts.")
    digest = "9f2c1b7e44d0a6c58e13f7ab902d6c31e5587a0b4c1d29f6638ea7d05b9c4e12"
    job.event(
        "proof",
        reference_run="demo-reference",
        step=400,
        tensors=148,
        bytes=9_640_448,
        sha256=digest,
        reference_sha256=digest,
        identical=True,
        loaded_with="torch.distributed.checkpoint.load of torch 2.13.0",
    )


def stopped_run(ledger: Ledger, home: Path, run_id: str = "demo-2") -> None:
    job = Scribe(ledger, home, run_id, now_s=EPOCH_S + 200)
    job.begin()
    job.train(33)
    found = diagnosis(
        "The script raised ValueError: the learning rate is negative",
        "user_code",
        [
            (
                "logs/attempt-001/rank-0.log",
                40,
                "ValueError: learning rate -0.001 is not positive",
                "root",
            ),
            (
                "logs/attempt-001/rank-1.log",
                41,
                "ValueError: learning rate -0.001 is not positive",
                "cascade",
            ),
        ],
        action="stop",
        restart_helps=False,
        mitigation="Set a positive learning rate in train.py, then `holdfast run --resume demo-2`.",
    )
    job.fail(
        "exit",
        1,
        0.07,
        found,
        "stop",
        "The same code on the same data fails again: a restart does not mend it.",
    )
    outcome = (
        "Stopped: the script raised ValueError (learning rate -0.001 is not positive), which a restart does not mend. "
        "Set a positive learning rate, then `holdfast run --resume demo-2`."
    )
    job.end("failed", 1, outcome)


def reference_run(ledger: Ledger, home: Path, run_id: str = "demo-reference") -> None:
    job = Scribe(ledger, home, run_id, now_s=EPOCH_S + 230)
    job.begin()
    job.train(400)
    job.end("completed", 0, "Completed at step 400 without a restart.")


def open_home(home: Path) -> Ledger:
    return Ledger.open(ledger_url(home))
