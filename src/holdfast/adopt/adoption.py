"""Determine what kind of script a file is, and return the diff that adds Holdfast to the script."""

import ast
import difflib
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.adopt.plain_loop import add_to_loop
from holdfast.adopt.script import Script
from holdfast.adopt.trainers import (
    add_to_huggingface,
    add_to_lightning,
    add_to_torchtitan,
    huggingface_trainers,
    lightning_trainers,
    torchtitan_configs,
)
from holdfast.core.atomic import replacing
from holdfast.core.errors import BadUse, NotFound

Kind = Literal["adopted", "huggingface", "lightning", "torchtitan", "fsdp2", "loop"]
KINDS: dict[Kind, str] = {
    "adopted": "a script with Holdfast",
    "huggingface": "a Trainer of Hugging Face",
    "lightning": "a Trainer of Lightning",
    "torchtitan": "a config of torchtitan",
    "fsdp2": "a training loop with FSDP2",
    "loop": "a training loop",
}
"""The description of each kind of script, for messages."""


@dataclass(frozen=True)
class Adoption:
    """A script before and after Holdfast was added.

    Attributes:
        path: the path of the script.
        kind: the kind of the script; "adopted" if the script imports Holdfast already.
        before: the bytes of the script.
        after: the bytes with Holdfast; the same as `before` for "adopted".
        remark: one sentence on what the user still has to do; may be empty.
    """

    path: Path
    kind: Kind
    before: bytes
    after: bytes
    remark: str = ""

    def diff(self) -> str:
        """Return the change as a unified diff for `git apply` or `patch -p1`; empty if none."""
        name = os.path.relpath(self.path)
        lines = difflib.unified_diff(
            _lines(self.before), _lines(self.after), f"a/{name}", f"b/{name}"
        )
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        )

    def write(self) -> None:
        """Replace the script, whole or not at all, and keep its permissions.

        Raises:
            BadUse: the script has changed since it was read.
        """
        path = self.path.resolve()  # a link stays a link: its target is replaced
        if path.read_bytes() != self.before:
            raise BadUse(f"{self.path} has changed since it was read. Run the command again.")
        with replacing(path) as temporary:
            temporary.write_bytes(self.after)
            shutil.copymode(path, temporary)


def adoption_of(path: Path) -> Adoption:
    """Read a script, and return it with Holdfast added.

    Raises:
        NotFound: there is no such file.
        NotRecognised: `holdfast init` does not change scripts of this form; the message states the
            form.
    """
    if not path.is_file():
        raise NotFound(f"There is no script {path}. Name a Python file.")
    script = Script(path, path.read_bytes())
    if any(name.partition(".")[0] == "holdfast" for name in script.imports.values()):
        return Adoption(path, "adopted", script.data, script.data)
    kind, add = _recognised(script)
    remark = add(script)
    return Adoption(path, kind, script.data, script.changed(), remark)


def _recognised(script: Script) -> tuple[Kind, Callable[[Script], str]]:
    if huggingface_trainers(script):
        return "huggingface", add_to_huggingface
    if lightning_trainers(script):
        return "lightning", add_to_lightning
    if torchtitan_configs(script):
        return "torchtitan", add_to_torchtitan
    is_sharded = any(
        script.resolved(node).endswith(".fully_shard")
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return ("fsdp2" if is_sharded else "loop"), add_to_loop


def _lines(data: bytes) -> list[str]:
    # Not str.splitlines, which also splits lines at characters that are no line ends for `patch`.
    return [line.decode("utf-8") for line in io.BytesIO(data)]
