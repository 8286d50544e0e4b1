"""Run a real Slurm with several nodes, private to one test, on one Linux machine.

`slurmctld` and one `slurmd` for each node run on 127.0.0.1 with their own ports. munge, cgroups,
systemd and root are not needed. With accounting, `slurmdbd` and a MariaDB on a Unix socket run as
well, so that `sacct` answers.

    with PrivateSlurm(tmp_path, nodes=2, gpus_per_node=4) as slurm:
        job_id = slurm.run(["sbatch", "--parsable", "--wrap", "hostname"]).strip()
        slurm.kill_node("n1")

The nodes are n1, n2, …; the only partition is `main`. Written for Slurm 22.05 (Debian 12:
slurmctld, slurmd, slurm-client; for accounting also slurmdbd, mariadb-server).
"""

import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from holdfast.core.errors import BadUse
from holdfast.core.processes import die_with_parent
from holdfast.core.sockets import free_ports
from holdfast.testing.slurm_guard import end_processes

_START_TIMEOUT_S = 240.0
"""All limits here are long, because a machine that runs many tests stands still for seconds."""
_SOCKET_PATH_LIMIT_BYTES = 107  # sun_path of unix(7), less the closing zero
_SEARCH_PATH = os.pathsep.join(
    [os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin", "/sbin"]
)

# Each line avoids a service of the machine (munge, cgroups) or a wait in a test.
_SLURM_CONF = """\
ClusterName=holdfast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout={node_timeout_s}
InactiveLimit=0
KillWait=1
MessageTimeout=60
TCPTimeout=2
JobRequeue=1
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
GresTypes=gpu
"""


class PrivateSlurm:
    """A Slurm cluster that runs until the end of its `with` block.

    At the end, all processes that the cluster's jobs started are killed, even if this process is
    killed.

    Args:
        folder: an unused folder for configuration, state, spool and logs; its path must be short,
            because the path of a Unix socket has a limit.
        nodes: the number of nodes.
        cpus: the CPUs of each node, which need not exist; RealMemory is 2000 MiB for each node.
        gpus_per_node: the GPUs that Slurm counts and allocates on each node (gres/gpu), without
            real devices.
        accounting: True to run slurmdbd for `sacct` and `sacctmgr`, which takes two seconds more.
            `sacct` shows a change with a delay of seconds, so tests must poll.
        node_timeout_s: the silence, in seconds, after which Slurm marks a node down
            (SlurmdTimeout).

    Attributes:
        folder: the folder, as an absolute path; `log/` has the daemons' logs.
        node_names: n1, n2, ….
        environment: the environment variables with which a process reaches only this cluster
            (SLURM_CONF).

    Raises:
        BadUse: a program is missing, or the folder's path is too long.
        RuntimeError: a daemon does not start; raised when the block is entered. The message ends
            with the daemon's log.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 2,
        cpus: int = 2,
        gpus_per_node: int = 0,
        accounting: bool = False,
        node_timeout_s: int = 60,
    ) -> None:
        if reason := self.missing(accounting=accounting):
            raise BadUse(reason)
        self.folder = folder.absolute()
        longest = self.folder / "spool" / f"n{nodes}" / f"n{nodes}_4294967295.4294967295"
        if len(os.fsencode(longest)) > _SOCKET_PATH_LIMIT_BYTES:
            raise BadUse(
                f"The path {self.folder} is too long for the sockets of Slurm. Choose a shorter one."
            )
        self.node_names = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._cpus, self._gpus_per_node, self._accounting = cpus, gpus_per_node, accounting
        self._node_timeout_s = node_timeout_s
        self._conf = self.folder / "slurm.conf"
        # The test may run in a job of another Slurm, whose variables must not reach this cluster.
        outer = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH"))
        }
        self.environment = {**outer, "PATH": _SEARCH_PATH, "SLURM_CONF": str(self._conf)}
        self._controller_port = 0
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    @staticmethod
    def missing(*, accounting: bool = False) -> str | None:
        """Return a sentence that names the missing programs; None if all are installed."""
        needed = ["slurmctld", "slurmd", "sbatch", "sinfo"]
        if accounting:
            needed += ["slurmdbd", "sacct", "mariadbd", "mariadb-install-db"]
        absent = [program for program in needed if shutil.which(program, path=_SEARCH_PATH) is None]
        if not absent:
            return None
        packages = "slurmctld slurmd slurm-client" + (
            " slurmdbd mariadb-server" if accounting else ""
        )
        return f"No {', '.join(absent)} on this machine. Install Slurm (Debian: apt-get install {packages})."

    def __enter__(self) -> Self:
        for name in ("state", "log", "run", *(f"spool/{node}" for node in self.node_names)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        # The guard starts first, so that it ends all processes that start later.
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "holdfast.testing.slurm_guard", str(self._conf)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            accounting_port = self._start_accounting() if self._accounting else None
            # Chosen only now: while the database starts, other programs could take the ports.
            controller_port, *node_ports = free_ports(len(self.node_names) + 1)
            self._write_configuration(controller_port, accounting_port, node_ports)
            self._controller_port = controller_port
            self._start_controller()
            for node in self.node_names:
                self._start_node(node)
            self._await("slurmctld", lambda: self._all_in_state("idle", self.node_names))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster, and keep the folder; a second call does nothing."""
        if self._guard is None:
            return
        self._guard.communicate(timeout=240)  # closes the guard's input, which ends the guard
        guard_exit_code, self._guard = self._guard.returncode, None
        for daemon in self._daemons.values():
            daemon.wait(timeout=60)
        self._daemons.clear()
        if guard_exit_code != 0:
            raise RuntimeError(
                f"processes of the private Slurm in {self.folder} are left; the guard says which, above"
            )

    def run(self, argv: Sequence[str], *, timeout_s: float = 120.0) -> str:
        """Run a command of Slurm (sbatch, squeue, sacct, …) in this cluster; return its output.

        Raises:
            RuntimeError: the command failed; the message has its output.
            subprocess.TimeoutExpired: the command took longer than `timeout_s`, and was killed.
        """
        # check=False and a raise, because CalledProcessError does not show the command's output.
        done = subprocess.run(
            argv,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"{' '.join(argv)} ended with {done.returncode}: {done.stderr}{done.stdout}"
            )
        return done.stdout

    def kill_node(self, name: str) -> None:
        """Kill a node's slurmd, step daemons and tasks with SIGKILL, as a power failure would.

        Slurm notices this after at most `node_timeout_s` plus half a minute. `scontrol update
        nodename=NAME state=down reason=dead` marks the node down at once. A requeued job waits 5 s
        (cred_expire) before its next start.
        """
        # First kill slurmd and its step daemons, then the tasks that are left.
        end_processes({"SLURM_CONF": str(self._conf), "HOLDFAST_SLURM_NODE": name})
        end_processes({"SLURM_CONF": str(self._conf), "SLURMD_NODENAME": name})
        self._daemons.pop(name).wait(timeout=60)

    def restart_node(self, name: str) -> None:
        """Start a killed node again, and wait until it accepts jobs."""
        self._start_node(name)
        self._await(
            name, lambda: self._all_in_state("idle", [name]) or self._all_in_state("mixed", [name])
        )

    def kill_controller(self) -> None:
        """Kill slurmctld with SIGKILL; the jobs go on, and no command of Slurm gets an answer."""
        controller = self._daemons.pop("slurmctld")
        controller.kill()
        controller.wait(timeout=60)

    def restart_controller(self) -> None:
        """Start a killed slurmctld again, and wait until it accepts connections."""
        self._start_controller()

    def _start_controller(self) -> None:
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self._conf)])
        # Wait before calling sinfo, which would try for long to reach an ended slurmctld.
        self._await("slurmctld", lambda: _listens(("127.0.0.1", self._controller_port)))

    def _all_in_state(self, state: str, nodes: Sequence[str]) -> bool:
        try:
            output = self.run(
                ["sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format", "%N %T"]
            )
        except RuntimeError:  # slurmctld does not answer yet
            return False
        return sorted(output.splitlines()) == sorted(f"{node} {state}" for node in nodes)

    def _write_configuration(
        self, controller_port: int, accounting_port: int | None, node_ports: Sequence[int]
    ) -> None:
        host = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.getuid()).pw_name
        lines = _SLURM_CONF.format(
            host=host,
            controller_port=controller_port,
            user=user,
            folder=self.folder,
            node_timeout_s=self._node_timeout_s,
        )
        if accounting_port is not None:
            lines += "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
            lines += f"AccountingStoragePort={accounting_port}\nAccountingStorageTRES=gres/gpu\n"
        else:
            lines += "AccountingStorageType=accounting_storage/none\n"
        gres = f" Gres=gpu:{self._gpus_per_node}" if self._gpus_per_node else ""
        for node, port in zip(self.node_names, node_ports, strict=True):
            lines += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus}"
            lines += f" RealMemory=2000 State=UNKNOWN{gres}\n"
        lines += "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        self._conf.write_text(lines)
        # slurmd ignores a GPU without a device file of its own; any device serves.
        devices = [self.folder / f"gpu{number}" for number in range(self._gpus_per_node)]
        for device in devices:
            device.symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(
            "".join(f"Name=gpu File={device}\n" for device in devices)
        )

    def _start_accounting(self) -> int:
        """Start the database and slurmdbd; return the port of slurmdbd."""
        user = pwd.getpwuid(os.getuid()).pw_name
        database, database_socket = self.folder / "db", self.folder / "run" / "db.sock"
        # The data need not outlive the test, so fsync is off. mariadbd demands a user name, even
        # if the user is root.
        options = [
            f"--user={user}",
            f"--datadir={database}",
            "--innodb-flush-method=nosync",
            "--innodb-doublewrite=0",
        ]
        options += [
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-log-file-size=16M",
            "--innodb-buffer-pool-size=64M",
        ]
        # With "normal", root has no password in this database. So any user can connect, but only
        # through the socket.
        install = [
            "mariadb-install-db",
            "--no-defaults",
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
        ]
        done = subprocess.run(
            [*install, *options],
            env=self.environment,
            capture_output=True,
            timeout=240,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"mariadb-install-db failed: {(done.stdout + done.stderr).decode()[-2000:]}"
            )
        served = [
            "--skip-networking",
            f"--socket={database_socket}",
            "--innodb-lock-wait-timeout=900",
        ]
        served += [f"--pid-file={self.folder}/run/mariadbd.pid"]
        self._start("mariadbd", ["mariadbd", "--no-defaults", *options, *served])
        self._await("mariadbd", lambda: _listens(str(database_socket)))
        [port] = free_ports(1)
        slurmdbd_conf = self.folder / "slurmdbd.conf"
        slurmdbd_conf.write_text(
            f"AuthType=auth/none\nDbdHost=localhost\nDbdAddr=127.0.0.1\nDbdPort={port}\nSlurmUser={user}\n"
            "StorageType=accounting_storage/mysql\nStorageHost=localhost\nStorageUser=root\nStorageLoc=accounting\n"
            f"LogFile={self.folder}/log/slurmdbd.log\nPidFile={self.folder}/run/slurmdbd.pid\n"
        )
        slurmdbd_conf.chmod(0o600)  # the only mode that slurmdbd accepts
        self._start("slurmdbd", ["slurmdbd", "-D"], MYSQL_UNIX_PORT=str(database_socket))
        self._await("slurmdbd", lambda: _listens(("127.0.0.1", port)))
        return port

    def _start_node(self, name: str) -> None:
        # The step daemons inherit the variable; `kill_node` finds the daemons by the variable.
        self._start(
            name, ["slurmd", "-D", "-f", str(self._conf), "-N", name], HOLDFAST_SLURM_NODE=name
        )

    def _start(self, name: str, argv: list[str], **variables: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                argv,
                env={**self.environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  a test's process, single-threaded where it matters
            )

    def _await(self, name: str, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not ready():
            ended = [
                daemon for daemon, process in self._daemons.items() if process.poll() is not None
            ]
            if ended or time.monotonic() > deadline_s:
                log = (self.folder / "log" / f"{(ended or [name])[0]}.out").read_text(
                    errors="replace"
                )[-2000:]
                raise RuntimeError(
                    f"{(ended or [name])[0]} of the private Slurm did not come up: {log}"
                )
            time.sleep(0.05)


def _listens(address: str | tuple[str, int]) -> bool:
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as probe:
        return probe.connect_ex(address) == 0
