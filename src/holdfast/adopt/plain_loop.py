"""Add Holdfast to a script with its own training loop: attach, restore, report each step, save.

The loop is found by the call of the optimizer's `step`. These forms are recognised:

- `for step in range(...)`: the loop counts the steps.
- `for epoch in range(...)` around `for batch in loader`: the outer loop counts the epochs, and the
  position in the data is saved with the state. The inner loop may be in its own function.
- `while`: the statement `step += 1` counts the steps.
- `for batch in loader` without an outer loop: the script trains a single epoch.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from holdfast.adopt.script import (
    Loop,
    Scope,
    Script,
    assignments_in,
    called_name,
    keyword_of,
    loops_around,
    parameters_of,
)
from holdfast.adopt.trainers import EVERY
from holdfast.adopt.training_parts import Parts, parts_of

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_COUNTING: Final = ("range", "trange")
_WRAPPERS: Final = ("enumerate", "tqdm", "track")
_CHANGES_STATE: Final = ("step", "update", "update_parameters", "zero_grad")
"""Names of methods that change the state of an optimizer, schedule, scaler or average."""


@dataclass
class _Plan:
    """The lines to add to the script, and the names that they use."""

    script: Script
    parts: Parts
    block: list[ast.stmt]
    """The list of statements that contains the optimizer's step."""
    last: int
    """The index in `block` of the last statement that changes the state in a step."""
    run: str
    ckpt: str
    state: str
    before: ast.stmt | None = None
    """The statement before which the lines that restore are inserted."""
    batches: str = ""
    loader: str = ""
    restore: str = ""
    """A format for the line that restores, such as `step = {}`."""
    ending: list[str] = field(default_factory=list)
    reporting: list[str] = field(default_factory=list)


POSITION: Final = (
    "The position in the data is not saved. A loop that draws its batches at random needs no position; else see "
    'docs/checkpoints/how-to.md, "The position in the data".'
)


def add_to_loop(script: Script) -> str:
    """Add Holdfast to the only training loop of a script.

    Returns:
        A remark for the user; may be empty.

    Raises:
        NotRecognised: the script has no training loop, several ones, or one of another form.
    """
    parts = parts_of(script)
    anchor = _common_statement(script, parts.steps)
    loops = loops_around(script, anchor)
    if not loops:
        raise script.refuse(anchor, f"`{parts.optimizer}.step()` is in no loop of its function")
    outer = loops[-1]
    _check_trained_once(script, script.scope_of(outer), outer)
    block = script.block_of(anchor)
    plan = _Plan(
        script,
        parts,
        block,
        _last_change(script, block, anchor, loops[0], parts),
        script.free_name("run"),
        script.free_name("ckpt"),
        script.free_name("state"),
    )
    plan.before = outer
    if call := _caller_of(script, loops):
        assert isinstance(loops[0], ast.For)
        outer = _plan_epochs_of_caller(plan, loops[0], call)
    else:
        _plan_count(plan, loops)
    _check_bound(plan)
    script.add_import("import holdfast")
    if parts.is_sharded:
        script.add_import("from holdfast.checkpoint.integrations.fsdp2 import ShardedOptimizer")
    script.insert_before(plan.before, _restoring(plan))
    script.insert_after(block[plan.last], plan.reporting)
    script.insert_after(outer, _closing(plan))
    remarks = [] if plan.batches else [POSITION]
    if left := _names_left(script, outer):
        remarks.append(
            f"Code after the loop reads {', '.join(f'`{name}`' for name in sorted(left))}. A restart after the last "
            "step makes no step and does not set these names: save their values, or set the names before the loop."
        )
    return " ".join(remarks)


def _check_trained_once(script: Script, scope: Scope, loop: Loop) -> None:
    """Check that a script trains once: a second training would restore the end of the first."""
    if isinstance(scope, ast.Module):
        return
    if isinstance(script.parents[scope], ast.ClassDef):
        raise script.refuse(loop, f"the loop is in a method, `{scope.name}`")
    if isinstance(loop, ast.For) and not _counting(script, loop):
        return  # the function trains an epoch: `_caller_of` checks its calls
    calls = _calls_of(script, scope)
    for call in calls:
        if len(calls) > 1 or loops_around(script, script.statement_of(call)):
            raise script.refuse(call, f"`{scope.name}` trains more than once")


