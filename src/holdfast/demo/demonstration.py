"""Three runs and a page: one with injected faults, one stopped by an error of the user's own, one left alone."""

import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.accounting import RunSummary, summarize
from holdfast.core.errors import BadUse
from holdfast.core.ledger import Event, Ledger
from holdfast.core.paths import ledger_url
from holdfast.demo.faults import Injector, plan_faults
from holdfast.recover import HangLimits, RunSpec, begin_run, supervise

MARKER = ".holdfast-demo"
"""A file that says that a folder was made by a demonstration and may be made anew."""

Progress = Callable[[str, str, Mapping[str, Any]], None]
"""Told what happens: the run's id, a kind of the supervisor's or `fault_injected`, and its data."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the demonstration showed, all of it read back from the ledger."""

    faulty: RunSummary
    stopped: RunSummary
    reference: RunSummary
    report: Path
    interrupted: bool = False

    @property
    def identical(self) -> bool:
        """Whether the run with injected faults ended with the weights of the run left alone, to the last bit."""
        return self.faulty.proof is not None and bool(self.faulty.proof["identical"])


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """What to show. The defaults take about two minutes on two cores."""

    out: Path
    seed: int = 0
    steps: int = 240
    save_every: int = 20
    world_size: int = 2

    def run(self, progress: Progress) -> Verdict | None:
        """Show it; returns None when somebody stopped it.

        Raises:
            BadUse: `out` holds something else, or the last step would be in no checkpoint; nothing was done.
        """
        if self.steps % self.save_every:
            raise BadUse(
                f"--steps {self.steps} is not a multiple of {self.save_every}, the steps between checkpoints."
            )
        home = self._make_folder()
        source = random.Random(self.seed)
        with Ledger.open(ledger_url(home)) as ledger:
            fail_at = source.randrange(self.save_every + 1, 2 * self.save_every)
            for name, steps, extra in (
                ("faults", self.steps, []),
                ("own-error", 2 * self.save_every, ["--fail-at-step", str(fail_at)]),
                ("reference", self.steps, []),
            ):
                injector = None
                if name == "faults":
                    plan = plan_faults(
                        self.seed,
                        steps=self.steps,
                        save_every=self.save_every,
                        world_size=self.world_size,
                    )
                    injector = Injector(plan, self._checkpoints(name), self.seed)
                if not self._train(name, steps, extra, ledger, home, injector, progress):
                    return None
            self._prove(ledger)
            faulty, stopped, reference = (
                summarize(ledger, home, name) for name in ("faults", "own-error", "reference")
            )
        from holdfast.ui import write_report

        report = self.out / "report.html"
        title = f"Holdfast demonstration, seed {self.seed}"
        write_report(report, [faulty, stopped, reference], title=title)
        return Verdict(faulty=faulty, stopped=stopped, reference=reference, report=report)

    def _make_folder(self) -> Path:
        marker = self.out / MARKER
        if self.out.exists() and any(self.out.iterdir()) and not marker.exists():
            raise BadUse(
                f"{self.out} holds something that is not a demonstration. Give another folder with --out."
            )
        home = self.out / "holdfast"
        for folder in (home, self.out / "checkpoints"):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            home.mkdir(parents=True)
        except OSError as error:
            raise BadUse(
                f"{self.out} cannot be written: {error.strerror}. Give another folder with --out."
            ) from error
        marker.touch()
        return home.absolute()

    def _checkpoints(self, name: str) -> Path:
        return (self.out / "checkpoints" / name).absolute()

    def _train(
        self,
        name: str,
        steps: int,
        extra: list[str],
        ledger: Ledger,
        home: Path,
        injector: Injector | None,
        progress: Progress,
    ) -> bool:
        command = [
            sys.executable,
            "-m",
            "holdfast.demo.train",
            "--checkpoints",
            str(self._checkpoints(name)),
        ]
        options = [
            "--steps",
            str(steps),
            "--save-every",
            str(self.save_every),
            "--seed",
            str(self.seed),
            *extra,
        ]
        spec = RunSpec(
            command=(*command, *options),
            cwd=str(home),
            nproc=self.world_size,
            hangs=HangLimits(factor=10, floor_s=3, first_step_s=120),
        )
        begin_run(spec, ledger, home, name=name)
        attempt = 0

        def observe(kind: str, data: Mapping[str, Any]) -> None:
            nonlocal attempt
            if kind == "launch":
                attempt = data["attempt"]
            progress(name, kind, data)
            if kind == "step" and injector is not None:
                at_s = time.time()
                injected = injector.stepped(data["step"], data["pids"])
                if injected is not None:
                    event = Event(
                        run_id=name,
                        attempt=attempt,
                        at_s=at_s,
                        kind="fault_injected",
                        data=injected,
                    )
                    ledger.add_event(event)
                    progress(name, "fault_injected", injected)

        outcome = supervise(name, ledger, home, observer=observe, echo=False)
        return outcome.state != "stopped"

    def _prove(self, ledger: Ledger) -> None:
        from holdfast.demo.proof import compare

        last = f"step-{self.steps:010d}"
        paths = [self._checkpoints(name) / last for name in ("faults", "reference")]
        if not all(path.is_dir() for path in paths):
            return  # one of them did not get there; its outcome says why
        proof = {"reference_run": "reference", "step": self.steps, **compare(*paths)}
        attempt = len(ledger.attempts("faults"))
        ledger.add_event(
            Event(run_id="faults", attempt=attempt, at_s=time.time(), kind="proof", data=proof)
        )
