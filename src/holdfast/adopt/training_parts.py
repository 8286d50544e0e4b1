"""Find the parts of a training in a script: optimizer, models, schedules, scaler, average, loss."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from holdfast.adopt.script import Script, called_name

_OTHER_FRAMEWORKS: Final = {
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
    "lightning.Fabric": "Lightning Fabric",
    "lightning.fabric": "Lightning Fabric",
    "torch.distributed.fsdp.FullyShardedDataParallel": "FSDP1 (FSDP2 is `fully_shard`)",
}
_OF_MODELS: Final = ("parameters", "named_parameters", "train", "state_dict")


_NAMES_OF_MODELS: Final = ("model", "net", "network")


@dataclass(frozen=True)
class Parts:
    """The parts of a training, as expressions in the script.

    Attributes:
        steps: the statements that call the optimizer's `step`.
        optimizer: the optimizer.
        entries: the objects whose state is saved, by their names in the checkpoint.
        names: the names and attributes in `entries`.
        loss: the name of the loss; empty if the loss has no name.
        is_sharded: True if the script shards a model with `fully_shard`.
    """

    steps: list[ast.stmt]
    optimizer: str
    entries: dict[str, str]
    names: list[str]
    loss: str
    is_sharded: bool


def parts_of(script: Script) -> Parts:
    """Return the parts of the only training in a script.

    Raises:
        NotRecognised: there is no training, there are several, or another framework trains.
    """
    _refuse_others(script)
    steps: list[ast.stmt] = []
    found: dict[str, ast.Call] = {}
    scalers: list[str] = []
    optimizers = set(_optimizers(script))
    for call, receiver in _methods(script, "step"):
        stepped = receiver
        if receiver not in optimizers and call.args:
            stepped = script.text(call.args[0])
            scalers += [receiver] if stepped in optimizers else []
        if stepped in optimizers:
            steps.append(script.statement_of(call))
            found.setdefault(stepped, call)
    if not found:
        raise script.refuse(
            None, "neither a known trainer nor a loop with `optimizer.step()` is in the script"
        )
    if len(found) > 1:
        first, second = list(found)[:2]
        raise script.refuse(found[second], f"`{second}` is a second optimizer beside `{first}`")
    (optimizer,) = found
    statement = steps[0]
    models = list(dict.fromkeys(_models(script, optimizer, statement)))
    if not models:
        raise script.refuse(statement, f"the model of `{optimizer}` is not found")
    others = [*scalers, *_schedules(script, optimizer), *_averages(script)]
    sharded = [
        call for call in script.calls() if script.resolved(call.func).endswith(".fully_shard")
    ]
    entries: dict[str, str] = {}
    for text in dict.fromkeys([*models, optimizer, *others]):
        entries[_free_key(entries, text)] = text
    if sharded:
        key = next(key for key, text in entries.items() if text == optimizer)
        if len(models) > 1:
            raise script.refuse(
                statement, f"`{optimizer}` is the optimizer of several sharded models"
            )
        entries[key] = f"ShardedOptimizer({models[0]}, {optimizer})"
    return Parts(
        steps=steps,
        optimizer=optimizer,
        entries=entries,
        names=list(dict.fromkeys([*models, optimizer, *others])),
        loss=_loss(script, statement),
        is_sharded=bool(sharded),
    )


def _refuse_others(script: Script) -> None:
    used = [
        script.resolved(node) for node in ast.walk(script.tree) if isinstance(node, ast.Attribute)
    ]
    for path in (*script.imports.values(), *used):
        for prefix, name in _OTHER_FRAMEWORKS.items():
            if path == prefix or path.startswith(f"{prefix}."):
                raise script.refuse(None, f"the script trains with {name}")


def _optimizers(script: Script) -> Iterator[str]:
    """Yield the names of optimizers in the script.

    An object counts as an optimizer if it is created by `torch.optim` or from a model's parameters,
    or if its `zero_grad` is called.
    """
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            path = script.resolved(node.value.func)
            is_of_torch = path.startswith("torch.optim.") and not path.startswith(
                ("torch.optim.lr_scheduler.", "torch.optim.swa_utils.")
            )
            if is_of_torch or any(_models_in(script, node.value)):
                yield from (ast.unparse(target) for target in node.targets)
    yield from (receiver for _, receiver in _methods(script, "zero_grad"))


def _models(script: Script, optimizer: str, step: ast.stmt) -> Iterator[str]:
    """Yield the models whose parameters the optimizer changes."""
    scope = script.scope_of(step)
    for node in ast.walk(script.tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and optimizer in map(ast.unparse, node.targets)
            and script.scope_of(node) in (scope, script.tree)
        ):
            models = list(_models_in(script, node.value))
            func = node.value.func
            if not models and isinstance(func, ast.Attribute) and not script.resolved(func):
                models = [script.text(func.value)]  # model.configure_optimizers(...)
            yield from models
            if models:
                return
    # The optimizer's call has no model. Look for names that the script calls and that are named or
    # used like a model.
    used = {receiver for name in _OF_MODELS for _, receiver in _methods(script, name)}
    for call in script.calls(scope):
        if isinstance(call.func, ast.Name | ast.Attribute):
            name = script.text(call.func)
            if name in used or name.rpartition(".")[2] in _NAMES_OF_MODELS:
                yield name


def _models_in(script: Script, call: ast.Call) -> Iterator[str]:
    for inner in script.calls(call):
        if (
            isinstance(inner.func, ast.Attribute)
            and inner.func.attr in ("parameters", "named_parameters")
            and isinstance(inner.func.value, ast.Name | ast.Attribute)
        ):
            yield script.text(inner.func.value)


def _schedules(script: Script, optimizer: str) -> Iterator[str]:
    """Yield the objects that are stepped like a learning-rate schedule.

    Such an object was created from the optimizer, or has `sched` in its name.
    """
    made = {
        ast.unparse(target)
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and any(ast.unparse(one) == optimizer for one in _values(node.value))
        for target in node.targets
    }
    for call, receiver in _methods(script, "step"):
        is_of_other = bool(call.args) and script.text(call.args[0]) == optimizer  # by a scaler
        if receiver == optimizer or is_of_other:
            continue
        if receiver in made or "sched" in receiver.lower():
            yield receiver


def _values(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _averages(script: Script) -> Iterator[str]:
    for node in ast.walk(script.tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and script.resolved(node.value.func) == "torch.optim.swa_utils.AveragedModel"
        ):
            yield from map(ast.unparse, node.targets)


def _loss(script: Script, step: ast.stmt) -> str:
    """Return the name of the loss on which `backward` is called, without its scaling or division.

    The result is empty if the loss has no name.
    """
    scope = script.scope_of(step)
    for call, receiver in _methods(script, "backward", scope):
        if script.scope_of(call) is not scope:  # a closure, whose names the loop does not have
            continue
        if call.args:  # a library's own function, such as `engine.backward(loss)`
            return ""
        node = ast.parse(receiver, mode="eval").body
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Call) and called_name(node) == "scale" and node.args:
                node = node.args[0]
            elif isinstance(node, ast.BinOp):
                node = node.left
            else:
                return ""
        return node.id
    return ""


def _methods(
    script: Script, name: str, within: ast.AST | None = None
) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of methods with this name, each with the text of the method's object."""
    for call in script.calls(within):
        if isinstance(call.func, ast.Attribute) and call.func.attr == name:
            yield call, script.text(call.func.value)


def _free_key(entries: dict[str, str], text: str) -> str:
    key = text.rpartition(".")[2]
    while key in entries:
        key = f"{key}_"
    return key
