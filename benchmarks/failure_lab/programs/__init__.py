"""All failing programs of the laboratory, one module per group."""

from collections.abc import Mapping

from failure_lab.program import Program
from failure_lab.programs import (
    attributes,
    calls,
    data,
    files,
    gpu,
    lookups,
    memory,
    model,
    nccl,
    network,
    node,
    others,
    start,
    storage,
    types_and_names,
    values,
)

_GROUPS = (
    gpu,
    node,
    network,
    storage,
    nccl,
    data,
    memory,
    model,
    files,
    start,
    calls,
    lookups,
    types_and_names,
    values,
    attributes,
    others,
)

PROGRAMS: Mapping[str, Program] = {
    program.id: program for group in _GROUPS for program in group.PROGRAMS
}
"""The programs by id, in the order of their groups."""
