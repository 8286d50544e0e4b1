"""Execute every block of a newcomer's pages (`PAGES`); check the blocks of all other pages of docs/.

Usage: `docs_blocks.py [PAGE …]`. Each page has a folder of its own, with a training script, its
checkpoints and one run, logs of a failed job, and job records. The first block of `STARTING_PAGE`
makes the run, once for all pages. A line of a block that needs more (`NEEDS`, or the comment
`<!-- needs: … -->` before the block) is not executed: its command line is parsed, Python is
compiled, TOML, YAML and JSON are loaded. A Python block that uses a name of
`docs_workspace/given.py` starts with these names, which a reader's script has: a model, a loader,
a step.

A block that exceeds `LIMIT_S` fails. Every process that a block has started ends with the block,
or with this program if it is killed.

Exit code: 0 if no block failed, else 1.
"""

import ast
import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import yaml
from markdown_it import MarkdownIt

from holdfast.cli.main import cli
from holdfast.cluster.leash import release, start_on_leash
from holdfast.core.errors import HoldfastError

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/running.md",
    "docs/evaluation.md",
    "docs/trace.md",
    "docs/diagnosis.md",
    "docs/on-call.md",
)
"""A newcomer's path. The other pages of docs/ are checked only, unless an argument names them."""
OTHER_PAGE = "what its page describes: the page is not on a newcomer's path"
"""The need of a block on such a page, if the block names none."""
STARTING_PAGE = "docs/running.md"
"""The page whose first block starts the run that the other blocks of all pages read."""
WORKSPACE = ROOT / ".ci/docs_workspace"
GIVEN = "from given import *\n"
LIMIT_S = 300.0
"""For one block. The slowest one uses 20 CPU seconds, which take two minutes beside many tests."""
NEEDS = (
    ("an index of packages", r"^pip install"),
    ("a step of CI of its own", r"^make "),
    ("arguments of the reader's (a synopsis)", r"…|\[(?!\[)[^\]']*\]"),
    ("Slurm", r"\b(srun|sbatch)\b|--on slurm"),
    ("a Ray cluster", r"--on ray"),
    ("Kubernetes", r"\bkubectl\b"),
    ("several nodes", r"--rendezvous|\bnode7\b"),
    ("an idle host", r"holdfast nodes check"),
    ("a run that outlives the page", r"--detach"),
    ("eight GPUs", r"--nproc(-per-node)? 8"),
    ("a browser", r"holdfast ui\b"),
    ("a terminal", r"--watch"),
    ("tasks and a model", r"gsm8k|nightly\.toml"),
    (
        "the reader's own run, incident, rule or checkpoint",
        r"\b(RUN|ID|DIR|SOURCE|OTHER)\b|\bm3\b|\b7\b|learned-",
    ),
)
"""What a line of a shell needs, and the pattern by which such a line is recognised."""
EXIT_CODES = {"holdfast doctor": "[14]"}
"""The exit codes, beside 0, with which a command answers about the machine of the test."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `need` is what the page's comment names, else the empty text."""

    page: str
    line: int
    language: str
    text: str
    need: str


