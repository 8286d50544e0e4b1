"""Provide `holdfast nodes check | ls | cordon | return`."""

import time
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json, print_table, seconds, when
from holdfast.cluster import cordons_of_operator, mark, unmark
from holdfast.core.errors import BadUse, LedgerError
from holdfast.core.ledger import Ledger, NodeRecord
from holdfast.core.processes import whoami

if TYPE_CHECKING:
    from holdfast.recover import Report

UNDECIDED = 4
MAX_LENGTH = 255
"""The most characters of a node's name and of a reason, which is the limit of the ledger."""


@click.group()
def command() -> None:
    """Test nodes, and cordon the faulty ones.

    \b
    holdfast nodes check
    holdfast nodes ls
    """


@command.command()
@click.option("--nnodes", type=int, metavar="N", help="Nodes on which this command is started.")
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    help="One of the nodes, and a free port on it.  [default: from Slurm]",
)
@click.option("--cordon", "cordons", is_flag=True, help="Cordon the bad nodes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def check(
    place: Place, nnodes: int | None, rendezvous: str | None, cordons: bool, as_json: bool
) -> int:
    """Test this host, or all nodes on which this command is started.

    \b
    holdfast nodes check
    srun holdfast nodes check --cordon
    holdfast nodes check --nnodes 3 --rendezvous node1:29600

    The exit code is 0 if all nodes are good, 1 if a node is bad, and 4 if the tests could not
    decide.
    """
    from holdfast.recover import check_nodes, check_this_host, keep_verdicts, meeting_of, priors_of

    meeting = meeting_of(["holdfast"], nnodes=nnodes, rendezvous=rendezvous, spares=0, stem="check")

    def past(names: Sequence[str]) -> tuple[Mapping[str, float], Set[str]]:
        with Ledger.open(place.ledger) as ledger:
            known = ledger.nodes()
        cordoned = {node.name for node in known if node.is_cordoned and node.name in names}
        return priors_of(names, known, time.time()), cordoned

    def finish(report: "Report", missing: int) -> Any:
        from holdfast.recover import Joined

        # Print the report first: it is useful even if the ledger cannot be written.
        _print_report(report, missing, cordons=cordons, as_json=as_json)
        try:
            with Ledger.open(place.ledger) as ledger:
                cordoned = keep_verdicts(
                    report, ledger, by=whoami(), at_s=time.time(), cordons=cordons
                )
        except LedgerError as error:
            lost = (
                "no node is cordoned, and the verdicts are not kept"
                if cordons
                else "the verdicts are not kept"
            )
            raise LedgerError(
                f"{str(error).rstrip('.')}: {lost}. Repair the ledger, then check again."
            ) from error
        reasons = {name: report.evidence(name) for name in cordoned}
        _print(mark(reasons, by=whoami(), cordons=cordons_of_operator()))
        return Joined(_exit_code(report, missing), _sentence(report, missing))

    if meeting is None:
        report, missing = check_this_host(past), 0
        finish(report, missing)
        return _exit_code(report, missing)
    result = check_nodes(meeting, place.home, past, finish)
    if isinstance(result, tuple):
        return _exit_code(*result)
    if as_json:
        print_json("nodes_joined", {"outcome": result.sentence, "exit_code": result.exit_code})
    return result.exit_code


def _exit_code(report: "Report", missing: int) -> int:
    judgement = report.judgement
    if judgement.bad:
        return 1
    settled = all(outcome == "good" for outcome in judgement.outcomes.values())
    alone = len(judgement.outcomes) == 1 and not report.failed_solo
    is_clear = judgement.can_tell and (settled or alone) and not missing and not report.unanswered
    return 0 if is_clear else UNDECIDED


def _sentence(report: "Report", missing: int) -> str:
    judgement = report.judgement
    if judgement.bad:
        return f"Bad: {', '.join(judgement.bad)}."
    if missing:
        return f"{missing} nodes did not join. Start this command on them."
    if not judgement.can_tell:
        return "The tests cannot tell which node is at fault: most look bad, or no test passed."
    suspects = [name for name, outcome in judgement.outcomes.items() if outcome == "suspect"]
    if _exit_code(report, missing) == 0:
        return "No fault was found."
    return f"The tests were inconclusive for {', '.join([*suspects, *report.unanswered])}."


def _print_report(report: "Report", missing: int, *, cordons: bool, as_json: bool) -> None:
    judgement = report.judgement
    cordoned = list(judgement.cordon) if cordons else []
    sentence = _sentence(report, missing)
    if as_json:
        fields = {**report.to_json(), "missing": missing, "cordoned": cordoned, "outcome": sentence}
        fields["nodes"] = [
            {"id": node["node"], **{k: v for k, v in node.items() if k != "node"}}
            for node in fields["nodes"]
        ]
        print_json("nodes_check", fields)
        return
    print_table(
        ["node", "check", "outcome", "took", "evidence"],
        [
            (name, result.name, result.outcome, seconds(result.seconds), result.evidence)
            for name, results in report.solo.items()
            for result in results
        ],
    )
    if report.pairs:
        print_table(
            ["together", "outcome", "MB/s", "reason"],
            [
                (
                    " ".join(pair.nodes),
                    {True: "passed", False: "failed", None: "not tested"}[pair.passed],
                    "" if pair.mb_per_s is None else f"{pair.mb_per_s:.0f}",
                    pair.reason,
                )
                for pair in report.pairs
            ],
        )
        print_table(
            ["node", "verdict", "probability", "why"],
            [
                (name, outcome, f"{judgement.probabilities[name]:.3f}", report.evidence(name))
                for name, outcome in judgement.outcomes.items()
            ],
        )
    click.echo(sentence)
    if cordoned:
        click.echo(f"Cordoned: {', '.join(cordoned)}. After a repair: holdfast nodes return NODE")
    elif judgement.bad:
        click.echo(
            "Cordon them: holdfast nodes cordon NODE --why TEXT, or this check with --cordon"
        )
    left = [name for name in judgement.bad if name not in judgement.cordon]
    if cordons and left:
        click.echo(
            f"Not cordoned, since so many at once may have one cause, such as a switch: {', '.join(left)}"
        )