def _restoring(plan: _Plan) -> list[str]:
    entries = ", ".join(f'"{key}": {value}' for key, value in plan.parts.entries.items())
    lines = [
        f"{plan.run} = holdfast.attach()",
        f'{plan.ckpt} = holdfast.Checkpointer("checkpoints", every={EVERY})',
    ]
    if plan.batches:
        lines.append(f"{plan.batches} = {plan.run}.batches({plan.loader})")
    return [
        *lines,
        f"{plan.state} = {{{entries}}}",
        f"{plan.restore.format(f'{plan.ckpt}.restore({plan.state}{_position(plan)})')}",
    ]


def _position(plan: _Plan) -> str:
    return f', per_rank={{"batches": {plan.batches}}}' if plan.batches else ""


def _report(plan: _Plan, count: str, force: str = "") -> list[str]:
    """Return the lines that report and save a step.

    `count` is the expression for the number of completed steps; `force` is the expression for
    whether the save is forced.
    """
    loss = f", loss={plan.parts.loss}" if plan.parts.loss else ""
    forced = f", force={force}" if force else ""
    return [
        f"{plan.run}.step({count}{loss})",
        f"{plan.ckpt}.save({count}, {plan.state}{_position(plan)}{forced})",
    ]


def _closing(plan: _Plan) -> list[str]:
    return [*plan.ending, f"{plan.ckpt}.close()"]


def _plan_count(plan: _Plan, loops: Sequence[Loop]) -> None:
    """Plan how the steps are counted, and at which number the loops begin after a restore."""
    script = plan.script
    inner, outer = loops[0], loops[-1]
    if len(loops) > 2:
        raise script.refuse(outer, "the loop has more than two loops around the optimizer's step")
    if len(loops) == 1 and isinstance(inner, ast.For) and (counting := _counting(script, inner)):
        _count_by_loop(plan, inner, counting)
        return
    if isinstance(inner, ast.For):
        if _counting(script, inner):
            raise script.refuse(inner, "a loop over numbers is in another loop")
        _wrap_loader(plan, inner, outer)
    elif len(loops) > 1:
        raise script.refuse(inner, "a `while` is in another loop")
    else:
        _wrap_iterator(plan, outer)
    if outer is not inner and isinstance(outer, ast.For):
        counting = _counting(script, outer)
        if counting is None:
            raise script.refuse(outer, "the loop over epochs is not over a `range`")
        _shift(plan, counting, f"{plan.batches}.epoch")
    counter = _counter(plan, loops)
    if counter:
        is_set_elsewhere = any(
            not (isinstance(value, ast.Constant) and value.value == 0)
            for name, value, _ in assignments_in(script.scope_of(outer))
            if name == counter
        )
        plan.restore = f"{counter} = {{}}" + (f" or {counter}" if is_set_elsewhere else "")
    elif isinstance(inner, ast.While):
        raise script.refuse(inner, "no `step += 1`, which begins at `step = 0`, counts the steps")
    else:
        counter = script.free_name("step")
        plan.restore = f"{counter} = {{}}"
        plan.reporting.append(f"{counter} += 1")
    _plan_saves(plan, counter, inner, outer, outer.body[-1])


def _plan_saves(
    plan: _Plan, count: str, inner: Loop, within: Loop | _Function, epoch_end: ast.stmt
) -> None:
    """Add to the plan the report and the save of each step, and the last save.

    Args:
        plan: the plan, which receives the lines.
        count: the expression for the number of completed steps.
        inner: the loop over the steps.
        within: the loop or function that trains an epoch.
        epoch_end: the last statement of an epoch.
    """
    report, save = _report(plan, count)
    plan.reporting.append(report)
    if plan.batches and isinstance(inner, ast.For) and _names_left(plan.script, inner, within):
        # After a restart at the end of an epoch, the loop over the epoch's batches would not run,
        # and the code after the loop would read names that were not set.
        plan.reporting += [f"if {plan.batches}.position % len({plan.batches}):", f"    {save}"]
        plan.script.insert_after(epoch_end, [f"if len({plan.batches}) == 1:", f"    {save}"])
    else:
        plan.reporting.append(save)
    plan.ending.append(_report(plan, count, "True")[1])


def _names_left(script: Script, loop: Loop, within: Loop | _Function | None = None) -> set[str]:
    """Return the names that only a loop sets, but that code after the loop reads.

    Only code in `within` counts; None: in the whole function.
    """
    scope = script.scope_of(loop)
    names = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and script.scope_of(node) is scope
    ]
    stored = [node for node in names if isinstance(node.ctx, ast.Store)]
    assert loop.end_lineno is not None
    code_after = set(ast.walk(within or scope))
    after = {node for node in names if node.lineno > loop.end_lineno and node in code_after}
    others = [one for one in stored if one.lineno < loop.lineno or (one in after and not within)]
    inside = set(ast.walk(loop))
    left = {node.id for node in stored if node in inside} & {
        node.id for node in after if isinstance(node.ctx, ast.Load)
    }
    return left - {node.id for node in others}


