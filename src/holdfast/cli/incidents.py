"""Provide `holdfast incidents ls | show | confirm | correct`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json, print_table, when
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.explanation import NO_REASON, OBSERVED, observed_failure
from holdfast.core.ledger import Incident, Ledger
from holdfast.core.ledger.records import Memory
from holdfast.core.paths import RunPaths
from holdfast.core.processes import whoami
from holdfast.core.words import shorten

if TYPE_CHECKING:
    from holdfast.diagnose import Kept
    from holdfast.diagnose.memory import Judged

_WITHOUT_RUN = "m"
"""The first character of the id of an incident that was diagnosed without a run."""


@click.group()
def command() -> None:
    """List and show incidents; confirm or correct a diagnosis, so that later ones improve.

    \b
    holdfast incidents ls
    holdfast incidents show 7
    """


@command.command()
@click.option("--run", "run_id", metavar="RUN", help="Of one run only.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def ls(place: Place, run_id: str | None, as_json: bool) -> None:
    """List the incidents, oldest first. An id such as m3 is of an incident without a run.

    \b
    holdfast incidents ls
    holdfast incidents ls --run RUN
    """
    with Ledger.open(place.existing_ledger()) as ledger:
        incidents = ledger.incidents(ledger.run(run_id).run_id if run_id else None)
        memories = ledger.memories()
        seen = {} if as_json else {one.incident_id: _seen(ledger, one) for one in incidents}
    judged = {one.incident_id: one for one in memories}
    without_run = [] if run_id else [one for one in memories if one.incident_id is None]
    if as_json:
        fields = [{**_fields(one), **_verdict(judged.get(one.incident_id))} for one in incidents]
        print_json(
            "incidents",
            {"incidents": fields, "remembered": [_memory_fields(one) for one in without_run]},
        )
        return
    if not incidents and not without_run:
        click.echo("No incidents.")
        return
    rows: list[tuple[object, ...]] = [
        (
            one.incident_id,
            one.run_id,
            one.attempt,
            when(one.detected_at_s),
            seen[one.incident_id],
            one.rank,
            one.step,
            "" if one.diagnosis["reason"] in NO_REASON else one.diagnosis["reason"],
            one.action,
            _said(judged.get(one.incident_id)),
        )
        for one in incidents
    ]
    rows += [
        (_name(one), "", "", when(one.remembered_at_s), "logs", "", "", one.reason, "", _said(one))
        for one in without_run
    ]
    print_table(
        ["id", "run", "attempt", "when", "what", "rank", "step", "reason", "action", "verdict"],
        rows,
    )


def _seen(ledger: Ledger, incident: Incident) -> str:
    events = ledger.events(incident.run_id, kinds=OBSERVED)
    return observed_failure(incident, [one for one in events if one.attempt == incident.attempt])


@command.command()
@click.argument("incident_id", metavar="[ID]", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def show(place: Place, incident_id: str | None, as_json: bool) -> None:
    """Show an incident: diagnosis, cited lines, action taken, and a person's verdict.

    \b
    holdfast incidents show
    holdfast incidents show 7 --json

    Without ID, show the last incident of the newest run.
    """
    with Ledger.open(place.existing_ledger()) as ledger:
        incident_id = incident_id or _last(ledger)
        if incident_id.startswith(_WITHOUT_RUN):
            from holdfast.diagnose.memory import memory_of

            memory = memory_of(ledger, incident_id)
            _show_memory(memory, as_json=as_json)
            return
        incident = ledger.incident(_number(incident_id))
        known = ledger.memories(incident_id=incident.incident_id)
    verdict = known[0] if known else None
    if as_json:
        print_json("incident", {**_fields(incident), **_verdict(verdict)})
        return
    found = incident.diagnosis
    rank = "" if incident.rank is None else f", rank {incident.rank}"
    step = f"after step {incident.step}" if incident.step else "before the first step"
    click.echo(
        f"Incident {incident_id} of run {incident.run_id}, attempt {incident.attempt}: {incident.kind} {step}{rank}"
    )
    click.echo(f"  {found['reason']} ({found['category']}), confidence {found['confidence']:.2f}")
    if (outcome := found.get("outcome", "failed")) != "failed":  # version 1 had no outcome
        click.echo(f"  outcome   {outcome}")
    for line in found["evidence"]:
        click.echo(f"  {line['role']:<9} {line['file']}:{line['line']}: {line['text']}")
    click.echo(f"  advice    {found['mitigation']}")
    click.echo(f"  done      {incident.action}: {incident.explanation}")
    if incident.restored_step is not None:
        click.echo(f"  went on   from the state of step {incident.restored_step}")
    for one in found.get("similar", ()):
        click.echo(
            f"  like      {one['id']}, {one['reason']} ({one['similarity']:.2f}): {', '.join(one['shared'])}"
        )
    _show_verdict(verdict)


@command.command()
@click.argument("incident_id", metavar="ID")
@click.option(
    "--action",
    default="",
    metavar="A",
    help="The action that helped: restart, exclude_and_restart, reset_gpu, ….",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def confirm(place: Place, incident_id: str, action: str, as_json: bool) -> None:
    """Confirm the diagnosis of an incident, so that similar incidents get a surer diagnosis.

    \b
    holdfast incidents confirm m3
    """
    _judge(place, incident_id, reason="", lines=(), action=action, as_json=as_json)


@command.command()
@click.argument("incident_id", metavar="ID")
@click.option(
    "--reason",
    required=True,
    metavar="R",
    help="The right reason, as `holdfast diagnose` names them.",
)
@click.option(
    "--line",
    "lines",
    multiple=True,
    metavar="FILE:LINE",
    help="A line that states the root; may be repeated.",
)
@click.option(
    "--action",
    default="",
    metavar="A",
    help="The action that helped: restart, exclude_and_restart, reset_gpu, ….",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def correct(
    place: Place, incident_id: str, reason: str, lines: tuple[str, ...], action: str, as_json: bool
) -> None:
    """Record the true reason of an incident.

    \b
    holdfast incidents correct 7 --reason NetworkError --line logs/rank-3.log:812

    Holdfast learns a rule from the reason, unless the rule would make another diagnosis wrong.
    """
    _judge(place, incident_id, reason=reason, lines=lines, action=action, as_json=as_json)


def judge_incident(place: Place, incident_id: str, *, reason: str = "", by: str) -> str:
    """Record a person's verdict on an incident, and learn from it; return a sentence on the result.

    Args:
        place: the home and the ledger of the records.
        incident_id: the incident's id.
        reason: the true cause; empty to confirm the diagnosis.
        by: the name of the person.

    Raises:
        NotFound: the ledger has no such incident.
        BadUse: the reason is not a cause, or the diagnosis has no cause to confirm.
    """
    judged = _judged(place, incident_id, reason=reason, lines=(), action="", by=by)
    learned = "".join(f" Learned {one.rule.id}: {one.what}." for one in judged.learned)
    return (
        f"Incident {incident_id} is {judged.memory.verdict}: {judged.memory.true_reason}.{learned}"
    )


def _judged(
    place: Place, incident_id: str, *, reason: str, lines: Sequence[str], action: str, by: str
) -> "Judged":
    from holdfast.diagnose.memory import judge

    with Ledger.open(place.existing_ledger()) as ledger:
        incident = (
            None if incident_id.startswith(_WITHOUT_RUN) else ledger.incident(_number(incident_id))
        )
        return judge(
            ledger,
            incident_id,
            reason=reason,
            roots=[_line_at(one, incident) for one in lines],
            action=action,
            kept=_kept(place, incident),
            home=place.home,
            by=by,
        )


def _judge(
    place: Place, incident_id: str, *, reason: str, lines: Sequence[str], action: str, as_json: bool
) -> None:
    judged = _judged(place, incident_id, reason=reason, lines=lines, action=action, by=whoami())
    learned = [
        {"id": one.rule.id, "reason": one.rule.reason, "what": one.what} for one in judged.learned
    ]
    if as_json:
        fields = {
            "id": incident_id,
            **_verdict(judged.memory),
            "learned": learned,
            "notes": list(judged.notes),
        }
        print_json("verdict", fields)
        return
    click.echo(f"Incident {incident_id} is {judged.memory.verdict}: {judged.memory.true_reason}.")
    for one in learned:
        click.echo(
            f"Learned {one['id']}: {one['what']}. Take it back with: holdfast rules withdraw {one['id']}"
        )
    if not learned:
        click.echo("No new rule is needed: an existing rule already gives this answer.")
    for note in judged.notes:
        click.echo(note)


def _kept(place: Place, incident: Incident | None) -> "list[Kept]":
    """Return the compressed log of a run's incident; None if the log files are gone."""
    if incident is None:
        return []
    folder = RunPaths(place.home, incident.run_id).attempt_logs(incident.attempt)
    if not folder.is_dir():
        return []
    from holdfast.diagnose.memory import kept_of

    return list(kept_of([str(folder)]))


