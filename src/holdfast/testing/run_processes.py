"""Find the processes of a supervised run on this host, grouped by node.

They are the agent, the supervisor, the guard, the launcher, the shims and the ranks.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from holdfast.core.link import ENV_RUN

_AGENT = "holdfast.recover.agent.agent"
_SUPERVISOR = "holdfast.recover.supervisor_process"
_GUARD = "holdfast.recover.launching.guard"
_SHIM = "rank_shim"
_WARM = "holdfast.recover.shim.trainer"
_WRITER = "holdfast.checkpoint.writer"


@dataclass
class NodeProcesses:
    """The processes of one node.

    Attributes:
        name: the name of the node.
        run: the process of `holdfast run` itself.
        agents: the agents; usually one, none while the node starts.
        supervisors: the supervisors; usually one on the node that leads the run, none elsewhere.
        guards: the guards of the launchers; usually one, none while the node starts.
        launchers: the launchers; usually one, none while the node starts.
        shims: the shims of the ranks; none while the launcher starts.
        ranks: the processes that train, by rank.
    """

    name: str
    run: psutil.Process
    agents: list[psutil.Process] = field(default_factory=list)
    supervisors: list[psutil.Process] = field(default_factory=list)
    guards: list[psutil.Process] = field(default_factory=list)
    launchers: list[psutil.Process] = field(default_factory=list)
    shims: list[psutil.Process] = field(default_factory=list)
    ranks: dict[int, psutil.Process] = field(default_factory=dict)

    def writers(self) -> dict[int, psutil.Process]:
        """Return the processes that write checkpoints for the ranks, by rank."""
        found = {}
        for rank, process in self.ranks.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child, words in _commands(process.children()):
                    if f"{_WRITER}.process" in words:
                        found[rank] = child
        return found

    def tree(self) -> list[psutil.Process]:
        """Return all processes of the node, beginning with `holdfast run`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self.run, *self.run.children(recursive=True)]
        return []


def nodes_of(home: Path, run_id: str) -> list[NodeProcesses]:
    """Return the nodes of a run that have processes on this host, in the order of their start.

    A node without shims, such as a spare node, belongs to the run if its command line names the
    run.

    Args:
        home: the run's `$HOLDFAST_HOME`.
        run_id: the id of the run.
    """
    children: dict[int, list[psutil.Process]] = {}
    nodes, with_agent = {}, set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
            words = process.cmdline()
            nodes[process.pid] = process, _is_run(words)
            if _AGENT in words:  # any program that has started an agent is a node
                with_agent.add(process.ppid())
    runs = []
    for pid, (process, is_run) in nodes.items():
        with contextlib.suppress(psutil.Error):
            if (is_run or pid in with_agent) and _home_of(process) == home.absolute():
                runs.append(process)
    found = []
    for run in sorted(runs, key=lambda one: (one.create_time(), one.pid)):
        with contextlib.suppress(psutil.Error):
            node = _node(run, children)
            of_run = {_variable(shim, ENV_RUN) for shim in node.shims}
            if of_run == {run_id} or (not of_run and _names(run.cmdline(), run_id)):
                found.append(node)
    return found


def _node(run: psutil.Process, children: dict[int, list[psutil.Process]]) -> NodeProcesses:
    variables = run.environ()
    name = variables.get("HOLDFAST_NODE_NAME") or variables.get("SLURMD_NODENAME")
    node = NodeProcesses(name or os.uname().nodename, run)
    for process, words in _commands(children.get(run.pid, ())):
        if _AGENT in words:
            node.agents.append(process)
        elif _SUPERVISOR in words:
            node.supervisors.append(process)
        elif _GUARD in words:
            node.guards.append(process)
            for launcher, _ in _commands(children.get(process.pid, ())):
                node.launchers.append(launcher)
                for shim, shim_words in _commands(children.get(launcher.pid, ())):
                    if any(_SHIM in word for word in shim_words):
                        node.shims.append(shim)
    for shim in node.shims:
        trainer = _trainer(shim, children)
        rank = _variable(shim, "RANK")
        if trainer is not None and rank is not None:
            node.ranks[int(rank)] = trainer
    return node


def _trainer(
    shim: psutil.Process, children: dict[int, list[psutil.Process]]
) -> psutil.Process | None:
    """Return the process that trains below a shim.

    It is the shim's child or, if a warm process exists, the fork of the warm process.
    """
    waiting = None
    for process, words in _commands(children.get(shim.pid, ())):
        if _WARM in words:
            imports = words[words.index(_WARM) + 2 : words.index(_WARM) + 3]
            if imports == [""]:  # no warm process: this process is the trainer from its start
                return process
            forks = [one for one, its in _commands(children.get(process.pid, ())) if its == words]
            if forks:
                return forks[0]
            waiting = process
        elif not any(_WRITER in word for word in words):
            return process
    return waiting


def _commands(processes: Sequence[psutil.Process]) -> Iterator[tuple[psutil.Process, list[str]]]:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and (words := process.cmdline()):
                yield process, words


def _is_run(words: Sequence[str]) -> bool:
    """Return True if a command line starts `holdfast run`, by module or by any path."""
    for place, word in enumerate(words):
        if word == "holdfast.cli.main" or Path(word).name == "holdfast":
            return "run" in words[place + 1 :]
        if word == "--":
            break
    return False


def _names(words: Sequence[str], run_id: str) -> bool:
    """Return True if the options of a `holdfast run` command line name the run."""
    options = list(words[: words.index("--")] if "--" in words else words)
    return f"--name={run_id}" in options or ["--name", run_id] in [
        options[place : place + 2] for place in range(len(options))
    ]


def _home_of(process: psutil.Process) -> Path:
    home = process.environ().get("HOLDFAST_HOME") or ".holdfast"
    return (Path(process.cwd()) / home).absolute()


def _variable(process: psutil.Process, name: str) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(name)
    return None