def _caller_of(script: Script, loops: Sequence[Loop]) -> ast.Call | None:
    """Return the call of a function that trains one epoch, if the optimizer's step is in one.

    The result is None if the step is not in such a function.

    Raises:
        NotRecognised: the function is called nowhere in the script, or more than once.
    """
    scope = script.scope_of(loops[0])
    if isinstance(scope, ast.Module) or len(loops) > 1 or not isinstance(loops[0], ast.For):
        return None
    if _counting(script, loops[0]):
        return None
    calls = _calls_of(script, scope)
    if len(calls) == 1 and not loops_around(script, script.statement_of(calls[0])):
        return None
    if len(calls) != 1:
        raise script.refuse(
            scope, f"`{scope.name}` trains one epoch, and it has no caller or several ones"
        )
    return calls[0]


def _calls_of(script: Script, function: _Function) -> list[ast.Call]:
    return [
        call
        for call in script.calls()
        if isinstance(call.func, ast.Name) and call.func.id == function.name
    ]


def _plan_epochs_of_caller(plan: _Plan, inner: ast.For, call: ast.Call) -> ast.For:
    """Plan for a loop over epochs that calls a function for each epoch.

    The run, the checkpointer and the batches become arguments of the function.

    Returns:
        The loop over the epochs.
    """
    script = plan.script
    function = script.scope_of(inner)
    assert not isinstance(function, ast.Module)
    epochs = loops_around(script, script.statement_of(call))
    counting = _counting(script, epochs[0]) if isinstance(epochs[0], ast.For) else None
    if len(epochs) > 1 or not isinstance(epochs[0], ast.For) or counting is None:
        raise script.refuse(call, "the loop over epochs is not over a `range`")
    given = _arguments(script, function, call)

    def of_caller(text: str) -> str:
        name, dot, rest = text.partition(".")
        return given.get(name, name) + dot + rest

    _wrap_loader(plan, inner, inner)
    plan.before, plan.loader = epochs[0], of_caller(plan.loader)
    if plan.parts.is_sharded:
        raise script.refuse(call, "a sharded model is trained in a function of its own")
    plan.parts = replace(
        plan.parts,
        entries={key: of_caller(text) for key, text in plan.parts.entries.items()},
        names=[of_caller(text) for text in plan.parts.names],
    )
    passed = [plan.run, plan.ckpt, plan.state, plan.batches]
    script.add_parameters(function, passed)
    for name in passed:
        script.add_argument(call, f"{name}={name}")
    _shift(plan, counting, f"{plan.batches}.epoch")
    plan.restore = "{}"
    _plan_saves(plan, f"{plan.batches}.number", inner, function, script.statement_of(call))
    return epochs[0]


def _arguments(script: Script, function: _Function, call: ast.Call) -> dict[str, str]:
    """Return, for each parameter of a function, the text of the argument that a call passes."""
    form = function.args
    if form.posonlyargs or form.vararg or form.kwonlyargs or form.kwarg or not form.args:
        raise script.refuse(function, f"the parameters of `{function.name}` have another form")
    given = dict(zip((one.arg for one in form.args), map(script.text, call.args), strict=False))
    given |= {one.arg: script.text(one.value) for one in call.keywords if one.arg}
    if set(given) != {one.arg for one in form.args}:
        raise script.refuse(call, f"the arguments of `{function.name}` have another form")
    return given


def _count_by_loop(plan: _Plan, loop: ast.For, counting: ast.Call) -> None:
    script = plan.script
    _wrap_iterator(plan, loop)
    if not isinstance(loop.target, ast.Name) or (
        isinstance(loop.iter, ast.Call) and (called_name(loop.iter) == "enumerate")
    ):
        raise script.refuse(loop, "the loop does not count by one name")
    first = _first_of(script, counting)
    start = script.free_name("start")
    plan.restore = f"{start} = {{}}"
    count = f"{loop.target.id} + 1" if first == 0 else loop.target.id
    end = counting.args[0] if len(counting.args) == 1 else counting.args[1]
    text = script.text(end)
    plain = isinstance(end, ast.Name | ast.Attribute | ast.Constant | ast.BinOp | ast.Call)
    plan.reporting += _report(
        plan, count, f"{loop.target.id} + 1 == {text if plain else f'({text})'}"
    )
    _shift(plan, counting, start)