def _line_at(place: str, incident: Incident | None) -> str:
    """Return the text of the line that `FILE:LINE` names.

    The line is read from the file. If the file is gone, it is taken from the diagnosis.
    """
    name, _, number = place.rpartition(":")
    if not name or not number.isdigit() or int(number) < 1:
        raise BadUse(
            f"--line {place}: give a file and the number of a line, FILE:LINE, counted from 1."
        )
    from holdfast.diagnose.memory import line_at

    text = line_at(Path(name), int(number))
    if text is None and incident is not None:
        cited = incident.diagnosis.get("evidence", ())
        text = next(
            (one["text"] for one in cited if one["file"] == name and one["line"] == int(number)),
            None,
        )
    if text is None or not text.strip():
        raise BadUse(
            f"--line {place}: there is no such line. Give the path of a file that is there, and a line with text."
        )
    return str(text)


def _last(ledger: Ledger) -> str:
    run = ledger.newest_run()
    incidents = ledger.incidents(run.run_id)
    if not incidents:
        raise NotFound(
            f"The newest run, {run.run_id}, has no incident. `holdfast incidents ls` lists all."
        )
    return str(incidents[-1].incident_id)


def _number(incident_id: str) -> int:
    if not incident_id.isdigit() or not 0 < int(incident_id) < 2**31:
        raise BadUse(
            f"{incident_id!r} is not an incident: give a number, or m and a number. "
            "List them: holdfast incidents ls"
        )
    return int(incident_id)


