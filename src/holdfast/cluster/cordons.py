"""Mark a cordoned node in the scheduler, too, so that the scheduler starts nothing more there.

The ledger decides where runs launch. The mark in the scheduler keeps other jobs off a faulty node,
and shows the operators the reason. A mark is a help, never a condition: where Holdfast lacks the
permission, the sentence has the command for an administrator.
"""

import os
from collections.abc import Mapping
from typing import Protocol

from holdfast.core.errors import HoldfastError


class NotMarked(HoldfastError):
    """The scheduler did not take the mark; the message has the command for an administrator."""


class Cordons(Protocol):
    """The marks on nodes of one kind of scheduler. Each call blocks for at most some seconds."""

    @property
    def scheduler(self) -> str:
        """Return the name of the scheduler for messages, such as "Slurm"."""

    def cordon(self, node: str, *, reason: str, by: str) -> None:
        """Have the scheduler start nothing more on a node; jobs that run there go on.

        Args:
            node: the name of the node, as the scheduler has it.
            reason: one line for the operators.
            by: the run or the user that cordons the node.

        Raises:
            NotMarked: the scheduler refused, cannot be reached, or has no such node.
        """

    def uncordon(self, node: str) -> bool:
        """Take back the mark that `cordon` has set; marks that others have set stay.

        Returns:
            False if the node had no mark of Holdfast.

        Raises:
            NotMarked: the scheduler refused, cannot be reached, or has no such node.
        """


def cordons_here(environment: Mapping[str, str] = os.environ) -> Cordons | None:
    """Return the marks of the scheduler that has started this process; None without a scheduler."""
    from holdfast.cluster.slurm_cordons import SlurmCordons, slurm_is_here

    if slurm_is_here(environment):  # first: the nodes of a Slurm may be pods
        return SlurmCordons()
    if "KUBERNETES_SERVICE_HOST" in environment:
        return _of_kubernetes()
    return None


def cordons_of_operator(environment: Mapping[str, str] = os.environ) -> Cordons | None:
    """Return the marks of the scheduler that an operator's command reaches; None without one.

    Outside of the cluster KUBECONFIG gives the scheduler. A run never uses KUBECONFIG alone: the
    run's nodes may belong to another cluster, even with the same names.
    """
    here = cordons_here(environment)
    return _of_kubernetes() if here is None and environment.get("KUBECONFIG") else here


def _of_kubernetes() -> Cordons:
    from holdfast.cluster.kubernetes_cordons import KubernetesCordons

    return KubernetesCordons()


def mark(reasons: Mapping[str, str], *, by: str, cordons: Cordons | None = None) -> list[str]:
    """Mark nodes in the scheduler; return one sentence for each node.

    The sentence states the mark, or the reason why there is no mark.

    Args:
        reasons: the reason of each node's cordon.
        by: the run or the user that cordons the nodes.
        cordons: the marks; by default of the scheduler here. Without a scheduler nothing is marked.
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
    """Take back Holdfast's mark on a node; return the sentences for the user.

    Args:
        node: the name of the node.
        cordons: the marks; by default of the scheduler here.
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