@command.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def ls(place: Place, as_json: bool) -> None:
    """List the nodes that were tested or cordoned.

    \b
    holdfast nodes ls
    """
    with Ledger.open(place.existing_ledger()) as ledger:
        nodes = ledger.nodes()
    if as_json:
        print_json("nodes", {"nodes": [_fields(node) for node in nodes]})
        return
    if not nodes:
        click.echo("No node was tested or cordoned yet. Test this one: holdfast nodes check")
        return
    print_table(
        ["node", "cordoned", "by", "why", "tested", "verdict", "probability", "found"],
        [_row(node) for node in nodes],
    )


def _fields(node: NodeRecord) -> dict[str, Any]:
    return {"id": node.name, **{k: v for k, v in vars(node).items() if k != "name"}}


VERDICTS = {"suspect": "not settled"}
"""The words for an outcome, where these differ: without another node, tests settle nothing."""


def _row(node: NodeRecord) -> Sequence[object]:
    last = node.verdicts[-1] if node.verdicts else {}
    probability = "" if node.probability is None else f"{node.probability:.3f}"
    return (
        node.name,
        when(node.cordoned_at_s),
        node.cordoned_by if node.is_cordoned else "",
        node.why if node.is_cordoned else "",
        when(node.tested_at_s),
        VERDICTS.get(last.get("outcome", ""), last.get("outcome")),
        probability,
        last.get("evidence"),
    )


def _one_line(text: str, what: str) -> str:
    """Check a text, and return it without blanks at its ends.

    Raises:
        BadUse: the text is blank, too long for the ledger, or has control characters.
    """
    stripped = text.strip()
    if not stripped or not stripped.isprintable() or len(stripped) > MAX_LENGTH:
        raise BadUse(
            f"{what} is {text[:MAX_LENGTH]!r}. Give one line of 1 to {MAX_LENGTH} printable characters."
        )
    return stripped


@command.command()
@click.argument("name", metavar="NODE")
@click.option(
    "--why", required=True, metavar="TEXT", help="The reason, which is shown with the node."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def cordon(place: Place, name: str, why: str, as_json: bool) -> None:
    """Keep runs from launching anything on a node, except a run that has only this node.

    \b
    holdfast nodes cordon node7 --why "a fan is broken"
    """
    name, why = _one_line(name, "NODE"), _one_line(why, "--why")
    scheduler = cordon_node(place, name, why, by=whoami())
    if as_json:
        print_json("nodes_cordon", {"id": name, "why": why, "scheduler": scheduler})
    else:
        click.echo(f"{name} is cordoned. Its name must be as the scheduler or the host gives it.")
        _print(scheduler)


def cordon_node(place: Place, name: str, why: str, *, by: str) -> Sequence[str]:
    """Cordon a node in the ledger and in the scheduler; return the scheduler's answers.

    Raises:
        BadUse: the name or the reason is not one line.
        LedgerError: the ledger cannot be written.
    """
    name, why = _one_line(name, "NODE"), _one_line(why, "--why")
    with Ledger.open(place.ledger) as ledger:
        ledger.cordon(name, at_s=time.time(), by=by, why=why)
    return mark({name: why}, by=by, cordons=cordons_of_operator())


def return_cordoned_node(place: Place, name: str, *, force: bool) -> Sequence[str]:
    """Let runs use a cordoned node again; return the scheduler's answers.

    Raises:
        NotFound: no such node was tested or cordoned.
        BadUse: the node has passed no test since its cordon, and `force` is False.
    """
    name = _one_line(name, "NODE")
    with Ledger.open(place.ledger) as ledger:
        ledger.return_node(name, force=force)
    return unmark(name, cordons=cordons_of_operator())


@command.command("return")
@click.argument("name", metavar="NODE")
@click.option("--force", is_flag=True, help="Return the node even without a passed test since.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def return_(place: Place, name: str, force: bool, as_json: bool) -> None:
    """Let runs use a cordoned node again.

    \b
    holdfast nodes return node7
    """
    scheduler = return_cordoned_node(place, name, force=force)
    if as_json:
        print_json("nodes_return", {"id": name, "scheduler": scheduler})
    else:
        click.echo(f"Runs may use {name} again.")
        _print(scheduler)


def _print(sentences: Sequence[str]) -> None:
    """Print sentences on standard error, because standard output may hold JSON."""
    for sentence in sentences:
        click.echo(sentence, err=True)
