"""Read the shape of a job, which the formulas need: the model, its parallel layout and the GPU.

The shape is read from `job.toml` in the folder of a recording, or from the file that `--job` names:

    [model]
    layers = 32
    hidden = 4096
    heads = 32
    vocabulary = 128256

    [layout]
    sequence = 8192
    data = 8

    [gpu]
    name = "NVIDIA H100 80GB HBM3"

The keys of `[model]` and `[layout]` are the fields of `formulas.shape.Model` and `Layout`.
"""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from holdfast.core.errors import BadUse, NotFound
from holdfast.profile.formulas.shape import Layout, Model

NAME: Final = "job.toml"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Hold a job's GPU: the device name that the driver reports, or the peak that users state."""

    name: str | None = None
    peak_tflops: float | None = None
    """Dense TFLOP/s in the precision of the job; None to look the peak up by the device name."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Hold the shape of a job: the model, its parallel layout and the GPU."""

    model: Model
    layout: Layout
    gpu: Gpu = dataclasses.field(default_factory=Gpu)

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Read the shape of a job from a TOML file.

        Raises:
            NotFound: there is no such file.
            BadUse: the file is not valid TOML, has an unknown key, lacks a key, or has a value that
                is not allowed.
        """
        try:
            tables = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise NotFound(
                f"There is no file {path}. Write one with [model], [layout] and [gpu];"
                " docs/profile.md has an example."
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadUse(f"{path} is not TOML: {error}. Correct the file.") from None
        if unknown := sorted(set(tables) - {"model", "layout", "gpu"}):
            raise BadUse(f"{path} has [{unknown[0]}]. The tables are model, layout and gpu.")
        return cls(
            model=_made(Model, path, "model", tables),
            layout=_made(Layout, path, "layout", tables),
            gpu=_made(Gpu, path, "gpu", tables),
        )

    def write(self, path: Path) -> None:
        """Write the shape to a TOML file; fields that have their default value are left out."""
        lines = []
        for table in ("model", "layout", "gpu"):
            one = getattr(self, table)
            lines.append(f"[{table}]")
            for each in dataclasses.fields(one):
                value = getattr(one, each.name)
                if value != each.default:
                    shown = str(value).lower() if isinstance(value, bool) else repr(value)
                    lines.append(f"{each.name} = {shown}")
            lines.append("")
        path.write_text("\n".join(lines))


_Made = TypeVar("_Made")


def _made(kind: type[_Made], path: Path, table: str, tables: Mapping[str, Any]) -> _Made:
    given = tables.get(table, {})
    if not isinstance(given, dict):
        raise BadUse(f"{path}: {table} is not a table. Write [{table}] above its keys.")
    hints = typing.get_type_hints(kind)
    fields = {one.name: one for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(fields)):
        raise BadUse(
            f"{path}: [{table}] has no key {unknown[0]}. The keys are {', '.join(fields)}."
        )
    lacking = [
        name
        for name, one in fields.items()
        if one.default is dataclasses.MISSING and name not in given
    ]
    if lacking:
        raise BadUse(f"{path}: [{table}] lacks {', '.join(lacking)}. Add the keys.")
    for name, value in given.items():
        if not _fits(value, hints[name]):
            wanted = getattr(hints[name], "__name__", str(hints[name]))
            raise BadUse(f"{path}: {table}.{name} is {value!r}. Give a value of type {wanted}.")
    return kind(**given)


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return isinstance(value, str)  # the class itself names the words that are allowed
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
