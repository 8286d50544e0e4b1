"""Inject real faults into a supervised run on this host, by a seeded schedule, and log each fault.

    injector = Injector(
        "faults.jsonl", home=home, run_id="r", seed=7, orders="orders", checkpoints="checkpoints"
    )
    environment = {**os.environ, **injector.environment}
    subprocess.Popen(["holdfast", "run", "--name", "r", ...], env=environment)
    injector.inject("rank killed", rank=1)
    injector.follow(schedule(7, mtbf_s=60, duration_s=1800, kinds=injector.kinds), is_over=...)
    injector.close()

The log is the ground truth for a comparison with what Holdfast detected. It has two JSON lines for
each fault, `injected` and then either `took_effect` or `no_effect`. A fault that ends by itself has
a third line, `ended`. `read_log` joins the lines of each fault.
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import psutil

from holdfast.checkpoint import scan
from holdfast.core.errors import BadUse
from holdfast.testing import faults, rank_faults
from holdfast.testing.hosts import Hosts
from holdfast.testing.run_processes import NodeProcesses, nodes_of

Kind = Literal[
    "rank killed",
    "rank frozen",
    "deadlock",
    "NaN gradients",
    "bad batch",
    "damaged checkpoint",
    "node killed",
    "agent killed",
    "supervisor killed",
    "shim killed",
    "launcher killed",
    "writer killed",
    "disk full",
    "network cut",
    "slow rank",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
WEIGHTS: Final[Mapping[Kind, int]] = {
    "rank killed": 22,
    "rank frozen": 8,
    "deadlock": 8,
    "NaN gradients": 8,
    "bad batch": 7,
    "damaged checkpoint": 8,
    "node killed": 7,
    "agent killed": 6,
    "supervisor killed": 6,
    "shim killed": 3,
    "launcher killed": 3,
    "writer killed": 4,
    "disk full": 3,
    "network cut": 3,
    "slow rank": 4,
}
"""The number of faults of each kind in 100 faults.

Most faults are exits of ranks, as in the published counts of large trainings.
"""
_IN_SCRIPT: Final[Mapping[Kind, str]] = {
    "deadlock": "deadlock",
    "NaN gradients": "nan",
    "bad batch": "bad batch",
    "slow rank": "slow",
}
"""The kinds of faults inside the training script, with their names in `rank_faults`."""
LASTS_S: Final[Mapping[Kind, float]] = {"disk full": 10.0, "network cut": 10.0, "slow rank": 20.0}
"""Seconds after which a fault ends by itself."""
SLOW_BY_S = 0.1
BAD_BATCHES = 4
EFFECT_TIMEOUT_S = 60.0
TARGET_TIMEOUT_S = 60.0
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A planned fault, to be injected `at_s` seconds after the start of the schedule."""

    at_s: float
    kind: Kind


def schedule(
    seed: int,
    *,
    mtbf_s: float,
    duration_s: float,
    kinds: Sequence[Kind] = KINDS,
    weights: Mapping[Kind, int] = WEIGHTS,
) -> list[Planned]:
    """Draw a schedule of faults, with exponentially distributed times between them.

    Args:
        seed: the seed of the random draws.
        mtbf_s: the mean time between failures, in seconds.
        duration_s: the length of the schedule, in seconds.
        kinds: the kinds of faults to draw from.
        weights: the weight of each kind.

    Raises:
        BadUse: no kind is possible, or a time is not positive.
    """
    possible = [kind for kind in kinds if weights.get(kind, 0) > 0]
    if not possible or mtbf_s <= 0:
        raise BadUse("A schedule needs a kind with a weight above 0, and an mtbf_s above 0.")
    source = random.Random(seed)
    planned, at_s = [], source.expovariate(1 / mtbf_s)
    while at_s < duration_s:
        kind = source.choices(possible, [weights[kind] for kind in possible])[0]
        planned.append(Planned(at_s=at_s, kind=kind))
        at_s += source.expovariate(1 / mtbf_s)
    return planned


