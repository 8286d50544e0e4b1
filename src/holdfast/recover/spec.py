"""Define the specification of a run: the command and the options of its supervision."""

import importlib.util
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from holdfast.core.errors import BadUse, NotFound
from holdfast.core.rotating_log import PARTS
from holdfast.recover.agent.rendezvous import without_rendezvous
from holdfast.recover.detectors.anomaly import SPIKE_STEPS
from holdfast.recover.detectors.hang import HangLimits
from holdfast.recover.people.modes import MODES, Mode
from holdfast.recover.policy import RestartLimits

MIB = 1024 * 1024
TestNodes = Literal["auto", "always", "never"]
"""The choices of when nodes are tested before a launch."""
SHIM = Path(sys.executable).with_name("holdfast-rank")
"""The name of the console script of `shim.rank_shim`, which is installed beside this interpreter.
"""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The command and the options of one `holdfast run`, validated when the object is created.

    Raises:
        BadUse: a value is not allowed; the message names the option and the allowed values.
        NotFound: the command's script does not exist.
    """

    command: tuple[str, ...]
    cwd: str
    nproc: int = 1
    """The number of ranks on each node; not for a `torchrun` command, which has its own option."""
    nnodes: int = 1
    """The number of nodes that train."""
    min_nodes: int | None = None
    """The minimum number of nodes on which the job may continue; None for `nnodes`."""
    restarts: RestartLimits = field(default_factory=RestartLimits)
    hangs: HangLimits = field(default_factory=HangLimits)
    healthy_after: int = 20
    """The number of steps with an ordinary loss after which a checkpoint is healthy; with 0, losses
    are not watched."""
    test_nodes: TestNodes = "auto"
    """The condition for testing nodes before a launch: `auto` (after a failure that a node may have
    caused), `always`, or `never`."""
    fresh: bool = False
    """True to set aside checkpoints of other runs."""
    log_max_mib: int = 64
    """The largest size of the output that is kept of each rank in an attempt, in MiB."""
    profile: bool = True
    """True to record counters of the nodes and phases of the ranks (see `holdfast.profile`)."""
    mode: Mode = "act"
    """The mode, which determines the decisions that are carried out (see `people.modes`)."""

    def __post_init__(self) -> None:
        _require(bool(self.command), "command", "nothing", "the job's command after `--`")
        _require(self.nproc >= 1, "--nproc", self.nproc, "at least 1")
        _require(self.nnodes >= 1, "--nnodes", self.nnodes, "at least 1")
        _require(
            self.min_nodes is None or 1 <= self.min_nodes <= self.nnodes,
            "--min-nodes",
            self.min_nodes,
            f"from 1 to {self.nnodes}, the number of nodes",
        )
        divisors = [size for size in range(1, self.nnodes) if self.nnodes % size == 0]
        smaller = max(divisors, default=1)
        _require(
            self.min_nodes in (None, self.nnodes) or self.min_nodes <= smaller,
            "--min-nodes",
            self.min_nodes,
            f"at most {smaller}, since a smaller number of nodes must divide {self.nnodes}",
        )
        _require(
            self.restarts.max_restarts >= 0,
            "--max-restarts",
            self.restarts.max_restarts,
            "at least 0",
        )
        _require(self.restarts.window_s > 0, "--window-s", self.restarts.window_s, "more than 0")
        _require(
            self.restarts.stop_grace_s >= 0,
            "--stop-grace-s",
            self.restarts.stop_grace_s,
            "at least 0",
        )
        _require(self.hangs.factor >= 1, "--hang-factor", self.hangs.factor, "at least 1")
        _require(self.hangs.floor_s > 0, "--hang-floor-s", self.hangs.floor_s, "more than 0")
        _require(
            self.hangs.first_step_s > 0,
            "--first-step-limit-s",
            self.hangs.first_step_s,
            "more than 0",
        )
        _require(self.hangs.section_s > 0, "--section-limit-s", self.hangs.section_s, "more than 0")
        _require(self.hangs.silence_s > 0, "--silence-limit-s", self.hangs.silence_s, "more than 0")
        _require(
            self.healthy_after == 0 or self.healthy_after >= SPIKE_STEPS,
            "--healthy-after",
            self.healthy_after,
            f"at least {SPIKE_STEPS}, since so many steps show a spike of the loss, or 0 not to look at losses",
        )
        _require(
            self.log_max_mib >= 1,
            "--log-max-mib",
            self.log_max_mib,
            f"at least 1 (kept in {PARTS} parts)",
        )
        _require(self.mode in MODES, "--mode", self.mode, f"one of {', '.join(MODES)}")
        self._check_command()

    def _check_command(self) -> None:
        program, *rest = self.command
        if not Path(self.cwd).is_dir():
            raise NotFound(
                f"The run's folder {self.cwd} no longer exists. Create it, or start a new run elsewhere."
            )
        if self._program() is None:
            hint = "Check its name, or give its full path."
            if program.endswith(".py"):
                hint = f"Run a script by its interpreter: holdfast run -- python {program}"
            elif "/" in program and (Path(self.cwd) / program).is_file():
                raise NotFound(
                    f"{program} is not executable. Run: chmod +x {program}, or name its interpreter: "
                    f"holdfast run -- bash {program}"
                )
            raise NotFound(f"There is no program {program!r} to run. {hint}")
        if self.is_torchrun:
            if self.nproc != 1:
                raise BadUse(
                    "--nproc does not go with a torchrun command; give --nproc-per-node to torchrun."
                )
            if not SHIM.exists():
                raise BadUse(
                    f"{SHIM} is missing. Reinstall Holdfast, or use `holdfast run --nproc N -- python …`."
                )
            self._check_torchrun(rest)
            return
        if importlib.util.find_spec("torch") is None:
            raise BadUse("`holdfast run` needs torch: pip install 'holdfast[train]'")
        script = rest[0] if rest else None
        is_python = Path(program).name.startswith("python")
        if (
            is_python
            and script is not None
            and not script.startswith("-")
            and not (Path(self.cwd) / script).is_file()
        ):
            raise NotFound(
                f"There is no script {script!r} in {self.cwd}. Check the path after `python`."
            )

    @staticmethod
    def _check_torchrun(words: list[str]) -> None:
        for word, following in zip(words, [*words, ""][1:], strict=True):
            if word.endswith(".py") or word in ("-m", "--module"):
                return  # the rest are options of the script
            option, _, value = word.replace("_", "-").partition("=")
            value = value or following
            if option == "--max-restarts" and value != "0":
                raise BadUse(
                    "Leave torchrun's --max-restarts out: Holdfast restarts the job itself, "
                    "see `holdfast run --max-restarts`."
                )
            if option in ("--no-python", "--run-path"):
                raise BadUse(
                    f"torchrun {option} cannot be supervised. Use `holdfast run --nproc N -- COMMAND …` instead."
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of nodes on which the job may run, the largest first.

        Each number divides `nnodes`, so that the global batch consists of whole micro-batches.
        """
        least = self.min_nodes or self.nnodes
        return tuple(size for size in range(self.nnodes, least - 1, -1) if self.nnodes % size == 0)

    def of_size(self, nnodes: int) -> Self:
        """Return the specification of the same job on `nnodes` nodes."""
        command = self.command
        if self.is_torchrun and nnodes == 1 < self.nnodes:
            program, *rest = without_rendezvous(command)
            command = (program, "--standalone", *rest)
        return replace(self, nnodes=nnodes, min_nodes=None, command=command)

    @property
    def is_torchrun(self) -> bool:
        """True if the user's command is PyTorch's launcher itself."""
        return Path(self.command[0]).name == "torchrun"

    def _program(self) -> str | None:
        """Return the command's program, from the PATH or from beside Holdfast's interpreter.

        The second place is for users who have not activated the virtual environment, or who have
        `python3` but no `python`.
        """
        name = self.command[0]
        beside = Path(self.cwd) / name if "/" in name else Path(sys.executable).parent / name
        return shutil.which(name) or shutil.which(str(beside))

    def launcher_command(self, node_rank: int, address: str, port: int) -> list[str]:
        """Return the command that starts the launcher on one node.

        Args:
            node_rank: the rank of the node, from 0 to `nnodes` - 1.
            address: the address of the node with the rank 0.
            port: the port of the launcher's store on that node.
        """
        program = self._program()
        assert program is not None, "checked when this was made"
        meeting = [
            f"--nnodes={self.nnodes}",
            f"--node-rank={node_rank}",
            f"--master-addr={address}",
            f"--master-port={port}",
        ]
        if self.is_torchrun and self.nnodes == 1:
            return [program, *self.command[1:]]
        if self.is_torchrun:
            return [program, *meeting, *without_rendezvous(self.command)[1:]]
        alone = ["--standalone"]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += alone if self.nnodes == 1 else meeting
        shim = [sys.executable, "-m", "holdfast.recover.shim.rank_shim"]
        return [
            *torchrun,
            f"--nproc-per-node={self.nproc}",
            "--no-python",
            *shim,
            program,
            *self.command[1:],
        ]

    def rank_python(self) -> str:
        """The interpreter of the ranks of a `torchrun` command, which is beside this torchrun."""
        program = self._program()
        beside = Path(program).with_name("python") if self.is_torchrun and program else None
        return str(beside) if beside is not None and beside.exists() else sys.executable

    def to_options(self) -> dict[str, Any]:
        """Return the options in the form that the ledger stores and `from_options` reads."""
        options = asdict(self)
        del options["command"], options["cwd"]
        return options

    @classmethod
    def default_options(cls) -> dict[str, Any]:
        """Return the options of a run if none are given."""
        return {
            "nproc": cls.nproc,
            "nnodes": cls.nnodes,
            "min_nodes": cls.min_nodes,
            "restarts": asdict(RestartLimits()),
            "hangs": asdict(HangLimits()),
            "healthy_after": cls.healthy_after,
            "test_nodes": cls.test_nodes,
            "fresh": cls.fresh,
            "log_max_mib": cls.log_max_mib,
            "profile": cls.profile,
            "mode": cls.mode,
        }

    @classmethod
    def from_options(cls, command: list[str], cwd: str, options: dict[str, Any]) -> Self:
        """Return the specification of a run from the ledger, ignoring options of later versions."""
        known = {item.name for item in fields(cls)}
        values = {name: value for name, value in options.items() if name in known}
        values["restarts"] = RestartLimits(**values["restarts"])
        values["hangs"] = HangLimits(**values["hangs"])
        return cls(command=tuple(command), cwd=cwd, **values)

    def __str__(self) -> str:
        return shlex.join(self.command)


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise BadUse(f"{name} is {value}; it must be {allowed}.")