def _fields(incident: Incident) -> dict[str, Any]:
    return {
        "id": str(incident.incident_id),
        **{k: v for k, v in vars(incident).items() if k != "incident_id"},
    }


def _memory_fields(memory: Memory) -> dict[str, Any]:
    left_out = {"memory_id", "incident_id", "run_id", "words", "embedding", "embedding_model"}
    return {"id": _name(memory), **{k: v for k, v in vars(memory).items() if k not in left_out}}


def _verdict(memory: Memory | None) -> dict[str, Any]:
    if memory is None or not memory.verdict:
        return {"verdict": None}
    names = ("verdict", "true_reason", "true_action", "judged_by", "judged_at_s", "roots")
    return {name: getattr(memory, name) for name in names}


def _name(memory: Memory) -> str:
    return (
        f"{_WITHOUT_RUN}{memory.memory_id}"
        if memory.incident_id is None
        else str(memory.incident_id)
    )


def _said(memory: Memory | None) -> str:
    if memory is None or not memory.verdict:
        return ""
    return memory.verdict if memory.verdict == "confirmed" else f"corrected: {memory.true_reason}"


def _show_verdict(memory: Memory | None) -> None:
    if memory is not None and memory.verdict:
        helped = f"; what helped: {memory.true_action}" if memory.true_action else ""
        click.echo(
            f"  verdict   {_said(memory)} by {memory.judged_by}, {when(memory.judged_at_s)}{helped}"
        )


def _show_memory(memory: Memory, *, as_json: bool) -> None:
    if as_json:
        print_json("incident", _memory_fields(memory))
        return
    click.echo(f"Incident {_name(memory)}, diagnosed {when(memory.remembered_at_s)} without a run")
    click.echo(f"  {memory.reason} ({memory.category}), confidence {memory.confidence:.2f}")
    for root in memory.roots:
        click.echo(f"  root      {root}")
    for file, number, text in memory.lines:
        click.echo(f"  kept      {file}:{number}: {shorten(text)}")
    _show_verdict(memory)