def _shift(plan: _Plan, counting: ast.Call, start: str) -> None:
    """Change a `range` so that it begins `start` later, a name that the restore sets before."""
    script = plan.script
    _restore_before(plan, script.statement_of(counting))
    first = _first_of(script, counting)
    begin = start if first == 0 else f"{start} + {first}"
    if len(counting.args) == 1:
        script.replace(counting.args[0], f"{begin}, {script.text(counting.args[0])}")
    else:
        script.replace(counting.args[0], begin)


def _restore_before(plan: _Plan, statement: ast.stmt) -> None:
    """Let the restore come before a statement, even if that is earlier than planned.

    An example is the statement that creates the loop's progress bar.
    """
    assert plan.before is not None
    if statement.lineno >= plan.before.lineno:
        return
    if plan.script.parents[statement] not in plan.script.around(plan.before):
        raise plan.script.refuse(statement, "only one branch makes the loop's values")
    plan.before = statement


def _first_of(script: Script, counting: ast.Call) -> int:
    """Return the first number of a `range`, which must be 0 or 1."""
    if len(counting.args) == 1:
        return 0
    first = counting.args[0] if counting.args else None
    if (
        len(counting.args) != 2
        or not isinstance(first, ast.Constant)
        or not isinstance(first.value, int)
        or first.value not in (0, 1)
    ):
        raise script.refuse(counting, "the range begins at neither 0 nor 1, or has a step")
    return first.value


def _counting(script: Script, loop: ast.For) -> ast.Call | None:
    """Return the call of `range` that a loop iterates over, also inside `tqdm`; else None."""
    found = _unwrapped(script, loop.iter, loop)
    return found if isinstance(found, ast.Call) and called_name(found) in _COUNTING else None


def _unwrapped(script: Script, node: ast.expr, loop: ast.For) -> ast.expr:
    """Return the iterable inside `enumerate` and progress bars.

    A bar may also have been assigned to a name before the loop.
    """
    while True:
        if isinstance(node, ast.Call) and called_name(node) in _WRAPPERS and node.args:
            node = node.args[0]
        elif isinstance(node, ast.Name) and (bar := _bar_of(script, node.id, loop)):
            node = bar
        else:
            return node


def _bar_of(script: Script, name: str, loop: ast.For) -> ast.Call | None:
    bars = [
        value
        for assigned, value, statement in assignments_in(script.scope_of(loop))
        if assigned == name
        and isinstance(value, ast.Call)
        and called_name(value) in _WRAPPERS
        and statement.lineno < loop.lineno
    ]
    return max(bars, key=lambda one: one.lineno, default=None)


def _wrap_loader(plan: _Plan, inner: ast.For, outer: Loop) -> None:
    """Change the inner loop so that it takes its batches from `run.batches`."""
    script = plan.script
    loader = _unwrapped(script, inner.iter, inner)
    if not isinstance(loader, ast.Name | ast.Attribute):
        raise script.refuse(inner, "the loop's loader has no name: assign it to one")
    plan.loader = script.text(loader)
    if any(name == plan.loader for name, _, _ in assignments_in(outer)):
        raise script.refuse(inner, f"`{plan.loader}` is created again within the loop")
    plan.batches = script.free_name("batches")
    _restore_before(plan, script.statement_of(loader))
    script.replace(loader, plan.batches)
    numbered = next(
        (
            one
            for one in script.around(loader)
            if isinstance(one, ast.Call) and called_name(one) == "enumerate"
        ),
        None,
    )
    if numbered is not None:
        # The number of a batch within its epoch must be the same after a restart.
        place = f"{plan.batches}.position"
        first = keyword_of(numbered, "start") or next(iter(numbered.args[1:]), None)
        if first is None:
            script.add_argument(numbered, place)
        else:
            script.replace(first, f"{script.text(first)} + {place}")


