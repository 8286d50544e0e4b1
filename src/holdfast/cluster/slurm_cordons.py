"""Drain cordoned nodes in Slurm, and undrain nodes that Holdfast has drained."""

import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.cluster.cordons import NotMarked
from holdfast.cluster.slurm import run_slurm_command
from holdfast.cluster.slurm_nodes import PREFIX, SlurmNode, read_slurm_nodes
from holdfast.core.errors import HoldfastError

REASON_CHARS = 200
_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")


def slurm_is_here(environment: Mapping[str, str]) -> bool:
    """Return True in a Slurm job, or on a host that is configured for a Slurm cluster."""
    if "SLURM_JOB_ID" in environment:
        return True
    is_configured = "SLURM_CONF" in environment or any(map(Path.exists, map(Path, _CONFIGURATIONS)))
    return is_configured and shutil.which("scontrol") is not None


class SlurmCordons:
    """Mark nodes by draining them in Slurm; see `cordons.Cordons`.

    A drained node finishes its running jobs, and gets no new ones.
    """

    scheduler = "Slurm"

    def __init__(self, command: Callable[..., str] = run_slurm_command) -> None:
        """Store `command`, which runs Slurm's commands as `run_slurm_command` does."""
        self._command = command

    def cordon(self, node: str, *, reason: str, by: str) -> None:
        """Drain a node; see `cordons.Cordons.cordon`.

        A node that others have drained keeps their reason.
        """
        known = self._node(node)
        if known is None:
            raise NotMarked(f"Slurm has no node {node}: it is cordoned for Holdfast's runs alone.")
        if known.is_drained and known.source != "holdfast":
            return
        # Control characters and quotation marks would end the value in a command that a person
        # copies.
        text = re.sub(r"[^\w .,:;()/%+=-]", " ", f"{PREFIX} {reason}")[:REASON_CHARS].strip()
        self._update(node, "drain", f"{text} (run {by})")

    def uncordon(self, node: str) -> bool:
        """Undrain a node that Holdfast has drained; see `cordons.Cordons.uncordon`."""
        known = self._node(node)
        if known is None or not known.is_drained or known.source != "holdfast":
            return False
        self._update(node, "undrain")
        return True

    def _node(self, name: str) -> SlurmNode | None:
        try:
            return read_slurm_nodes([name], self._command).get(name)
        except HoldfastError as error:
            raise NotMarked(
                f"The state of {name} cannot be read from Slurm: {error} See it by: scontrol show node {name}"
            ) from error

    def _update(self, node: str, state: str, reason: str | None = None) -> None:
        argv = ["scontrol", "update", f"nodename={node}", f"state={state}"]
        argv += [] if reason is None else [f"reason={reason}"]
        try:
            self._command(argv)
        except HoldfastError as error:
            reason_text = str(error).removeprefix("scontrol failed: ").rstrip(".")
            raise NotMarked(
                f"Slurm did not {state} {node} ({reason_text}). An administrator may: {shlex.join(argv)}"
            ) from error