@dataclass(frozen=True)
class Result:
    """What became of one line or one block: `need` if it was only checked, `error` if it failed."""

    block: Block
    text: str
    need: str = ""
    error: str = ""


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page with the comments that stand before them."""
    need = ""
    for token in MarkdownIt().parse(text):
        if token.type == "html_block":
            found = re.fullmatch(r"<!-- needs: (.+) -->", token.content.strip())
            need = found[1] if found else ""
        elif token.type == "fence":
            assert token.map is not None
            language = token.info.partition(" ")[0]
            yield Block(page, token.map[0] + 1, language, token.content, need)
            need = ""
        elif token.level == 0:
            need = ""


def run_block(block: Block, folder: Path) -> list[Result]:
    """Execute or check one block; return a result for each of its commands."""
    if block.language in ("sh", "bash"):
        return _run_shell(block, folder)
    if block.language == "python":
        return [_run_python(block, folder)]
    load = {
        "toml": tomllib.loads,
        "json": json.loads,
        "yaml": lambda text: list(yaml.safe_load_all(text)),
    }
    if block.language not in load:
        return [Result(block, block.text, need=block.need or "nothing: it shows output")]
    try:
        load[block.language](block.text)
    except (ValueError, yaml.YAMLError) as error:
        return [Result(block, block.text, error=str(error))]
    return [Result(block, block.text)]


def need_of(command: str, block: Block) -> str:
    """Return what a line of a shell needs that the workspace does not have; the empty text for nothing."""
    if block.need:
        return block.need
    code = command.partition(" #")[0]
    return next((need for need, pattern in NEEDS if re.search(pattern, code)), "")


def _run_shell(block: Block, folder: Path) -> list[Result]:
    """Execute the lines of a block that need nothing in one shell; parse the others."""
    commands = [one for one in block.text.replace("\\\n", " ").splitlines() if one.strip()]
    if "#SBATCH" in block.text:
        commands = [one for one in commands if not one.startswith("#")]
    checked = [
        Result(block, command, need=need_of(command, block), error=check_command(command))
        for command in commands
    ]
    script = "\n".join(_accepting(one.text) for one in checked if not one.need)
    error = _execute(["bash", "-e", "-c", script], folder) if script else ""
    if not error:
        return checked
    return [one for one in checked if one.need or one.error] + [Result(block, script, error=error)]


def _accepting(command: str) -> str:
    """Return a line of a shell that also succeeds with the exit codes of `EXIT_CODES`."""
    for start, codes in EXIT_CODES.items():
        if command.startswith(start):
            code = command.partition(" #")[0]
            return f"{code} || [[ $? =~ ^{codes}$ ]]"
    return command


def check_command(line: str) -> str:
    """Return why `holdfast` would refuse the words of a line; the empty text if it takes them."""
    words = shlex.split(line.replace("[", " ").replace("]", " ").replace("…", ""), comments=True)
    while "holdfast" in words:
        words = words[words.index("holdfast") + 1 :]
        ends = (n for n, word in enumerate(words) if word in ("|", "||", "&&", ">", "2>&1", ";"))
        own = words[: next(ends, len(words))]
        if own and own[0] != "options":
            error = _parse([word for word in own if word != "options"])
            if error:
                return error
    return ""


def _parse(words: list[str]) -> str:
    context, command = click.Context(cli, info_name="holdfast"), cli
    while isinstance(command, click.Group) and words:
        below = command.get_command(context, words[0])
        if below is None:
            break
        context, command, words = click.Context(below, parent=context), below, words[1:]
    try:
        # An example may name files that only the reader has, so invalid values are accepted.
        # Unknown options are errors.
        with contextlib.suppress(click.BadParameter, HoldfastError):
            command.make_context(command.name, list(words), parent=context)
    except click.UsageError as error:
        return error.format_message()
    return ""


def _run_python(block: Block, folder: Path) -> Result:
    try:
        compile(block.text, f"{block.page}:{block.line}", "exec")
    except SyntaxError as error:
        return Result(block, block.text, error=str(error))
    if block.need:
        return Result(block, block.text, need=block.need)
    code = GIVEN + block.text if _uses_given(block.text, folder) else block.text
    return Result(block, block.text, error=_execute([sys.executable, "-c", code], folder))


def _uses_given(text: str, folder: Path) -> bool:
    """Return whether a block uses what `given.py` defines; else the import of torch is saved."""
    given = ast.parse((folder / "given.py").read_text())
    defined = {node.name for node in ast.walk(given) if isinstance(node, ast.FunctionDef)}
    defined |= {
        node.id
        for node in ast.walk(given)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return bool(used & defined)


def _execute(command: Sequence[str], folder: Path) -> str:
    """Run a command in a page's folder; return its output if it fails, else the empty text."""
    output = folder.parent / f"{folder.name}.output"
    leashed = start_on_leash(
        command, output, environment=_environment(folder), working_folder=folder
    )
    try:
        end = f"exit code {leashed.wait(LIMIT_S)}"
    except subprocess.TimeoutExpired:
        end = f"killed after {LIMIT_S:g} s, the limit of a block"
    finally:
        code = release(leashed)  # also kills all processes that the command has started
    if code == 0:
        return ""
    return f"{end}\n{output.read_text(errors='replace')[-3000:]}"


