"""Check the states of nodes and pods that Slurm and Kubernetes report."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.adopt.doctor.findings import Finding, good, unseen, wrong
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.cluster import Look


def slurm(folder: Path) -> Iterator[Finding]:  # noqa: ARG001 - the form of all checks
    """Check that Slurm answers, and which states its nodes have."""
    from holdfast.cluster import read_slurm_nodes, slurm_is_here

    if not slurm_is_here(os.environ):
        yield good("This host is in no Slurm cluster.")
        return
    try:
        nodes = read_slurm_nodes().values()
    except HoldfastError as error:
        yield wrong(f"Slurm does not answer: {str(error).rstrip('.')}.", "scontrol ping")
        return
    lost = [one.name for one in nodes if one.is_lost]
    leaving = [one.name for one in nodes if one.is_leaving and not one.is_lost]
    if len(lost) + len(leaving) == len(nodes):
        yield wrong(f"None of Slurm's {len(nodes)} nodes accepts jobs.", "sinfo --list-reasons")
        return
    words = [f"{len(nodes)} nodes"]
    words += [f"{len(lost)} down" for _ in lost[:1]]
    words += [f"{len(leaving)} drained or reserved" for _ in leaving[:1]]
    yield good(f"Slurm answers: {', '.join(words)}.")


def kubernetes(folder: Path) -> Iterator[Finding]:  # noqa: ARG001 - the form of all checks
    """Check the conditions of this pod and its node."""
    from holdfast.cluster import is_in_pod, read_facts

    if is_in_pod():
        yield from of_look(read_facts())
    else:
        yield good("This process is in no pod of Kubernetes.")


def of_look(look: "Look") -> Iterator[Finding]:
    """Yield a finding for each bad condition, and for each object that could not be read."""
    for fact in look.facts:
        if fact.is_bad:
            detail = f" ({fact.detail})" if fact.detail else ""
            yield wrong(
                f"The {fact.subject} {fact.name} has {fact.kind}{detail}.",
                f"kubectl describe {fact.subject} {fact.name}",
            )
    for why in look.unseen:
        yield unseen(why, "see docs/kubernetes.md")
    if look.facts and not any(fact.is_bad for fact in look.facts):
        yield good(f"Kubernetes reports {len(look.facts)} conditions, none of them bad.")