def _wrap_iterator(plan: _Plan, loop: Loop) -> None:
    """Wrap the loader behind an iterator from which the loop takes batches with `next`."""
    script = plan.script
    taken = {
        ast.unparse(call.args[0])
        for call in script.calls(loop)
        if called_name(call) == "next" and len(call.args) >= 1
    }
    if not taken:
        return
    if len(taken) > 1:
        raise script.refuse(loop, "the loop takes batches from several iterators")
    (name,) = taken
    made = [
        (value, statement)
        for assigned, value, statement in assignments_in(script.scope_of(loop))
        if assigned == name
    ]
    if not made:
        raise script.refuse(loop, f"`{name}` is not made in the function of the loop")
    plan.batches = script.free_name("batches")
    for value, statement in made:
        loader = value
        while isinstance(loader, ast.Call) and len(loader.args) == 1:
            if script.resolved(loader.func) == "itertools.cycle":
                raise script.refuse(
                    statement,
                    "itertools.cycle repeats the first epoch: iterate over the loader anew",
                )
            loader = loader.args[0]
        if not isinstance(loader, ast.Name | ast.Attribute) or loader is value:
            raise script.refuse(statement, f"the loader below `{name}` has no name")
        plan.loader = plan.loader or script.text(loader)
        if script.text(loader) != plan.loader:
            raise script.refuse(statement, f"`{name}` is made from a second loader")
        script.replace(loader, plan.batches)
    assert plan.before is not None
    plan.before = min([*(one for _, one in made), plan.before], key=lambda one: one.lineno)


def _counter(plan: _Plan, loops: Sequence[Loop]) -> str:
    """Return the name that counts the steps, or an empty text if there is none.

    The name starts at 0 and is increased by `NAME += 1` beside the optimizer's step. If there are
    several such names, one that a condition of the loops reads is preferred. The lines that report
    are inserted after the increase.
    """
    script = plan.script
    scope = script.scope_of(loops[0])
    zeroed = {
        name
        for name, value, statement in assignments_in(scope)
        if isinstance(value, ast.Constant)
        and value.value == 0
        and statement.lineno < loops[-1].lineno
    }
    read = {
        node.id
        for one in ast.walk(loops[-1])
        if isinstance(one, ast.While | ast.If)
        for node in ast.walk(one.test)
        if isinstance(node, ast.Name)
    }
    found = [
        (index, statement.target.id)
        for index, statement in enumerate(plan.block)
        if isinstance(statement, ast.AugAssign)
        and isinstance(statement.op, ast.Add)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value == 1
        and isinstance(statement.target, ast.Name)
        and statement.target.id in zeroed
    ]
    if not found:
        return ""
    index, name = min(found, key=lambda one: (one[1] not in read, one[0]))
    plan.last = max(plan.last, index)
    return name


def _last_change(
    script: Script, block: list[ast.stmt], anchor: ast.stmt, loop: Loop, parts: Parts
) -> int:
    """Return the index in `block` of the last statement that changes the state in a step.

    Raises:
        NotRecognised: a schedule or an average changes in another block of the loop, so that no
            place in `block` comes after all changes of a step.
    """
    last = block.index(anchor)
    for statement in block[last + 1 :]:
        if any(
            isinstance(call.func, ast.Attribute) and call.func.attr in _CHANGES_STATE
            for call in script.calls(statement)
        ):
            last = block.index(statement)
    here = set(ast.walk(ast.Module(block[: last + 1], [])))
    for call in script.calls(loop):
        if (
            call not in here
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("step", "update_parameters")
            and script.text(call.func.value) in parts.entries.values()
        ):
            raise script.refuse(
                call, f"`{script.text(call)}` is in another block than the optimizer's step"
            )
    return last


def _check_bound(plan: _Plan) -> None:
    """Check that each name of the state is assigned before the line that restores the state."""
    script = plan.script
    assert plan.before is not None
    scope = script.scope_of(plan.before)
    wanted = {*plan.parts.names, *([plan.loader] if plan.loader else [])}
    for text in sorted(wanted):
        name = text.partition(".")[0]
        parameters = [] if isinstance(scope, ast.Module) else parameters_of(scope)
        lines = [
            node.lineno
            for node in ast.walk(scope)
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
        ]
        is_global = scope is not script.tree and any(
            assigned == name for assigned, _, _ in assignments_in(script.tree, deep=False)
        )
        if name in parameters or is_global or any(line < plan.before.lineno for line in lines):
            continue
        if lines:
            raise script.refuse(
                plan.before, f"`{text}` is made after this line, which has to follow it"
            )
        raise script.refuse(plan.before, f"`{text}` is not known in the function of the loop")


def _common_statement(script: Script, nodes: Sequence[ast.stmt]) -> ast.stmt:
    """Return the innermost statement that contains all nodes."""
    anchor = nodes[0]
    while not set(nodes) <= set(ast.walk(anchor)):
        parent = script.parents[anchor]
        if not isinstance(parent, ast.stmt) or isinstance(parent, ast.For | ast.While):
            raise script.refuse(nodes[1], "the optimizer makes a step in a second place")
        anchor = parent
    return anchor
