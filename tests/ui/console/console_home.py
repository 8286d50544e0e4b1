"""A console over a home with runs: the real application in process, and its list of actions."""

import contextlib
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

from starlette.testclient import TestClient

from holdfast.core.ledger import Event, Ledger
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.ui import Address, Backend, ClusterReport
from holdfast.ui.console.serving import application

HOST = "127.0.0.1:8470"
OWN = {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}


FINDINGS = {
    "answer": "holdfast gave 7 GPU-hours to 2 jobs.",
    "overviews": [
        {
            "key_figures": [{"name": "GPU-hours", "value": "7", "note": "held by jobs"}],
            "actions": [{"do": "Test the nodes.", "why": "1 <b>failure</b>.", "gpu_h": 1.0}],
            "losses": [["ada", "NVLink Error", "1", "2", "100 %"]],
            "more_losses": 0,
            "months": [["2026-11", "50 %", "1 s", "2"]],
        }
    ],
    "analyses": [
        {"name": "durations", "section": "Jobs", "title": "How long jobs run", "caption": "Not long.",
         "left_out": None},
        {"name": "power", "section": "Energy", "title": "Power", "caption": None, "left_out": "No telemetry."},
    ],
}  # fmt: skip
FILES = {"durations.svg": b"<svg/>", "durations.csv": b"a,b\n"}


@dataclass
class Console:
    """A running console, and what its actions were ordered to do."""

    home: Path
    ledger: Ledger
    client: TestClient = None
    orders: list = field(default_factory=list)
    links: list = field(default_factory=list)
    curves: dict = field(default_factory=dict)
    healthy_steps: tuple = (20, 10)
    refusal: Exception | None = None
    report: ClusterReport | Exception = field(
        default_factory=lambda: ClusterReport(findings=FINDINGS, files=FILES)
    )
    state: str = ""
    """The state of every run that goes on; empty: the ledger's."""
    may_end: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def held(self):
        """Let no action end within the block."""
        self.may_end.clear()
        try:
            yield
        finally:
            self.may_end.set()

    def sign_in(self, code=None):
        code = code or self.links[-1].partition("#")[2]
        return self.client.post("/enter", data={"code": code}, headers=OWN)

    def get(self, path, **more):
        return self.client.get(path, **more)

    def form(self, what, target):
        """The hidden fields of an action's form, as a browser would send them."""
        page = self.client.get(f"/act/{what}", params={"target": target})
        assert page.status_code == 200, page.text
        return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.text))

    def act(self, what, form, headers=OWN, **more):
        return self.client.post(f"/act/{what}", data={**form, **more}, headers=headers)


class open_console:  # noqa: N801 - used as a function
    """Yield a console, signed in by default."""

    def __init__(self, home, *, url=None, signed_in=True, **address):
        self._signed_in = signed_in
        ledger = Ledger.open(url or ledger_url(home))
        self.console = Console(home, ledger)
        self.console.may_end.set()
        names = (
            "confirm",
            "correct",
            "stop",
            "restart",
            "approve",
            "roll-back",
            "cordon",
            "return",
        )

        def carry_out(what, order):
            if self.console.refusal is not None:
                raise self.console.refusal
            self.console.orders.append((what, order))
            self.console.may_end.wait()
            return f"{what}: done"

        def profile_of(run_id):
            if self.console.curves is None:
                raise self.console.refusal
            return self.console.curves.get(run_id, ())

        def report():
            if isinstance(self.console.report, Exception):
                raise self.console.report
            return self.console.report

        backend = Backend(
            ledger=ledger,
            home=home,
            state_of=lambda run_id, state, host: self.console.state or state,
            actions={name: lambda order, name=name: carry_out(name, order) for name in names},
            healthy_steps=lambda run_id: self.console.healthy_steps,
            profile_of=profile_of,
            cluster_report=report,
            reasons=lambda: ["CUDA Error", "NVLink Error"],
            me="ada",
        )
        app = application(backend, Address(**address), show=self.console.links.append)
        self.console.client = TestClient(
            app, base_url=f"http://{HOST}", follow_redirects=False, raise_server_exceptions=True
        )

    def __enter__(self):
        self.console.client.__enter__()
        if self._signed_in:
            assert self.console.sign_in().status_code == 303
        return self.console

    def __exit__(self, *error):
        self.console.client.__exit__(*error)
        self.console.ledger.close()


def add_log(home, run_id, attempt, rank, text):
    path = RunPaths(home, run_id).rank_log(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def propose(ledger, run_id, attempt, number=7, text="Rank 1 is frozen. Proposed: end the attempt."):
    ledger.add_event(
        Event(run_id=run_id, attempt=attempt, at_s=1_790_000_100.0, kind="proposal",
              data={"number": number, "text": text})
    )  # fmt: skip
