"""Provide `holdfast rules ls | show | withdraw | check | good add | good ls`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.main import Place
from holdfast.cli.output import print_json, print_table, when
from holdfast.core.clock import SystemClock
from holdfast.core.errors import HoldfastError, NotFound
from holdfast.core.ledger import Ledger
from holdfast.core.ledger.records import LearnedRule
from holdfast.core.processes import whoami
from holdfast.core.words import shorten

if TYPE_CHECKING:
    from holdfast.diagnose import Topic
    from holdfast.diagnose.agents import Endpoint


@click.group()
def command() -> None:
    """List, show, check and withdraw the diagnosis rules: packaged, learned, and your own.

    \b
    holdfast rules ls --learned
    holdfast rules check fluxfs.yaml
    """


@command.command()
@click.option("--learned", is_flag=True, help="Only rules learned from incidents and good runs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def ls(place: Place, learned: bool, as_json: bool) -> None:
    """List the rules and learned filters that are in force.

    \b
    holdfast rules ls
    holdfast rules ls --learned
    """
    with Ledger.open(place.ledger) as ledger:
        records = ledger.learned_rules()
    rows = (
        [] if learned else [_plain(topic, rule) for topic in _topics(place) for rule in topic.rules]
    )
    rows += [_fields(record) for record in records]
    if as_json:
        print_json("rules", {"rules": rows})
        return
    if not rows:
        click.echo(
            "No rules were learned yet. Add some: `holdfast incidents confirm ID` or "
            "`holdfast rules good add PATH`"
        )
        return
    columns = ["id", "author", "reason", "from", "what"]
    print_table(
        columns, [[shorten(str(row.get(name, "")), 100) for name in columns] for row in rows]
    )


@command.command()
@click.argument("rule_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def show(place: Place, rule_id: str, as_json: bool) -> None:
    """Print a rule as its file has it; for a learned rule, also where it was learned.

    \b
    holdfast rules show python-key-error
    """
    import yaml

    with Ledger.open(place.ledger) as ledger:
        records = [*ledger.learned_rules(), *ledger.learned_rules(withdrawn=True)]
    found = [_fields(one, whole=True) for one in records if one.rule_id == rule_id]
    found += [
        _plain(topic, rule, whole=True)
        for topic in _topics(place)
        for rule in topic.rules
        if rule.id == rule_id
    ]
    if not found:
        raise NotFound(f"There is no rule {rule_id!r}. `holdfast rules ls` lists those there are.")
    if as_json:
        print_json("rule", found[0])
        return
    click.echo(yaml.safe_dump(found[0], sort_keys=False, allow_unicode=True, width=110), nl=False)


@command.command()
@click.argument("rule_id", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def withdraw(place: Place, rule_id: str, as_json: bool) -> None:
    """Withdraw a learned rule or filter, so that it is not learned again.

    \b
    holdfast rules withdraw learned-networkerror-1f9c0a2e
    """
    with Ledger.open(place.ledger) as ledger:
        ledger.withdraw_learned_rule(rule_id, at_s=SystemClock().now_s(), by=whoami())
    if as_json:
        print_json("withdraw", {"id": rule_id})
        return
    click.echo(f"Withdrew {rule_id}.")


@command.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def check(place: Place, file: Path, as_json: bool) -> None:
    """Check a file of your own rules: the form, and the examples together with the packaged rules.

    \b
    holdfast rules check fluxfs.yaml
    """
    from holdfast.diagnose.memory import faults_of, own_topics, read_topic

    topic = read_topic(file)
    beside = [one for one in own_topics(place.home) if Path(one.name).resolve() != file.resolve()]
    faults = list(faults_of(topic, beside))
    if as_json:
        print_json("rules_check", {"file": str(file), "rules": len(topic.rules), "faults": faults})
    elif not faults:
        click.echo(
            f"{file}: {len(topic.rules)} rules, all examples right. Put it into {place.home / 'rules'} to use it."
        )
    if faults and not as_json:
        raise HoldfastError(f"{file}: {' '.join(faults)}")
    if faults:
        raise SystemExit(1)


@command.group()
def good() -> None:
    """Record and list runs that ended well, whose lines cannot be the root of a failure.

    \b
    holdfast rules good add logs/
    holdfast rules good ls
    """


@good.command("add")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--model", is_flag=True, help="Also let the model of HOLDFAST_LLM_URL find routine lines."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def good_add(place: Place, paths: tuple[str, ...], model: bool, as_json: bool) -> None:
    """Record the logs of one run that ended well, and learn its routine lines.

    \b
    holdfast rules good add logs-of-a-run-that-ended-well/
    """
    from holdfast.cli.diagnose import requested_endpoint
    from holdfast.diagnose.memory import add_good_run

    endpoint = requested_endpoint() if model else None
    notes: tuple[str, ...] = ()
    with Ledger.open(place.ledger) as ledger:
        done = add_good_run(ledger, list(paths))
        filters = [one.id for one in done.filters]
        if endpoint is not None:
            proposed, notes = _ask_for_filters(place, ledger, paths, done.good_id, endpoint)
            filters += proposed
    if as_json:
        fields = {
            "id": str(done.good_id),
            "lines": done.lines,
            "filters": filters,
            "withdrawn": list(done.withdrawn),
        }
        print_json("good_run", {**fields, "notes": list(notes)})
        return
    click.echo(f"Good run {done.good_id}: {done.lines} kinds of lines, {len(filters)} new filters.")
    for rule_id in done.withdrawn:
        click.echo(f"Withdrew {rule_id}: this run printed such a line and ended well.")
    for note in notes:
        click.echo(note)


def _ask_for_filters(
    place: Place, ledger: Ledger, paths: Sequence[str], good_id: int, endpoint: "Endpoint"
) -> tuple[list[str], tuple[str, ...]]:
    """Let a model vote on filters for the lines of a good run.

    Returns:
        The ids of the filters that were added, and notes on filters that were refused.
    """
    from holdfast.diagnose import find_files
    from holdfast.diagnose.agents import propose_filters, segments_of
    from holdfast.diagnose.memory import Known, keep_filters

    known = Known.of_ledger(ledger, place.home)
    segments = segments_of(find_files(paths).files, known.rules, known.filters)
    roots = [root for memory in ledger.memories() for root in memory.roots]
    proposed = propose_filters(segments, endpoint, known.rules, root_lines=roots)
    now_s = SystemClock().now_s()
    kept = keep_filters(
        ledger, proposed.filters, good_id, now_s=now_s, author=f"model {endpoint.model}"
    )
    return [one.id for one in kept], proposed.notes


@good.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_obj
def good_ls(place: Place, as_json: bool) -> None:
    """List the good runs.

    \b
    holdfast rules good ls
    """
    with Ledger.open(place.ledger) as ledger:
        runs = ledger.good_runs()
    if as_json:
        names = [
            {"id": str(o.good_id), "when_s": o.added_at_s, "lines": len(o.lines), "name": o.name}
            for o in runs
        ]
        print_json("good_runs", {"good_runs": names})
        return
    if not runs:
        click.echo("No good runs yet. `holdfast rules good add PATH` records one.")
        return
    print_table(
        ["id", "when", "lines", "name"],
        [(one.good_id, when(one.added_at_s), len(one.lines), one.name) for one in runs],
    )


def _topics(place: Place) -> "list[Topic]":
    from holdfast.diagnose import packaged_topics
    from holdfast.diagnose.memory import own_topics

    return [*packaged_topics(), *own_topics(place.home)]


def _plain(topic: Any, rule: Any, *, whole: bool = False) -> dict[str, Any]:
    """Return the fields of a packaged rule, or of a user's own rule."""
    fields = {
        "id": rule.id,
        "author": topic.name,
        "reason": rule.reason,
        "from": rule.source,
        "what": rule.pattern,
    }
    if not whole:
        return fields
    return {
        **{k: list(v) if isinstance(v, tuple) else v for k, v in vars(rule).items()},
        "topic": topic.name,
    }


def _fields(record: LearnedRule, *, whole: bool = False) -> dict[str, Any]:
    body = record.body
    fields = {
        "id": record.rule_id,
        "kind": record.kind,
        "author": record.author,
        "reason": body.get("reason", "") if record.kind == "rule" else "routine",
        "from": ", ".join(record.sources),
        "what": f"{'not in force: ' * (record.kind == 'suggestion')}{body.get('what') or body['pattern']}",
    }
    if not whole:
        return fields
    rest = {
        "sources": record.sources,
        "made_at_s": record.made_at_s,
        "withdrawn_at_s": record.withdrawn_at_s,
    }
    return {**fields, **body, **rest, "withdrawn_by": record.withdrawn_by}
