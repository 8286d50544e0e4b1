"""Provide `holdfast doctor`: show problems of this host, with the commands that fix them."""

from dataclasses import asdict
from pathlib import Path

import click

from holdfast.cli.output import print_json

UNDECIDED = 4


@click.command()
@click.argument("folder", default="checkpoints", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(folder: Path, *, as_json: bool) -> int:
    """Check this host before a training, and show how to fix each problem.

    \b
    holdfast doctor
    holdfast doctor /shared/checkpoints
    srun holdfast doctor /shared/checkpoints

    FOLDER is the folder for checkpoints, whose storage is measured. Each check ends within a
    minute. The exit code is 0 if nothing is wrong, 1 if something is wrong, and 4 if something
    could not be checked.
    """
    from holdfast.adopt import examine

    found = []
    for check, finding in examine(folder):
        found.append((check, finding))
        if not as_json:
            click.echo(f"{finding.outcome:<14}{check:<16}{finding.what}")
            if finding.mend:
                click.echo(f"{'':<30}mend: {finding.mend}")
    outcomes = [finding.outcome for _, finding in found]
    if as_json:
        findings = [{"check": check, **asdict(finding)} for check, finding in found]
        print_json("doctor", {"folder": str(folder), "findings": findings})
    else:
        click.echo(
            f"{outcomes.count('wrong')} wrong, {outcomes.count('not looked at')} not looked at, "
            f"{outcomes.count('good')} good."
        )
    if "wrong" in outcomes:
        return 1
    return UNDECIDED if "not looked at" in outcomes else 0
