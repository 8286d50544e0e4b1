"""Train three times, and write a page about the three runs.

The first run has two nodes and injected faults. The second run fails because of an error in the
training script. The third run has no fault, for comparison.
"""

import contextlib
import fcntl
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.accounting import RunSummary, summarize
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.explanation import explain
from holdfast.core.ledger import Event, Ledger
from holdfast.core.left_out import LeftOut
from holdfast.core.paths import ledger_url
from holdfast.demo.faults import PlannedFault, PlannedFaults, plan_faults
from holdfast.demo.nodes import Nodes, rendezvous_of
from holdfast.demo.outcome import FaultRow, fault_rows
from holdfast.recover import HangLimits, RunSpec, begin_run
from holdfast.testing import Injector
from holdfast.testing.bad_nodes import BreakingLink
from holdfast.testing.hosts import Hosts, NoHosts

MARKER = ".holdfast-demo"
"""The file that marks the folder of a demonstration; only such a folder may be overwritten."""
NODES = ("node1", "node2")
SPARE = "node3"
RANKS = 2
HEALTHY_AFTER = 10
"""A checkpoint counts as healthy after this many further steps with an ordinary loss.

The number is smaller than the number of steps between two saves.
"""

Progress = Callable[[str, str, Mapping[str, Any]], None]
"""A function that receives the events of the runs: the run's id, the event's kind and its data.

The kind is `hosts`, `fault_injected`, or a kind of the supervisor's events.
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the demonstration, read from the ledger.

    Attributes:
        faulty: the run with injected faults.
        stopped: the run that fails because of an error in the training script.
        reference: the run without faults.
        rows: a row for each fault, with its detection and the action.
        planned: the number of planned faults.
        report: the path of the page.
    """

    faulty: RunSummary
    stopped: RunSummary
    reference: RunSummary
    rows: tuple[FaultRow, ...]
    planned: int
    report: Path

    @property
    def identical(self) -> bool:
        """Return True if the run with faults has the reference's final weights, to the last bit."""
        return self.faulty.proof is not None and bool(self.faulty.proof["identical"])

    @property
    def shortcomings(self) -> list[str]:
        """Return a sentence for each unmet expectation; empty if the demonstration succeeded."""
        found = []
        if self.faulty.run.state != "completed":
            found.append(f"The run with faults did not complete: {self.faulty.run.outcome}")
        if len(self.rows) < self.planned:
            found.append(f"Only {len(self.rows)} of {self.planned} faults led to an incident.")
        if self.faulty.interventions:
            found.append("The run needed a manual intervention.")
        if self.reference.run.state != "completed":
            found.append(f"The run left alone did not complete: {self.reference.run.outcome}")
        elif self.faulty.proof is not None and not self.identical:
            found.append("The final weights differ from those of the run left alone.")
        if self.stopped.run.exit_code != 1:
            found.append(f"The user's own error did not end its run: {self.stopped.run.outcome}")
        return found


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """Run the demonstration with a given length and seed.

    The defaults take about two minutes on two cores.

    Attributes:
        out: the folder for the page, the records and the checkpoints.
        seed: the seed of the weights, the data order and the faults.
        steps: the steps of the run with faults and of the reference run.
        save_every: the steps between two checkpoints.
    """

    out: Path
    seed: int = 0
    steps: int = 144
    save_every: int = 12

    def run(self, progress: Progress) -> Verdict | None:
        """Start the three runs, one after another, and write the page; return None after Ctrl-C.

        Raises:
            BadUse: `out` holds other files, or there are too few steps for all faults; no run was
                started.
            HoldfastError: a part of the demonstration failed; the message names the run and its
                folder.
        """
        if self.steps % self.save_every:
            raise BadUse(
                f"--steps {self.steps} is not a multiple of {self.save_every}, the steps between checkpoints."
            )
        plan = plan_faults(
            self.seed, steps=self.steps, save_every=self.save_every, world_size=RANKS
        )
        with self._folder() as home, Ledger.open(ledger_url(home)) as ledger:
            for name, run in (
                ("faults", self._run_with_faults),
                ("own-error", self._run_with_own_error),
                ("reference", self._run_left_alone),
            ):
                try:
                    state = run(name, plan, ledger, home, progress)
                except HoldfastError as error:
                    raise HoldfastError(
                        f"The demonstration failed in its run {name!r}: {error} Its records and logs are in {self.out}."
                    ) from error
                if state == "stopped":
                    return None
            self._prove(ledger)
            faulty, stopped, reference = (
                summarize(ledger, home, name) for name in ("faults", "own-error", "reference")
            )
            rows = fault_rows(explain(ledger, home, "faults"), ledger.events("faults"))
        from holdfast.ui import write_report

        report = self.out / "report.html"
        title = f"Holdfast demonstration, seed {self.seed}"
        write_report(report, [faulty, stopped, reference], title=title, home=home)
        return Verdict(
            faulty=faulty,
            stopped=stopped,
            reference=reference,
            rows=tuple(rows),
            planned=len(plan),
            report=report,
        )

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """Empty or create the demonstration's folder, and lock it against other demonstrations."""
        marker = self.out / MARKER
        if self.out.exists() and any(self.out.iterdir()) and not marker.exists():
            raise BadUse(
                f"{self.out} holds something that is not a demonstration. Give another folder with --out."
            )
        home = self.out / "holdfast"
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            lock = marker.open("a")
        except OSError as error:
            raise BadUse(
                f"{self.out} cannot be written: {error.strerror}. Give another folder with --out."
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadUse(
                    f"Another demonstration runs in {self.out}. Wait for its end, or give another folder with --out."
                ) from None
            for folder in (home, self.out / "checkpoints"):
                shutil.rmtree(folder, ignore_errors=True)
            home.mkdir()
            yield home.absolute()

    def _checkpoints(self, name: str) -> Path:
        return (self.out / "checkpoints" / name).absolute()

    def _begin(
        self,
        name: str,
        ledger: Ledger,
        home: Path,
        steps: int,
        extra: list[str],
        *,
        nnodes: int,
        ranks: int,
    ) -> None:
        """Record a new run whose ranks are spread over `nnodes` nodes."""
        command = [sys.executable, "-m", "holdfast.demo.train"]
        values = {
            "--checkpoints": self._checkpoints(name),
            "--steps": steps,
            "--save-every": self.save_every,
            "--seed": self.seed,
        }
        command += [str(word) for pair in values.items() for word in pair]
        spec = RunSpec(
            command=(*command, *extra),
            cwd=str(home),
            hangs=HangLimits(factor=10, floor_s=3, first_step_s=120),
            healthy_after=HEALTHY_AFTER,
            nnodes=nnodes,
            nproc=ranks // nnodes,
        )
        begin_run(spec, ledger, home, name=name)

    def _run_with_faults(
        self,
        name: str,
        plan: list[PlannedFault],
        ledger: Ledger,
        home: Path,
        progress: Progress,
    ) -> str:
        """Train on two nodes and a spare node while faults are injected; return the run's state."""
        # A link for each node: a replay moves ranks, so any node may be the one that turns bad.
        links = {node: BreakingLink(home / "links" / node) for node in (*NODES, SPARE)}
        injector = Injector(
            home / "faults.jsonl",
            home=home,
            run_id=name,
            seed=self.seed,
            checkpoints=self._checkpoints(name),
        )
        faults = PlannedFaults(plan, injector, break_link=lambda node: links[node].break_now())
        self._begin(
            name, ledger, home, self.steps, _bad_batch(plan), nnodes=len(NODES), ranks=RANKS
        )
        attempt = 0
        with contextlib.ExitStack() as stack:
            try:
                hosts = stack.enter_context(Hosts.made([*NODES, SPARE]))
                addresses = [f"{one} {hosts.addresses[one]}" for one in (*NODES, SPARE)]
                progress(name, "hosts", {"nodes": addresses, "why_one_host": None})
            except NoHosts as error:
                hosts = None
                progress(name, "hosts", {"nodes": [*NODES, SPARE], "why_one_host": str(error)})
            nodes = stack.enter_context(self._nodes(name, home, hosts))
            for node in NODES:
                nodes.start(node, links[node].environment(nodes.environment))
                nodes.meet()
            for kind, data in nodes.observed():
                if kind == "launch":
                    attempt = data["attempt"]
                    if attempt == 1:
                        nodes.start(SPARE, links[SPARE].environment(nodes.environment))
                progress(name, kind, data)
                if kind != "step":
                    continue
                at_s = time.time()
                pids = {int(rank): pid for rank, pid in data["pids"].items()}
                injected = faults.stepped(data["step"], pids)
                if injected is not None:
                    if injected["fault"] == "Loss became NaN":
                        # The script damaged the batch right after the step; the report comes later.
                        at_s = data["at_s"]
                    event = Event(
                        run_id=name,
                        attempt=attempt,
                        at_s=at_s,
                        kind="fault_injected",
                        data=injected,
                    )
                    ledger.add_event(event)
                    progress(name, "fault_injected", injected)
            nodes.wait()
        return ledger.run(name).state

    def _run_with_own_error(
        self,
        name: str,
        _plan: list[PlannedFault],
        ledger: Ledger,
        home: Path,
        progress: Progress,
    ) -> str:
        """Train with an error in the script, which a restart cannot fix; return the run's state."""
        fail_at = random.Random(self.seed).randrange(2, self.save_every)
        extra = ["--fail-at-step", str(fail_at)]
        self._begin(name, ledger, home, self.save_every, extra, nnodes=1, ranks=1)
        return self._watch(name, ledger, home, progress)

    def _run_left_alone(
        self,
        name: str,
        plan: list[PlannedFault],
        ledger: Ledger,
        home: Path,
        progress: Progress,
    ) -> str:
        """Train without injected faults; return the run's state.

        An option of the training script leaves out the batches that the run with faults left out.
        """
        extra = _bad_batch(plan)
        found = [one.data for one in ledger.events("faults", "leave_out")]
        if found:
            left_out = LeftOut.of((one["first"], one["last"]) for one in found)
            extra += ["--leave-out", left_out.as_text()]
        self._begin(name, ledger, home, self.steps, extra, nnodes=1, ranks=RANKS)
        return self._watch(name, ledger, home, progress)

    def _watch(self, name: str, ledger: Ledger, home: Path, progress: Progress) -> str:
        """Train on one node that was not found faulty; return the run's state."""
        cordoned = {node.name for node in ledger.nodes() if node.is_cordoned}
        with self._nodes(name, home, None) as nodes:
            nodes.start(next(node for node in NODES if node not in cordoned))
            for kind, data in nodes.observed():
                progress(name, kind, data)
            nodes.wait()
        return ledger.run(name).state

    def _nodes(self, name: str, home: Path, hosts: Hosts | None) -> Nodes:
        nnodes = len(NODES) if name == "faults" else 1
        return Nodes(
            name,
            home,
            nnodes=nnodes,
            rendezvous=rendezvous_of(hosts, NODES),
            hosts=hosts,
            log=home / "nodes.log",
        )

    def _prove(self, ledger: Ledger) -> None:
        from holdfast.demo.proof import compare

        last = f"step-{self.steps:010d}"
        paths = [self._checkpoints(name) / last for name in ("faults", "reference")]
        if not all(path.is_dir() for path in paths):
            return  # one run did not reach the last step; its outcome has the reason
        proof = {"reference_run": "reference", "step": self.steps, **compare(*paths)}
        attempt = len(ledger.attempts("faults"))
        ledger.add_event(
            Event(run_id="faults", attempt=attempt, at_s=time.time(), kind="proof", data=proof)
        )


def _bad_batch(plan: list[PlannedFault]) -> list[str]:
    """Return the option of the training script that damages a batch of the data."""
    # No batch is left out before this one, so the batch of a step has the step's number.
    (fault,) = [one for one in plan if one.kind == "Loss became NaN"]
    return ["--bad-batch", str(fault.step + 1)]
