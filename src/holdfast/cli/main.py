"""Run the `holdfast` program: find the command, and turn an error into a message and an exit code.

The exit codes are 0 done, 1 the job failed for the user's reason, 2 bad use, 3 budget spent, 4
incomplete.
"""

import errno
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from holdfast import __version__
from holdfast.cli.output import print_error
from holdfast.core.errors import HoldfastError, NotFound
from holdfast.core.paths import holdfast_home, ledger_at, ledger_file, ledger_url

COMMANDS = {
    "run": ("holdfast.cli.run.command", "Run a training job and keep it running."),
    "init": ("holdfast.cli.init", "Show the lines that add Holdfast to a training script."),
    "doctor": ("holdfast.cli.doctor", "Check this host, and show how to fix each problem."),
    "demo": ("holdfast.cli.demo", "Train a small GPT while faults strike, and report."),
    "runs": ("holdfast.cli.runs", "List, show, stop and remove runs."),
    "explain": (
        "holdfast.cli.explain",
        "Show what happened in a run, what was done, and what it cost.",
    ),
    "logs": ("holdfast.cli.logs", "Print what a run's ranks printed."),
    "diagnose": ("holdfast.cli.diagnose", "Find out why a job failed, from its logs."),
    "incidents": (
        "holdfast.cli.incidents",
        "List and show incidents, and confirm or correct their causes.",
    ),
    "ledger": (
        "holdfast.cli.ledger",
        "Migrate the ledger back for an earlier version of Holdfast.",
    ),
    "ui": ("holdfast.cli.ui", "Serve the runs, incidents and nodes as live pages."),
    "nodes": ("holdfast.cli.nodes", "Test nodes, and cordon the faulty ones."),
    "rules": ("holdfast.cli.rules", "List, check and withdraw the rules of the diagnosis."),
    "profile": (
        "holdfast.cli.profile.command",
        "Profile one job: counters of its nodes, phases of its ranks.",
    ),
    "trace": ("holdfast.cli.trace", "Show where a cluster's GPU time goes."),
    "eval": (
        "holdfast.cli.eval.command",
        "Evaluate checkpoints: a suite's scores, fast and exact.",
    ),
    "simulate": (
        "holdfast.cli.simulate",
        "Simulate a long job and its failures, on any number of GPUs.",
    ),
    "plan": (
        "holdfast.cli.plan",
        "Advise on the save interval, spare nodes and timeouts, from the ledger.",
    ),
    "checkpoint": (
        "holdfast.cli.checkpoint",
        "List, verify, compare, prune and convert checkpoints.",
    ),
}
"""The module and the summary of each command.

A module is imported only when its command is called, so that `--help` answers at once.
"""

MAX_SUMMARY_LENGTH = 200
"""The most characters of a command's summary; a test checks this."""


@dataclass(frozen=True)
class Place:
    """The home folder and the ledger's URL that a command uses; click's context object."""

    home: Path
    ledger: str

    def existing_ledger(self) -> str:
        """Return the ledger's URL; refuse a named ledger that does not exist.

        A command that only reads would create that ledger, and find nothing in it.

        Raises:
            NotFound: there is no such file.
        """
        file = ledger_file(self.ledger)
        is_default = self.ledger == ledger_url(self.home)
        if not (is_default or file is None or file.exists()):
            raise NotFound(
                f"There is no ledger {file}. Check the path after --ledger; `holdfast --ledger PATH run` "
                "creates a ledger."
            )
        return self.ledger


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        command.name = cmd_name  # otherwise the site's reference shows the function's name
        _keep_summaries_whole(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command without importing the commands' modules."""
        names = [
            CompletionItem(name, help=help_text)
            for name, (_, help_text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])


def _keep_summaries_whole(command: click.Command) -> None:
    """Set the summary of every subcommand, which click would cut at the terminal width."""
    for subcommand in getattr(command, "commands", {}).values():
        subcommand.short_help = subcommand.get_short_help_str(limit=MAX_SUMMARY_LENGTH)
        _keep_summaries_whole(subcommand)


@click.group("holdfast", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="holdfast")
@click.option(
    "--ledger",
    metavar="PATH|URL",
    help="The ledger; default: ledger.db in $HOLDFAST_HOME or ./.holdfast.",
)
@click.pass_context
def cli(context: click.Context, ledger: str | None) -> None:
    """Keep LLM development running on GPU clusters."""
    home = holdfast_home()
    context.obj = Place(home, ledger_at(ledger) if ledger else ledger_url(home))


def _open_closed_streams() -> None:
    """Open the null device in place of each standard stream that is closed (`>&-`).

    Otherwise the next file that is opened would get the file descriptor of the stream.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            # `os.open` returns the lowest free number, which is `fd`.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w" if fd else "r", closefd=False))


def main() -> None:
    """Run the `holdfast` program."""
    _open_closed_streams()
    try:
        code = _exit_code(asks_for_json(sys.argv[1:]))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the pipe (`| head`) has ended. No error can be shown, not even the error of
        # Python's final flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def asks_for_json(words: Sequence[str]) -> bool:
    """Return True if a command line requests JSON, even if the command line is wrong.

    The words after `--` belong to the user's own command and do not count.
    """
    own = itertools.takewhile(lambda word: word != "--", words)
    return any(word in ("--json", "--each") for word in own)


def _exit_code(as_json: bool) -> int:
    """Run the command, and return its exit code; print the error if the command fails."""
    try:
        code = cli.main(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except HoldfastError as error:
        print_error(str(error), as_json=as_json)
        return error.exit_code
    except click.ClickException as error:
        if not as_json:
            error.show()
            return error.exit_code
        context = getattr(error, "ctx", None)
        path = cli.name if context is None else context.command_path
        print_error(error.format_message(), f"See: {path} --help", as_json=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt) as error:
        said = str(error.__cause__ or error)  # click raises Abort from the original exception
        if said or as_json:
            print_error(said or "Interrupted.", as_json=as_json)
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        step = (
            "Free some space there, or name another place"
            if full
            else "Check that path and its permissions"
        )
        print_error(f"{error}.", f"{step}.", as_json=as_json)
        return 2


if __name__ == "__main__":
    main()
