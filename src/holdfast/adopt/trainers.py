"""Add Holdfast to a script that uses a trainer: Hugging Face's Trainer, Lightning, torchtitan."""

import ast
from collections.abc import Iterable
from typing import Final

from holdfast.adopt.script import Script, keyword_of

EVERY: Final = 100
"""The number of steps between two saves if the script names no number."""
_INTEGRATIONS: Final = "holdfast.checkpoint.integrations"
_LIGHTNING: Final = ("lightning.Trainer", "lightning.pytorch.Trainer")


def huggingface_trainers(script: Script) -> list[ast.Call]:
    """Return the calls that create a Trainer of transformers, or of a class derived from one."""
    own = {
        node.name
        for node in ast.walk(script.tree)
        if isinstance(node, ast.ClassDef)
        and any(_is_trainer(script.resolved(base)) for base in node.bases)
    }
    return [
        call
        for call in script.calls()
        if _is_trainer(script.resolved(call.func))
        or (isinstance(call.func, ast.Name) and call.func.id in own)
    ]


def _is_trainer(path: str) -> bool:
    return path.startswith("transformers.") and path.endswith("Trainer")


def add_to_huggingface(script: Script) -> str:
    """Add the callback, turn the Trainer's own saves off, and let `train` resume.

    Returns:
        A remark for the user; may be empty.

    Raises:
        NotRecognised: the script has several Trainers, or one of another form.
    """
    trainer = _only(script, huggingface_trainers(script), "Trainer(...)")
    made, name = _assigned(script, trainer, "the Trainer")
    train = _only(script, _methods(script, name, "train"), f"{name}.train(...)")
    arguments = [
        call
        for call in script.calls()
        if script.resolved(call.func).startswith("transformers.")
        and script.resolved(call.func).endswith("TrainingArguments")
    ]
    lines = []
    every = EVERY
    if arguments:
        options = _only(script, arguments, "TrainingArguments(...)")
        if any(keyword.arg is None for keyword in options.keywords):
            raise script.refuse(options, "the TrainingArguments are not all in the script")
        best = keyword_of(options, "load_best_model_at_end")
        if best is not None and not _is_constant(best, value=False):
            raise script.refuse(best, "load_best_model_at_end needs the Trainer's own saves")
        steps = keyword_of(options, "save_steps")
        if isinstance(steps, ast.Constant) and isinstance(steps.value, int) and steps.value > 0:
            every = steps.value
        _set_keyword(script, options, "save_strategy", '"no"')
    else:
        lines.append(f'{name}.args.save_strategy = "no"  # Holdfast saves')
    saves = script.free_name("saves")
    script.add_import(f"from {_INTEGRATIONS}.huggingface_trainer import HoldfastCallback")
    script.insert_after(
        made,
        [
            *lines,
            f'{saves} = HoldfastCallback(f"{{{name}.args.output_dir}}/holdfast", every={every})',
            f"{name}.add_callback({saves})",
        ],
    )
    resume = f"{saves}.resume({name})"
    if train.args:
        script.replace(train.args[0], resume)
    else:
        _set_keyword(script, train, "resume_from_checkpoint", resume)
    return ""


def lightning_trainers(script: Script) -> list[ast.Call]:
    """Return the calls that create a Trainer of Lightning.

    Raises:
        NotRecognised: the script imports the older package `pytorch_lightning`.
    """
    if any(path.partition(".")[0] == "pytorch_lightning" for path in script.imports.values()):
        node = next(
            one
            for one in ast.walk(script.tree)
            if isinstance(one, ast.Import | ast.ImportFrom)
            and "pytorch_lightning" in ast.unparse(one)
        )
        raise script.refuse(
            node,
            "import lightning.pytorch in place of pytorch_lightning, and run `holdfast init` again",
        )
    return [call for call in script.calls() if script.resolved(call.func) in _LIGHTNING]


