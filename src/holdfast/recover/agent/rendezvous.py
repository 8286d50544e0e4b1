"""Find out how many nodes a run has, and where their agents meet.

Both are taken from the first of these that is given:

1. the options `--nnodes` and `--rendezvous`
2. the options in the user's torchrun command, or the PET_ variables, from which torchrun also reads
   its options
3. the environment of a Slurm step, or of a pod of an indexed Job in Kubernetes, where the nodes
   need no address to meet

The agents connect to the first node. This is the node that has the given address, in a Slurm step
the node with SLURM_NODEID 0, and in Kubernetes the pod with index 0. The first node publishes the
token of the run (see `board`).

The processes of torchrun meet by torchrun's own rendezvous (see `launch`).
"""

import contextlib
import errno
import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import BadUse
from holdfast.recover.agent.board import Board

LISTEN_BACKLOG = 1024
PROBE_S = 2.0
MAX_NAME_LENGTH = 64
"""The largest number of characters in the name of a run."""
_WITH_VALUE = (
    "--nnodes",
    "--node-rank",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--master-addr",
    "--master-port",
    "--local-addr",
)
_FLAGS = ("--standalone",)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The way in which the agents of one run meet.

    Attributes:
        nnodes: the number of nodes that train; agents of further nodes are spares.
        key: the name of the meeting on the board (see `board`).
        host, port: the address on which the first node listens; None in a Slurm step and in
            Kubernetes, where the first node publishes its address on the board.
        is_first: True if this is the first node; None if the address decides which node is the
            first.
        preferred_rank: the rank that this node should have among the nodes; None to rank nodes in
            the order of arrival.
        run_name: the name of the run, if the scheduler gives one.
    """

    nnodes: int
    key: str
    host: str | None = None
    port: int = 0
    is_first: bool | None = None
    preferred_rank: int | None = None
    run_name: str | None = None

    @property
    def is_on_one_host(self) -> bool:
        """True if the address is a loopback address, so that all agents are on one host."""
        return self.host is not None and (self.host.startswith("127.") or self.host == "::1")

    def is_led(self, board: Board) -> bool:
        """Return True if a node already leads the run.

        In this case this node joins the run, even if it was the first node before.
        """
        known = board.read()
        if known is None:
            return False
        for host in known["hosts"]:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, known["port"]), timeout=PROBE_S),
            ):
                return True
        return False

    def led_before(self, board: Board) -> str | None:
        """Return the id of the last run with this meeting; None if its publication was withdrawn."""
        known = board.read()
        return None if known is None else str(known["run_id"])

    def listen(self) -> socket.socket | None:
        """Listen on the address of the meeting; return None if this is not the first node.

        Raises:
            BadUse: the address does not resolve, or the port cannot be used.
        """
        if self.is_first is False:
            return None
        if self.host is None:
            return _listener("", 0)
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise BadUse(
                f"The rendezvous {self.host}:{self.port} has no address: {error.strerror}."
            ) from error
        family, *_, address = found[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:  # the address belongs to another node
                return None
        try:
            # Listen on all addresses, since the name of a host may resolve to its loopback address
            # on the host itself.
            return _listener("" if family == socket.AF_INET else "::", self.port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # another agent of this node listens already
                return None
            raise BadUse(f"Port {self.port} cannot be used: {error.strerror}.") from error

    def follow(self) -> socket.socket:
        """Listen on a free port, on a node that takes over from the first node."""
        return _listener("", 0)

    def publish(self, board: Board, listening: socket.socket, token: str, *, run_id: str) -> None:
        """Publish the addresses, the token and the run's id on the board for the other nodes.

        Raises:
            OSError, LedgerError: the board cannot be written.
        """
        port = listening.getsockname()[1]
        is_at_place = self.host is not None and (port == self.port or self.is_on_one_host)
        hosts = [self.host] if is_at_place else _own_addresses()
        board.publish({"hosts": hosts, "port": port, "token": token, "run_id": run_id})


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(LISTEN_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def loopback_listener() -> socket.socket:
    """Listen on a free port of the loopback address."""
    return _listener("127.0.0.1", 0)


def _own_addresses() -> list[str]:
    """Return names and addresses at which other nodes may reach this node, the best first."""
    found = [os.environ.get("SLURMD_NODENAME"), socket.gethostname(), routed_address()]
    return list(dict.fromkeys(name for name in found if name))


def routed_address() -> str | None:
    """Return the address from which this node sends to other hosts; None if it has no route."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect(("192.0.2.1", 9))  # RFC 5737; no packet is sent
        return str(probe.getsockname()[0])
    return None


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name that the scheduler gives this node, or else its host name."""
    in_pod = "KUBERNETES_SERVICE_HOST" in environment
    return (
        environment.get("HOLDFAST_NODE_NAME")
        or environment.get("SLURMD_NODENAME")
        or (in_pod and environment.get("NODE_NAME"))
        or socket.gethostname()
    )


def meeting_of(
    command: Sequence[str],
    *,
    nnodes: int | None,
    rendezvous: str | None,
    spares: int,
    stem: str,
    environment: Mapping[str, str] = os.environ,
) -> Meeting | None:
    """Return how the nodes of a run meet; None for a run on one node.

    Args:
        command: the job's command.
        nnodes: the value of `--nnodes`.
        rendezvous: the value of `--rendezvous`.
        spares: the value of `--spares`, which is the number of nodes that do not train at first.
        stem: the first part of the run's name, if a scheduler gives the rest.
        environment: the environment of this process.

    Raises:
        BadUse: options contradict each other, or an option is missing; the message names it.
    """
    own = _own_words(command, environment)
    if nnodes is None and "--nnodes" in own:
        nnodes = _number(own["--nnodes"], "torchrun --nnodes or PET_NNODES")
        if "JOB_COMPLETION_INDEX" in environment:
            nnodes -= spares  # --nnodes counts all pods, including the spares
    in_step = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if nnodes is not None and nnodes < 1:
        raise BadUse(f"--nnodes is {nnodes}. Give the number of nodes, at least 1.")
    if nnodes == 1 and not spares:
        return None  # each node runs by itself
    if in_step > 1 and rendezvous is None:
        return _slurm_meeting(in_step, nnodes, spares, stem, environment)
    if nnodes is not None and rendezvous is None and "JOB_COMPLETION_INDEX" in environment:
        return _kubernetes_meeting(nnodes, stem, environment)
    if spares:
        raise BadUse(
            "--spares is for a Slurm step or Kubernetes; elsewhere each agent beyond --nnodes is a spare."
        )
    if nnodes is None and rendezvous is not None:
        raise BadUse("--rendezvous is for several nodes: give --nnodes N too.")
    if nnodes is None:
        return None
    if rendezvous is None and "--rdzv-endpoint" in own:
        rendezvous = own["--rdzv-endpoint"]
    elif rendezvous is None and "--master-addr" in own:
        rendezvous = f"{own['--master-addr']}:{own.get('--master-port', '29500')}"
    if rendezvous is None:
        raise BadUse(
            f"{nnodes} nodes need a rendezvous: give --rendezvous HOST:PORT, the same on each node, with the name of "
            "one of them, or start the run by srun."
        )
    host, port = _address(rendezvous)
    return Meeting(nnodes=nnodes, key=f"{host.replace(':', '_')}-{port}", host=host, port=port)


def _slurm_meeting(
    in_step: int, nnodes: int | None, spares: int, stem: str, environment: Mapping[str, str]
) -> Meeting:
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", str(in_step)))
    if tasks != in_step:
        raise BadUse(
            f"This step has {tasks} tasks on {in_step} nodes. Start one `holdfast run` a node: "
            "srun --ntasks-per-node=1 holdfast run …"
        )
    nnodes = in_step - spares if nnodes is None else nnodes
    if not 1 <= nnodes <= in_step:
        raise BadUse(
            f"{nnodes} nodes of a step with {in_step} cannot train. Take more nodes, or fewer spares."
        )
    job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "0")
    rank = int(environment.get("SLURM_NODEID", "0"))
    return Meeting(
        nnodes=nnodes,
        key=f"slurm-{job}.{step}",
        is_first=rank == 0,
        preferred_rank=rank,
        run_name=f"{stem}-{job}.{step}",
    )


def _kubernetes_meeting(nnodes: int, stem: str, environment: Mapping[str, str]) -> Meeting:
    """Return how the pods of an indexed Job, or of the Jobs of a JobSet, meet.

    Kubernetes sets JOB_COMPLETION_INDEX, and the host name JOB-INDEX. JOBSET_NAME, JOBSET_UID (or
    JOB_UID) and JOB_INDEX come from the manifest. If there is a uid, a new Job with the same name
    is a new run.
    """
    index = _index(environment, "JOB_COMPLETION_INDEX")
    job_index = _index(environment, "JOB_INDEX")
    hostname = environment.get("HOSTNAME") or socket.gethostname()
    name = environment.get("JOBSET_NAME") or hostname.split(".")[0].removesuffix(f"-{index}")
    uid = environment.get("JOBSET_UID") or environment.get("JOB_UID")
    identity = f"{name}-{uid[:8]}" if uid else name
    run_name = f"{stem}-{identity}"
    if len(run_name) > MAX_NAME_LENGTH:
        run_name = f"{run_name[:40]}-{hashlib.sha256(run_name.encode()).hexdigest()[:16]}"
    return Meeting(
        nnodes=nnodes,
        key=f"kubernetes-{identity}",
        is_first=index == 0 and job_index == 0,
        # The sum is unique for several Jobs of one pod each, and for one Job of several pods. In
        # several Jobs of several pods, ranks are given in the order of arrival.
        preferred_rank=index + job_index if 0 in (index, job_index) else None,
        run_name=run_name,
    )


def _index(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable) or "0"
    if not text.isdigit():
        raise BadUse(f"{variable} is {text!r}. Take it from the field that docs/kubernetes.md has.")
    return int(text)


def _own_words(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the options for torchrun's rendezvous, from PET_ variables and the command."""
    variables = {name: "PET" + name[1:].replace("-", "_").upper() for name in _WITH_VALUE}
    given = {name: environment.get(variable, "") for name, variable in variables.items()}
    words = torchrun_options(command) if Path(command[0]).name == "torchrun" else {}
    return {**{name: text for name, text in given.items() if text}, **words}


def _number(text: str, name: str) -> int:
    try:
        return int(text.removeprefix("1:") if text == "1:1" else text)
    except ValueError:
        raise BadUse(
            f"{name} is {text}; give one number. Agents beyond that many nodes are spares."
        ) from None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    try:
        number = int(port)
    except ValueError:
        number = 0
    if not host or not 0 < number < 65536:
        raise BadUse(f"--rendezvous {text!r}: write it as HOST:PORT, such as node1:29500.")
    return host.strip("[]"), number


def torchrun_options(command: Sequence[str]) -> dict[str, str]:
    """Return the options for the rendezvous in a torchrun command."""
    return _split(command)[0]


def without_rendezvous(command: Sequence[str]) -> list[str]:
    """Return a torchrun command without its options for the rendezvous."""
    return _split(command)[1]


def _split(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    found: dict[str, str] = {}
    words, kept = list(command[1:]), [command[0]]
    while words:
        word = words.pop(0)
        if word.endswith(".py") or word in ("-m", "--module"):
            return found, [*kept, word, *words]  # the rest are options of the script
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in _WITH_VALUE:
            found[name] = value if equals or not words else words.pop(0)
        elif name in _FLAGS:
            found[name] = ""
        else:
            kept.append(word)
    return found, kept
