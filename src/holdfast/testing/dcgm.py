"""Imitate the page of dcgm-exporter, and the output of `dcgmi dmon`."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def exporter_page(
    gpus: Sequence[Mapping[str, float]], *, host_label: str = "Hostname", mig_instance: str = ""
) -> bytes:
    """Return a page like dcgm-exporter's, in Prometheus' text format.

    Args:
        gpus: for each GPU, the value of each DCGM field, by the field's name.
        host_label: the name of the label that holds the host's name; newer exporters write
            `hostname`.
        mig_instance: the id of the MIG instance that all values belong to; empty: whole GPUs.
    """
    lines = []
    for name in dict.fromkeys(name for gpu in gpus for name in gpu):
        lines += [f"# HELP {name} A field of DCGM.", f"# TYPE {name} gauge"]
        for number, gpu in enumerate(gpus):
            if name in gpu:
                labels = (
                    f'gpu="{number}",UUID="GPU-{number}",device="nvidia{number}",{host_label}="n1"'
                )
                if mig_instance:
                    labels += f',GPU_I_PROFILE="1g.10gb",GPU_I_ID="{mig_instance}"'
                lines.append(f"{name}{{{labels}}} {gpu[name]}")
    return ("\n".join(lines) + "\n").encode()


def fake_dcgmi(path: Path, rows: Sequence[Sequence[str]], *, then: str = "sleep 600") -> Path:
    """Write a program that imitates the output of `dcgmi dmon`; return its path.

    Args:
        path: the path of the program.
        rows: one row for each line: the values of a GPU, in the order of the requested fields.
        then: a shell command that runs afterwards.
    """
    lines = [
        "#Entity   SMACT  SMOCC",
        "ID",
        *(f"GPU {n}     {'  '.join(row)}" for n, row in enumerate(rows)),
    ]
    printed = "\n".join(f"echo '{line}'" for line in lines)
    path.write_text(f"#!/bin/sh\n{printed}\nexec {then}\n")
    path.chmod(0o755)
    return path