def add_to_lightning(script: Script) -> str:
    """Add the callback and the plugin to the Trainer, and let `fit` resume.

    Returns:
        A remark for the user; may be empty.

    Raises:
        NotRecognised: the script has several Trainers, or one of another form.
    """
    trainer = _only(script, lightning_trainers(script), "Trainer(...)")
    if any(keyword.arg is None for keyword in trainer.keywords):
        raise script.refuse(trainer, "the arguments of the Trainer are not all in the script")
    outer = script.parents[trainer]
    if isinstance(outer, ast.Attribute) and outer.attr == "fit":
        fit = script.parents[outer]
        assert isinstance(fit, ast.Call)
        made = script.statement_of(trainer)
    else:
        made, name = _assigned(script, trainer, "the Trainer")
        fit = _only(script, _methods(script, name, "fit"), f"{name}.fit(...)")
    saves = script.free_name("saves")
    script.add_import(f"from {_INTEGRATIONS}.lightning import HoldfastCheckpoint")
    script.insert_before(made, [f'{saves} = HoldfastCheckpoint("checkpoints", every={EVERY})'])
    _add_to_list(script, trainer, "callbacks", saves)
    _add_to_list(script, trainer, "plugins", f"{saves}.plugin")
    _set_keyword(script, fit, "ckpt_path", f"{saves}.ckpt_path()")
    return (
        "Lightning restarts the epoch after a restart of the run, unless the loader saves its position: "
        'docs/integrations.md, "Lightning".'
    )


def torchtitan_configs(script: Script) -> list[ast.Call]:
    """Return the calls that configure torchtitan's checkpoint manager."""
    return [
        call
        for call in script.calls()
        if script.resolved(call.func).startswith("torchtitan.")
        and script.resolved(call.func).endswith(".CheckpointManager.Config")
    ]


def add_to_torchtitan(script: Script) -> str:
    """Replace torchtitan's checkpoint manager by Holdfast's in each config, and enable it.

    Returns:
        A remark for the user, which is empty.
    """
    manager = "HoldfastCheckpointManager"
    script.add_import(f"from {_INTEGRATIONS}.torchtitan import {manager}")
    for config in torchtitan_configs(script):
        script.replace(config.func, f"{manager}.Config")
        enabled = keyword_of(config, "enable")
        if enabled is None or _is_constant(enabled, value=False):
            _set_keyword(script, config, "enable", "True")
    return ""


def _only(script: Script, calls: Iterable[ast.Call], what: str) -> ast.Call:
    first, *others = [*calls, None]
    if first is None:
        raise script.refuse(None, f"there is no `{what}`")
    if others[0] is not None:
        raise script.refuse(others[0], f"there is a second `{what}`")
    return first


def _assigned(script: Script, call: ast.Call, what: str) -> tuple[ast.stmt, str]:
    """Return the statement that assigns the result of a call, and the name that it assigns."""
    statement = script.parents[call]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    if len(targets) != 1 or not isinstance(targets[0], ast.Name | ast.Attribute):
        raise script.refuse(call, f"{what} is not assigned to a name")
    assert isinstance(statement, ast.stmt)
    return statement, script.text(targets[0])


def _methods(script: Script, name: str, method: str) -> list[ast.Call]:
    return [
        call
        for call in script.calls()
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == method
        and ast.unparse(call.func.value) == name
    ]


def _set_keyword(script: Script, call: ast.Call, keyword: str, value: str) -> None:
    given = keyword_of(call, keyword)
    if given is None:
        script.add_argument(call, f"{keyword}={value}")
    elif script.text(given) != value:
        script.replace(given, value)


def _add_to_list(script: Script, call: ast.Call, keyword: str, item: str) -> None:
    given = keyword_of(call, keyword)
    if given is None or _is_constant(given, value=None):
        _set_keyword(script, call, keyword, f"[{item}]")
    elif isinstance(given, ast.List):
        rest = script.text(given)[1:]
        comma = "," if given.elts else ""
        blank = " " if given.elts and not rest[:1].isspace() else ""
        script.replace(given, f"[{item}{comma}{blank}{rest}")
    else:
        script.replace(given, f"[{item}, *{_starred(script, given)}]")


def _starred(script: Script, given: ast.expr) -> str:
    text = script.text(given)
    return text if isinstance(given, ast.Name | ast.Attribute | ast.Call) else f"({text})"


def _is_constant(node: ast.expr, *, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