@dataclass(frozen=True, kw_only=True)
class Injected:
    """An injected fault, as recorded in the log.

    Attributes:
        number: the number of the fault, from 1.
        kind: see `Kind`.
        at_s: the time of the injection, in Unix seconds.
        at_monotonic_s: the time of the injection, in seconds of the monotonic clock.
        node: the name of the node that the fault strikes; None if there is no such node.
        rank: the rank that the fault strikes; None if there is no such rank.
        pid: the process that the fault strikes; None if there is no such process.
        parameters: the parameters of the fault, such as `for_s`.
        detail: a description of the fault, or the reason why the fault had no effect.
        took_effect_at_s: the time of the effect, in Unix seconds; None without an effect.
        ended_at_s: the time at which the fault ended by itself, in Unix seconds; None if the fault
            has not ended or does not end by itself.
    """

    number: int
    kind: Kind
    at_s: float
    at_monotonic_s: float
    node: str | None = None
    rank: int | None = None
    pid: int | None = None
    parameters: Mapping[str, Any]
    detail: str = ""
    took_effect_at_s: float | None = None
    ended_at_s: float | None = None


class Injector:
    """Inject faults into a run's processes, files and network links on this host."""

    def __init__(
        self,
        log: Path | str,
        *,
        home: Path | str,
        run_id: str,
        seed: int = 0,
        orders: Path | str | None = None,
        checkpoints: Path | str | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        """Store the run and the folders that the faults need.

        Args:
            log: the file of the ground truth; lines are appended.
            home: the run's `$HOLDFAST_HOME`.
            run_id: the id of the run.
            seed: the seed for the choice of targets and damages.
            orders: a folder through which faults are requested inside a script that calls
                `RankFaults`; None leaves these faults out.
            checkpoints: the job's folder of checkpoints; None leaves out damaged checkpoints and
                full disks.
            hosts: the emulated hosts of the nodes; None leaves out cut network links.
        """
        self._log = Path(log).absolute()
        self._home, self._run_id = Path(home).absolute(), run_id
        self._orders = None if orders is None else Path(orders).absolute()
        self._checkpoints = None if checkpoints is None else Path(checkpoints).absolute()
        self._hosts = hosts
        self._source = random.Random(seed)
        self._damaged: set[tuple[Path, int]] = set()
        """The folder and inode of each damaged checkpoint, since a step may be saved again."""
        self._writing = threading.Lock()
        self._ending: dict[int, tuple[threading.Timer, Callable[[], None]]] = {}
        self._number = max((one.number for one in read_log(self._log)), default=0)
        if self._log.exists() and not self._log.read_text().endswith("\n"):
            with self._log.open("a") as file:  # the next line must not join a line that was cut off
                file.write("\n")
        if self._orders is not None:
            self._orders.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that the job needs for faults inside its script."""
        return {} if self._orders is None else {rank_faults.ENV_FOLDER: str(self._orders)}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of faults that the given folders and hosts allow."""
        lacking: set[Kind] = set()
        if self._orders is None:
            lacking |= set(_IN_SCRIPT)
        if self._checkpoints is None:
            lacking |= {"damaged checkpoint", "disk full"}
        if self._hosts is None:
            lacking.add("network cut")
        return tuple(kind for kind in KINDS if kind not in lacking)

    def follow(
        self, planned: Sequence[Planned], *, is_over: Callable[[], bool] = lambda: False
    ) -> list[Injected]:
        """Inject each planned fault when its time has come; return the injected faults.

        The times count from this call.

        Args:
            planned: see `schedule`.
            is_over: returns True to leave out the remaining faults; called while waiting.
        """
        began_s = time.monotonic()
        done: list[Injected] = []
        for one in planned:
            while time.monotonic() < began_s + one.at_s:
                if is_over():
                    return done
                time.sleep(POLL_S)
            if is_over():
                return done
            done.append(self.inject(one.kind))
        return done

    def inject(
        self,
        kind: Kind,
        *,
        rank: int | None = None,
        node: str | None = None,
        for_s: float | None = None,
    ) -> Injected:
        """Inject one fault as soon as there is a target for it.

        Args:
            kind: see `KINDS`.
            rank: the rank to strike; None for a random choice.
            node: the name of the node to strike; None for a random choice.
            for_s: the duration, in seconds, of a fault that ends by itself; None for the value in
                `LASTS_S`.

        Raises:
            BadUse: the kind is not possible here, or `for_s` is given for a kind that does not end
                by itself. No fault was injected.
        """
        if kind not in self.kinds:
            possible = ", ".join(self.kinds)
            raise BadUse(f"{kind!r} is not possible with this injector. Choose one of: {possible}.")
        if for_s is None:
            for_s = LASTS_S.get(kind)
        elif kind not in LASTS_S:
            raise BadUse(f"{kind!r} does not end by itself. Leave out for_s.")
        self._number += 1
        parameters: dict[str, Any] = {} if for_s is None else {"for_s": for_s}
        struck = _Struck(self._number, kind, parameters)
        if kind == "disk full":
            self._disk_full(struck)
        elif (target := self._target(kind, rank, node)) is None:
            self._write(struck, "injected")
            struck.detail = f"there was nothing to strike within {TARGET_TIMEOUT_S:.0f} s"
            self._write(struck, "no_effect")
        else:
            struck.node = target.node.name
            struck.rank, struck.pid = target.rank, target.process.pid
            self._strike(struck, target)
        return struck.injected()

    def close(self) -> None:
        """End all faults that would end by themselves later."""
        for timer, end in [*self._ending.values()]:
            timer.cancel()
            end()

    def _target(self, kind: Kind, rank: int | None, node: str | None) -> "_Target | None":
        until_s = time.monotonic() + TARGET_TIMEOUT_S
        while time.monotonic() < until_s:
            targets = _targets(kind, nodes_of(self._home, self._run_id))
            fitting = [
                one for one in targets if rank in (None, one.rank) and node in (None, one.node.name)
            ]
            if fitting:
                return self._source.choice(fitting)
            time.sleep(POLL_S)
        return None

    def _strike(self, struck: "_Struck", target: "_Target") -> None:
        if struck.kind in _IN_SCRIPT:
            self._in_script(struck)
            return
        if struck.kind == "network cut":
            self._cut(struck, target)
            return
        if struck.kind == "damaged checkpoint":
            detail = self._damage()
            struck.detail = (
                detail or "there were fewer than two whole checkpoints: nothing was done"
            )
            if detail is None:
                self._write(struck, "injected")
                self._write(struck, "no_effect")
                return
        self._write(struck, "injected")
        try:
            match struck.kind:
                case "rank frozen":
                    faults.freeze(target.process.pid)
                case "node killed":
                    for process in target.node.tree():
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
                case "damaged checkpoint":
                    for process in target.process.children():  # their memory holds the whole state
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
                    target.process.kill()
                case _:
                    target.process.kill()
        except (psutil.NoSuchProcess, ProcessLookupError):
            struck.detail = "the process had just ended"
            self._write(struck, "no_effect")
        else:
            struck.took_effect_at_s = time.time()
            self._write(struck, "took_effect")

    def _in_script(self, struck: "_Struck") -> None:
        assert self._orders is not None
        assert struck.rank is not None
        kind = _IN_SCRIPT[struck.kind]
        if kind == "slow":
            struck.parameters["by_s"] = SLOW_BY_S
        if kind == "bad batch":
            struck.parameters["batches"] = BAD_BATCHES
        self._write(struck, "injected")
        rank_faults.order(self._orders, struck.rank, struck.number, kind, **struck.parameters)
        until_s = time.monotonic() + EFFECT_TIMEOUT_S
        while (effect := rank_faults.effect_of(self._orders, struck.number)) is None:
            if time.monotonic() > until_s:
                rank_faults.withdraw(self._orders, struck.rank, kind)
                struck.detail = (
                    f"the script did not call RankFaults within {EFFECT_TIMEOUT_S:.0f} s"
                )
                self._write(struck, "no_effect")
                return
            time.sleep(POLL_S)
        struck.took_effect_at_s, struck.pid = float(effect["at_s"]), int(effect["pid"])
        if "batches" in effect:
            struck.parameters["batches"] = effect["batches"]
        self._write(struck, "took_effect")

    def _damage(self) -> str | None:
        """Damage the newest checkpoint; return a description of the damage.

        If no other intact checkpoint would remain, nothing is damaged and the result is None.
        """
        assert self._checkpoints is not None
        found = {}
        for one in sorted(scan(self._checkpoints), key=lambda one: one.step):
            with contextlib.suppress(OSError):  # deleted by retention meanwhile
                found[one.path, one.path.stat().st_ino] = one
        whole = [key for key in found if key not in self._damaged]
        shards = sorted(whole[-1][0].glob("*.distcp")) if len(whole) > 1 else []
        if not shards:
            return None
        self._damaged.add(whole[-1])
        path = self._source.choice(shards)
        name = f"{path.parent.name}/{path.name}"
        # A checkpoint may be deleted by retention meanwhile.
        with contextlib.suppress(OSError):
            match self._source.choice(("flip", "truncate", "delete")):
                case "flip":
                    offset, bit = faults.flip_bit(path, self._source)
                    return f"bit {bit} of byte {offset} of {name} was flipped"
                case "truncate":
                    return f"{name} was cut off at byte {faults.truncate(path, self._source)}"
                case _:
                    path.unlink()
                    return f"{name} was deleted"
        return f"{name} was gone before it was damaged"

    def _disk_full(self, struck: "_Struck") -> None:
        assert self._checkpoints is not None
        filler = self._checkpoints.parent / f".filler-{struck.number}"
        self._write(struck, "injected")
        try:
            size_bytes = faults.fill_disk(filler)
        except BadUse as error:
            struck.detail = str(error)
            self._write(struck, "no_effect")
            return
        struck.detail = f"{size_bytes} bytes were written beside {self._checkpoints.name}"
        struck.took_effect_at_s = time.time()
        self._end_later(struck, lambda: filler.unlink(missing_ok=True))
        self._write(struck, "took_effect")

    def _cut(self, struck: "_Struck", target: "_Target") -> None:
        assert self._hosts is not None
        hosts, name = self._hosts, _host_of(target.node, self._hosts)
        struck.rank = None
        self._write(struck, "injected")
        if name is None:
            struck.detail = f"the node {target.node.name} is on none of the hosts"
            self._write(struck, "no_effect")
            return
        hosts.cut(name)
        struck.took_effect_at_s = time.time()
        self._end_later(struck, lambda: hosts.mend(name))
        self._write(struck, "took_effect")

    def _end_later(self, struck: "_Struck", undo: Callable[[], None]) -> None:
        def end() -> None:
            if self._ending.pop(struck.number, None) is not None:
                undo()
                struck.ended_at_s = time.time()
                self._write(struck, "ended")

        timer = threading.Timer(struck.parameters["for_s"], end)
        timer.daemon = True
        self._ending[struck.number] = timer, end
        timer.start()

    def _write(self, struck: "_Struck", event: str) -> None:
        line = json.dumps({"event": event, **vars(struck.injected())})
        with self._writing, self._log.open("a") as log:
            log.write(line + "\n")


class _Struck:
    """A fault while it is being injected."""

    def __init__(self, number: int, kind: Kind, parameters: dict[str, Any]) -> None:
        self.number, self.kind, self.parameters = number, kind, parameters
        self.at_s, self.at_monotonic_s = time.time(), time.monotonic()
        self.node: str | None = None
        self.rank: int | None = None
        self.pid: int | None = None
        self.detail = ""
        self.took_effect_at_s: float | None = None
        self.ended_at_s: float | None = None

    def injected(self) -> Injected:
        """Return the fault in the form of its record."""
        return Injected(**{**vars(self), "parameters": dict(self.parameters)})


@dataclass(frozen=True)
class _Target:
    """A process that a fault can strike, with its node and rank."""

    node: NodeProcesses
    process: psutil.Process
    rank: int | None = None


def _targets(kind: Kind, nodes: Sequence[NodeProcesses]) -> list[_Target]:
    """Return the processes that a fault of a kind can strike.

    Agents may be on spare nodes. All other targets are on nodes that train.
    """
    found = []
    for node in nodes:
        trains = bool(node.ranks)
        match kind:
            case "agent killed":
                found += [_Target(node, one) for one in node.agents]
            case "supervisor killed":
                found += [_Target(node, one) for one in node.supervisors]
            case "shim killed":
                found += [_Target(node, one) for one in node.shims]
            case "launcher killed":
                found += [_Target(node, one) for one in node.launchers if trains]
            case "writer killed":
                found += [_Target(node, one, rank) for rank, one in sorted(node.writers().items())]
            case "node killed" | "network cut":
                found += [_Target(node, node.run)] if trains else []
            case _:
                found += [_Target(node, one, rank) for rank, one in sorted(node.ranks.items())]
    return found


def _host_of(node: NodeProcesses, hosts: Hosts) -> str | None:
    """Return the name of the host on which a node runs, by the node's network namespace."""
    with contextlib.suppress(OSError):
        inside = Path(f"/proc/{node.run.pid}/ns/net").stat().st_ino
        for name, namespace in hosts.namespaces.items():
            if Path(f"/var/run/netns/{namespace}").stat().st_ino == inside:
                return name
    return None


def read_log(path: Path | str) -> list[Injected]:
    """Read the ground truth: each fault once, as the last of its lines records it.

    A line that a killed injector left incomplete is skipped.
    """
    found: dict[int, Injected] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in Path(path).read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                fields = json.loads(line)
                del fields["event"]
                found[fields["number"]] = Injected(**fields)
    return [found[number] for number in sorted(found)]
