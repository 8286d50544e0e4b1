"""Mark a cordoned node in the scheduler, so that the scheduler starts no new jobs there.

The ledger decides where runs launch. The mark in the scheduler also keeps other jobs off a faulty
node, and shows the reason to the operators. A run does not depend on the mark. If Holdfast lacks
the permission to set it, the result contains the command that an administrator can run.
"""

import os
from collections.abc import Mapping
from typing import Protocol

from holdfast.core.errors import HoldfastError


class NotMarked(HoldfastError):
    """The scheduler did not accept the mark; the message has the command for an administrator."""


class Cordons(Protocol):
    """Set and remove marks on the nodes of one scheduler; each call blocks for seconds at most."""

    @property
    def scheduler(self) -> str:
        """Return the name of the scheduler for messages, such as "Slurm"."""

    def cordon(self, node: str, *, reason: str, by: str) -> None:
        """Mark a node so that no new jobs start there; jobs that run on the node continue.

        Args:
            node: the scheduler's name for the node.
            reason: one line for the operators.
            by: the run or the user that cordons the node.

        Raises:
            NotMarked: the scheduler refused, cannot be reached, or has no such node.
        """

    def uncordon(self, node: str) -> bool:
        """Remove the mark that `cordon` has set; marks that others have set stay.

        Returns:
            False if the node had no mark of Holdfast.

        Raises:
            NotMarked: the scheduler refused, cannot be reached, or has no such node.
        """


def cordons_here(environment: Mapping[str, str] = os.environ) -> Cordons | None:
    """Return the `Cordons` of the scheduler that started this process; None without a scheduler."""
    from holdfast.cluster.slurm_cordons import SlurmCordons, slurm_is_here

    if slurm_is_here(environment):  # Slurm first, since its nodes may be pods
        return SlurmCordons()
    if "KUBERNETES_SERVICE_HOST" in environment:
        return _of_kubernetes()
    return None


def cordons_of_operator(environment: Mapping[str, str] = os.environ) -> Cordons | None:
    """Return the `Cordons` of the scheduler that an operator's command can reach; None without one.

    Outside a cluster, KUBECONFIG selects the scheduler. A run never uses KUBECONFIG for this,
    because the run's nodes may belong to another cluster, even if they have the same names.
    """
    here = cordons_here(environment)
    return _of_kubernetes() if here is None and environment.get("KUBECONFIG") else here


def _of_kubernetes() -> Cordons:
    from holdfast.cluster.kubernetes_cordons import KubernetesCordons

    return KubernetesCordons()


def mark(reasons: Mapping[str, str], *, by: str, cordons: Cordons | None = None) -> list[str]:
    """Mark nodes in the scheduler; return one sentence for each node.

    The sentence states that the node is marked, or why the node is not marked.

    Args:
        reasons: the reason of each node's cordon, by the name of the node.
        by: the run or the user that cordons the nodes.
        cordons: sets the marks; by default in the scheduler that started this process. If there is
            no scheduler, nothing is marked.
    """
    cordons = cordons or cordons_here()
    if cordons is None:
        return []
    sentences = []
    for node, reason in reasons.items():
        try:
            cordons.cordon(node, reason=reason, by=by)
            sentences.append(f"{node} is cordoned in {cordons.scheduler}, too.")
        except NotMarked as error:
            sentences.append(str(error))
    return sentences


def unmark(node: str, *, cordons: Cordons | None = None) -> list[str]:
    """Remove Holdfast's mark from a node; return the sentences to show to the user.

    Args:
        node: the name of the node.
        cordons: removes the mark; by default in the scheduler that started this process.
    """
    cordons = cordons or cordons_here()
    if cordons is None:
        return []
    try:
        had_mark = cordons.uncordon(node)
    except NotMarked as error:
        return [str(error)]
    if had_mark:
        return [f"{node} may be used in {cordons.scheduler}, too."]
    return []
