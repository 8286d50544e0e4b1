"""Check the versions of Python, Holdfast and its libraries, and the GPUs with their driver."""

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from holdfast.adopt.doctor.findings import Finding, good, unseen, wrong

_PCI: Final = Path("/sys/bus/pci/devices")
_VENDORS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_DISPLAYS: Final = ("0x03", "0x12")
"""The first characters of the PCI classes of GPUs: display controllers, processing accelerators."""


def versions(folder: Path) -> Iterator[Finding]:  # noqa: ARG001 - the form of all checks
    """Check that the installed libraries have versions that Holdfast supports."""
    try:
        own = metadata.distribution("holdfast")
    except metadata.PackageNotFoundError:
        yield unseen("Holdfast is not installed as a package.", "pip install 'holdfast[train]'")
        return
    yield from unfit(own.requires or [])
    yield good(f"Python {platform.python_version()}, Holdfast {own.version}.")
    try:
        yield good(f"torch {metadata.version('torch')}.")
    except metadata.PackageNotFoundError:
        yield wrong("torch is not installed.", "pip install 'holdfast[train]'")


def unfit(requirements: list[str]) -> Iterator[Finding]:
    """Yield a finding for each installed library whose version Holdfast does not support.

    A missing library is a finding only if Holdfast needs it without any extra. The libraries for
    the development of Holdfast are not checked.

    Args:
        requirements: the requirements in the form of a package's metadata (PEP 508).
    """
    for text in dict.fromkeys(requirements):
        one = Requirement(text)
        is_extra = "extra ==" in str(one.marker)
        if 'extra == "dev"' in str(one.marker):  # a training needs none of these tools
            continue
        install = f"pip install '{one.name}{one.specifier}'"
        try:
            found = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            if not is_extra:
                yield wrong(f"{one.name} is not installed.", install)
            continue
        if not one.specifier.contains(found, prereleases=True):
            yield wrong(f"{one.name} is {found}; Holdfast needs {one.specifier}.", install)


def gpus(folder: Path) -> Iterator[Finding]:  # noqa: ARG001 - the form of all checks
    """Check that the PCI bus, the driver and torch show the same GPUs, and check their health."""
    from holdfast.profile import gpu_memory, has_gpu

    on_bus = gpus_on_bus()
    if not has_gpu():
        if not on_bus:
            yield good("This host has no GPU; a training uses the CPUs.")
            return
        yield wrong(
            f"{', '.join(on_bus)} on the PCI bus, and no driver is loaded here.",
            "sudo modprobe nvidia  # in a container: start it with --gpus all",
        )
        return
    memory, missing = gpu_memory()
    if not memory:
        for source, why in missing.items():
            yield unseen(
                f"The GPUs are not read by {source}: {why}.", "pip install 'holdfast[gpu]'"
            )
    else:
        sizes = ", ".join(sorted({f"{size / 2**30:.0f} GiB" for size in memory.values()}))
        yield good(f"The driver has {len(memory)} GPUs of {sizes}.")
    yield from _of_torch(len(memory))
    yield from _health()


def gpus_on_bus(root: Path = _PCI) -> list[str]:
    """Return the GPUs on the PCI bus, one text for each vendor, such as "8 NVIDIA GPUs"."""
    counts: dict[str, int] = {}
    for device in sorted(root.glob("*")):
        try:
            vendor = _VENDORS.get((device / "vendor").read_text().strip(), "")
            kind = (device / "class").read_text()
        except OSError:
            continue
        if vendor and kind.startswith(_DISPLAYS):
            counts[vendor] = counts.get(vendor, 0) + 1
    return [f"{count} {name} GPU{'s' * (count > 1)}" for name, count in counts.items()]


def _of_torch(of_driver: int) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        yield wrong(
            f"torch {torch.__version__} is a build for CPUs, and this host has GPUs.",
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",
        )
    elif not torch.cuda.is_available():
        yield wrong(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) can use no GPU here.",
            'python -c "import torch; torch.cuda.init()"  # prints the reason',
        )
    else:
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        words = "" if chosen is None else f", by CUDA_VISIBLE_DEVICES={chosen}"
        seen = torch.cuda.device_count()
        sentence = f"torch uses {seen} GPUs{words}."
        if of_driver and seen < of_driver and chosen is None:
            yield wrong(f"{sentence} The driver has {of_driver}.", "nvidia-smi -L")
        else:
            yield good(sentence)


def _health() -> Iterator[Finding]:
    from holdfast.recover import Gpus

    source = Gpus()
    try:
        facts = source.read()
    except Exception as error:
        yield unseen(f"The health of the GPUs is not read: {error}.", "nvidia-smi -q")
        return
    for fact in facts:
        yield wrong(f"{fact.text}.", "holdfast nodes check")
    if not facts:
        yield good("The driver reports no fault of a GPU.")
