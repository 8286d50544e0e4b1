"""Call `holdfast diagnose` in this process."""

import json

from click.testing import CliRunner

from holdfast.cli.main import cli

FAILED = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 12, in <module>',
    "    print(settings['warmup'])",
    "          ~~~~~~~~^^^^^^^^^^",
    "KeyError: 'warmup'",
]
"""The traceback at the end of the log of the rank that fails."""


def holdfast(*arguments, given=None, fails=None, code=0):
    """Run the command; return its standard output, or with `fails` the error that it raised."""
    found = CliRunner().invoke(
        cli, ["diagnose", *map(str, arguments)], input=given, standalone_mode=False
    )
    if fails is not None:
        assert isinstance(found.exception, fails), found.output
        return str(found.exception)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert (found.return_value or 0) == code, found.output
    return found.stdout


def answer(*arguments, **options):
    said = holdfast(*arguments, "--json", **options).splitlines()
    assert len(said) == 1, "one object and nothing else"
    return json.loads(said[0])