def _environment(folder: Path) -> dict[str, str]:
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": binaries,
        "HOLDFAST_HOME": str(folder / ".holdfast"),
        "MPLBACKEND": "agg",
    }


def prepare(folder: Path) -> list[Result]:
    """Fill the folder that each page has a copy of; return what became of the first block."""
    shutil.copytree(WORKSPACE, folder)
    script = (folder / "train.py").read_text()
    first = next(blocks_of(STARTING_PAGE, (ROOT / STARTING_PAGE).read_text()))
    results = run_timed(first, folder)
    (folder / "train.py").write_text(script)
    return results


def run_page(page: str, text: str, folder: Path) -> list[Result]:
    """Execute the blocks of a page, in order, in its own folder; print the seconds of each."""
    blocks = list(blocks_of(page, text))[page == STARTING_PAGE :]
    return [result for block in blocks for result in run_timed(block, folder)]


def run_timed(block: Block, folder: Path) -> list[Result]:
    """Execute or check one block, and print its seconds and its CPU seconds."""
    began_s, cpu_s = time.monotonic(), _cpu_s()
    results = run_block(block, folder)
    took_s, cpu_s = time.monotonic() - began_s, _cpu_s() - cpu_s
    if not all(one.need for one in results):
        print(f"{took_s:6.1f} s {cpu_s:6.1f} CPU s  {block.page}:{block.line}", flush=True)
    return results


def check_page(page: str, text: str) -> list[Result]:
    """Check the blocks of a page without executing them."""
    return [
        result
        for block in blocks_of(page, text)
        for result in run_block(replace(block, need=block.need or OTHER_PAGE), ROOT)
    ]


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of all processes that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def report(results: Sequence[Result]) -> int:
    """Print the failed blocks, and how many were executed or need what; return the exit code."""
    failed = [one for one in results if one.error]
    needs = Counter(one.need for one in results if one.need and not one.error)
    for need, count in sorted(needs.items()):
        print(f"\n{count} checked only, needs {need}:")
        for one in results:
            if one.need == need and not one.error:
                print(f"  {one.block.page}:{one.block.line}  {one.text.strip().splitlines()[0]}")
    for one in failed:
        print(f"\nFAILED {one.block.page}:{one.block.line}\n{one.text}\n{one.error}")
    executed = len(results) - needs.total() - len(failed)
    print(f"\n{executed} executed, {needs.total()} checked only, {len(failed)} failed")
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    """Execute the pages that the arguments name; by default a newcomer's path, and check the rest."""
    began_s = time.monotonic()
    pages = [Path(one).resolve() for one in arguments] or [ROOT / page for page in PAGES]
    if missing := [str(page) for page in pages if not page.is_file()]:
        print(f"no such page: {', '.join(missing)}; name pages like docs/trace.md")
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        prepared = Path(scratch) / "prepared"
        results = prepare(prepared)
        for number, page in enumerate(pages):
            folder = Path(scratch) / str(number)
            shutil.copytree(prepared, folder)
            results += run_page(str(page.relative_to(ROOT)), page.read_text(), folder)
    if not arguments:
        for page in sorted((ROOT / "docs").rglob("*.md")):
            if page not in pages:
                results += check_page(str(page.relative_to(ROOT)), page.read_text())
    print(f"\n{time.monotonic() - began_s:.0f} s, {_cpu_s():.0f} CPU s")
    return report(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
