"""The help of each command: whole summaries, examples that parse, and the shell's completion."""

import contextlib
import inspect
import os
import shlex
import subprocess
import sys

import click
import pytest

from holdfast.cli.main import cli
from holdfast.core.errors import BadUse


def commands(command=cli, context=None, path=()):
    """Yield every command below `holdfast` with its path and its context."""
    context = context or click.Context(cli, info_name="holdfast", terminal_width=80)
    if path:
        yield path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            yield from commands(
                below,
                click.Context(below, info_name=name, parent=context),
                (*path, name),
            )


ALL = {" ".join(path): (command, context) for path, command, context in commands()}


def examples(path):
    """Return the lines of a command's help that run the command, as words after `holdfast`."""
    blocks = inspect.cleandoc(ALL[path][0].help or "").split("\n\n")
    lines = [line for block in blocks if block.startswith("\b") for line in block.splitlines()[1:]]
    words = [shlex.split(line.partition("#")[0]) for line in lines]
    return [line[line.index("holdfast") + 1 :] for line in words if "holdfast" in line]


@pytest.mark.parametrize("path", ALL)
def test_every_command_has_an_example_that_the_command_line_takes(path):
    found = examples(path)
    words = path.split()
    assert any(one[: len(words)] == words for one in found), "the help needs an example"
    for line in found:
        context, command, rest = click.Context(cli, info_name="holdfast"), cli, line
        while isinstance(command, click.Group) and rest:
            below = command.get_command(context, rest[0])
            if below is None:
                break
            context, command, rest = click.Context(below, parent=context), below, rest[1:]
        # The files of an example are the reader's.
        with contextlib.suppress(click.BadParameter, BadUse):
            command.make_context(command.name, rest, parent=context)


@pytest.mark.parametrize(
    "path", [path for path, (command, _) in ALL.items() if isinstance(command, click.Group)]
)
def test_no_summary_is_cut(path):
    group, context = ALL[path]
    shown = " ".join(group.get_help(context).split())
    for name in group.list_commands(context):
        sentence = group.get_command(context, name).help.split("\n\n")[0]
        first = " ".join(sentence.split()).partition(". ")[0].rstrip(".")
        assert f"{name} {first}" in shown


def complete(shell, *words):
    """Return what a shell receives when the user asks for completion after `words`, and errors."""
    environment = {
        "_HOLDFAST_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": " ".join(["holdfast", *words]),
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words)),
    }
    # The name of the program decides the name of the variable.
    script = (
        "import atexit, sys\nsys.argv = ['holdfast']\n"
        "atexit.register(lambda: print('holdfast.cli.demo' in sys.modules, file=sys.stderr))\n"
        "from holdfast.cli.main import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines(), done.stderr


def test_a_shell_completes_subcommands_and_options():
    stop = ["plain", "stop", "Save a run's state and stop it."]
    assert complete("zsh", "runs", "st") == (stop, "False\n")
    seed = "plain,--seed\tThe seed of the weights, the data order and the faults."
    assert complete("fish", "demo", "--se") == ([seed], "True\n")


def test_a_shell_completes_commands_and_imports_none():
    assert complete("bash", "d") == (
        ["plain,doctor", "plain,demo", "plain,diagnose"],
        "False\n",
    )
