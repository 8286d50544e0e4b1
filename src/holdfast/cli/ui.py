"""Provide `holdfast ui`: serve the console, and carry out the actions of its users."""

import json
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from holdfast.cli.incidents import judge_incident
from holdfast.cli.main import Place
from holdfast.cli.nodes import cordon_node, return_cordoned_node
from holdfast.cli.output import print_json
from holdfast.cli.runs import state_by_host
from holdfast.cluster import release, start_on_leash
from holdfast.core.errors import BadUse, HoldfastError, NotFound
from holdfast.core.ledger import Ledger
from holdfast.core.paths import RunPaths, ledger_at
from holdfast.core.processes import module_command, whoami
from holdfast.profile import usage_curves
from holdfast.recover import (
    approve_run,
    detach,
    healthy_steps,
    roll_back_run,
    stop_queued,
    stop_run,
)
from holdfast.ui import ActionName, Address, Backend, ClusterReport, Order, serve

STOP_TIMEOUT_S = 3600.0
APPROVE_TIMEOUT_S = 120.0
ROLL_BACK_TIMEOUT_S = 600.0
REPORT_TIMEOUT_S = 1800.0


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8470,
    show_default=True,
    help="The port; 0: any free port.",
)
@click.option("--ledger", metavar="PATH|URL", help="The ledger, as `holdfast --ledger` names it.")
@click.option(
    "--allow-host",
    "names",
    multiple=True,
    metavar="NAME",
    help="A name by which browsers reach the console, such as a proxy's; may be repeated.",
)
@click.option(
    "--proxy",
    "proxies",
    multiple=True,
    metavar="ADDRESS",
    help="A trusted proxy that sends X-Forwarded-For and -Proto; may be repeated.",
)
@click.option(
    "--open-reading",
    is_flag=True,
    help="Show the pages without a sign-in too. Actions always need one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print each sign-in link as one JSON object.")
@click.pass_obj
def command(
    place: Place,
    host: str,
    port: int,
    ledger: str | None,
    names: tuple[str, ...],
    proxies: tuple[str, ...],
    open_reading: bool,
    as_json: bool,
) -> None:
    """Serve the runs, incidents, nodes, evaluations and decisions as live pages.

    \b
    holdfast ui
    holdfast ui --ledger postgresql+psycopg://team@db/holdfast --port 8470

    Open the link that is printed. The link signs a browser in once.
    """
    place = Place(place.home, ledger_at(ledger) if ledger else place.ledger)
    address = Address(
        host=host, port=port, names=names, proxies=proxies, reading_is_open=open_reading
    )

    def show(link: str) -> None:
        if as_json:
            print_json("ui", {"link": link})
        else:
            click.echo(f"Sign in, once, with {link}")

    with Ledger.open(place.ledger) as opened:
        serve(
            backend_of(place, opened), address, show=show,
            complain=lambda said: click.echo(said, err=True),
        )  # fmt: skip


def backend_of(place: Place, ledger: Ledger) -> Backend:
    """Return the functions with which the console reads and changes a ledger."""
    actions: dict[ActionName, Callable[[Order], str]] = {
        "confirm": lambda order: judge_incident(place, order.target, by=order.by),
        "correct": lambda order: judge_incident(place, order.target, reason=order.why, by=order.by),
        "stop": lambda order: _stop(place, ledger, order),
        "approve": lambda order: (
            f"Approved: {approve_run(order.target, ledger, place.home, timeout_s=APPROVE_TIMEOUT_S)}"
        ),
        "roll-back": lambda order: _roll_back(place, ledger, order),
        "restart": lambda order: _restart(place, order),
        "cordon": lambda order: " ".join(cordon_node(place, order.target, order.why, by=order.by)),
        "return": lambda order: " ".join(return_cordoned_node(place, order.target, force=True)),
    }
    return Backend(
        ledger=ledger,
        home=place.home,
        state_of=state_by_host(place.home),
        actions=actions,
        reasons=_reasons,
        healthy_steps=lambda run_id: healthy_steps(run_id, ledger),
        profile_of=lambda run_id: _profile_of(place, run_id),
        cluster_report=lambda: cluster_report(place),
        me=whoami(),
    )


def _reasons() -> Sequence[str]:
    from holdfast.diagnose import CATEGORIES

    return sorted(one for one in CATEGORIES if one != "Unknown")


def _stop(place: Place, ledger: Ledger, order: Order) -> str:
    run = ledger.run(order.target)
    if run.state == "queued":
        stop_queued(run, ledger, place.home)
    else:
        stop_run(run.run_id, ledger, place.home, timeout_s=STOP_TIMEOUT_S)
    return ledger.run(run.run_id).outcome


def _profile_of(place: Place, run_id: str) -> Sequence[Mapping[str, Any]]:
    try:
        return [asdict(one) for one in usage_curves(RunPaths(place.home, run_id).profile)]
    except NotFound:
        return []
    except OSError as error:
        raise HoldfastError(f"The profile of run {run_id} cannot be read: {error}.") from error


def _roll_back(place: Place, ledger: Ledger, order: Order) -> str:
    if not order.why.isdecimal():
        raise BadUse("Choose the step of a healthy checkpoint.")
    return roll_back_run(
        order.target, ledger, place.home, to_step=int(order.why), by=order.by,
        timeout_s=ROLL_BACK_TIMEOUT_S,
    )  # fmt: skip


def _restart(place: Place, order: Order) -> str:
    pid = detach(order.target, place.home, ["--ledger", place.ledger], environment={})
    return f"The run goes on, under process {pid} of {socket.gethostname()}."


def cluster_report(place: Place, *, timeout_s: float = REPORT_TIMEOUT_S) -> ClusterReport:
    """Return the trace report of the ledger, made by a process of its own.

    The process, which has the lowest priority, reads the whole ledger without slowing or growing
    the console, and ends with the console.

    Raises:
        HoldfastError: the report cannot be made; the message is the one of `holdfast trace report`.
    """
    command, environment = module_command("holdfast.cli.main")
    environment["HOLDFAST_HOME"] = str(place.home)
    with tempfile.TemporaryDirectory(prefix="holdfast-report-") as folder:
        output, log = Path(folder) / "report", Path(folder) / "log"
        report = start_on_leash(
            ["nice", "-n", "19", *command, "trace", "report", place.ledger, "-o", str(output)],
            log, environment=environment,
        )  # fmt: skip
        try:
            report.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise HoldfastError(
                f"The report took longer than {timeout_s:g} s. Run it yourself: holdfast trace report LEDGER"
            ) from None
        finally:
            release(report)
        if not (output / "findings.json").exists():
            lines = log.read_text(errors="replace").strip().splitlines()
            raise HoldfastError(
                lines[-1] if lines else f"The report ended with exit code {report.returncode}."
            )
        files = {path.name: path.read_bytes() for path in output.glob("*/*.*")}
        return ClusterReport(
            findings=json.loads((output / "findings.json").read_text()), files=files
        )
