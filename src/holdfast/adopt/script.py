"""Parse a script, and edit it by positions, so that all other bytes stay as they are."""

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.errors import BadUse

BY_HAND = 'Add the lines by hand: docs/running.md, "Calls in the script".'
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.While


class NotRecognised(BadUse):
    """`holdfast init` does not change scripts of this form."""


@dataclass(frozen=True)
class _Edit:
    start: int
    end: int
    text: str


@dataclass
class Script:
    """A script with its bytes, its syntax tree, and the edits so far.

    Args:
        path: the path of the script, for messages.
        data: the bytes of the script.

    Raises:
        NotRecognised: the bytes are no Python script in UTF-8.
    """

    path: Path
    data: bytes
    _edits: list[_Edit] = field(default_factory=list)
    _added: dict[ast.Call, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Parse the script."""
        try:
            self.data.decode("utf-8")
            self.tree = ast.parse(self.data, filename=str(self.path))
            words = list(tokenize.tokenize(io.BytesIO(self.data).readline))
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError, ValueError) as error:
            raise NotRecognised(
                f"{self.path} is no Python script in UTF-8: {error}. Name a training script."
            ) from error
        if self.data.startswith(b"\xef\xbb\xbf"):
            raise NotRecognised(
                f"{self.path} begins with a byte order mark. Save the script without the mark."
            )
        self.newline = "\r\n" if b"\r\n" in self.data else "\n"
        lines = self.data.splitlines(keepends=True)
        self._lines = [line.decode("utf-8") for line in lines]
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT}
        skipped |= {tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
        self._words = [
            (self._place(*word.start), self._place(*word.end), word.string)
            for word in words
            if word.type not in skipped
        ]
        self.parents = {
            child: parent
            for parent in ast.walk(self.tree)
            for child in ast.iter_child_nodes(parent)
        }
        self.imports = dict(_imported(self.tree))
        self._names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        self._names |= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        self._names |= set(self.imports)

    def refuse(self, node: ast.AST | None, why: str) -> NotRecognised:
        """Return the error for a script of a form that is not recognised.

        `why` is a sentence without its full stop; the error adds the line of `node`.
        """
        where = f", line {node.lineno}" if node is not None and hasattr(node, "lineno") else ""
        return NotRecognised(f"{self.path}{where}: {why}. {BY_HAND}")

    def resolved(self, node: ast.AST) -> str:
        """Return the full dotted name of an expression, according to the imports; empty if unknown.

        `nn.Linear` is `torch.nn.Linear` after `from torch import nn`.
        """
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, "")
        if isinstance(node, ast.Attribute) and (before := self.resolved(node.value)):
            return f"{before}.{node.attr}"
        return ""

    def calls(self, within: ast.AST | None = None) -> list[ast.Call]:
        """Return the calls in a node, or in the whole script, in the order of the text."""
        found = [node for node in ast.walk(within or self.tree) if isinstance(node, ast.Call)]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that contains a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that contains a statement."""
        for value in vars(self.parents[statement]).values():
            if isinstance(value, list) and statement in value:
                return value
        raise AssertionError("a statement is in a list of its parent")

    def around(self, node: ast.AST) -> list[ast.AST]:
        """Return the nodes that contain a node, innermost first."""
        found = []
        while node is not self.tree:
            node = self.parents[node]
            found.append(node)
        return found

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the function that contains a node; outside a function, the module."""
        while node is not self.tree:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return node
        return self.tree

    def free_name(self, wanted: str) -> str:
        """Return a name that the script does not use.

        This is `wanted`, with the prefix `holdfast_` if the script uses `wanted` already.
        """
        name = wanted
        while name in self._names:
            name = f"holdfast_{name}"
        self._names.add(name)
        return name

    def text(self, node: ast.expr) -> str:
        """Return the text of an expression as it is in the script."""
        start, end = self._span(node)
        return self.data[start:end].decode("utf-8")

    def replace(self, node: ast.expr, text: str) -> None:
        """Replace an expression by `text`."""
        self._edits.append(_Edit(*self._span(node), text))

    def add_argument(self, call: ast.Call, argument: str) -> None:
        """Add an argument at the end of a call, laid out like the arguments before it."""
        self._added.setdefault(call, []).append(argument)

    def add_parameters(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, names: Sequence[str]
    ) -> None:
        """Add keyword-only parameters after the parameters of a function."""
        parts: list[ast.arg | ast.expr] = [*function.args.args, *function.args.defaults]
        ends = [
            self._starts[node.end_lineno - 1] + node.end_col_offset
            for node in parts
            if node.end_lineno is not None and node.end_col_offset is not None
        ]
        self._edits.append(_Edit(max(ends), max(ends), f", *, {', '.join(names)}"))

    def insert_before(self, statement: ast.stmt, lines: Sequence[str]) -> None:
        """Insert lines before a statement, with the indentation of the statement."""
        at = self._starts[statement.lineno - 1]
        self._edits.append(_Edit(at, at, self._indented(statement, lines)))

    def insert_after(self, statement: ast.stmt, lines: Sequence[str]) -> None:
        """Insert lines after a statement, with the indentation of the statement."""
        assert statement.end_lineno is not None
        at = self._starts[statement.end_lineno]
        text = self._indented(statement, lines)
        if not self.data[:at].endswith((b"\n", b"\r")):  # the script's last line has no newline
            text = self.newline + text.removesuffix(self.newline)
        self._edits.append(_Edit(at, at, text))

    def add_import(self, line: str) -> None:
        """Insert an import after the imports at the start of the script."""
        last = None
        for statement in self.tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                last = statement
            elif isinstance(
                statement, ast.FunctionDef | ast.ClassDef | ast.For | ast.While | ast.With
            ):
                break
        if last is None:
            raise self.refuse(None, "the script imports nothing at its beginning")
        self.insert_after(last, [line])

    def changed(self) -> bytes:
        """Return the bytes of the script after all edits."""
        parts, at = [], 0
        edits = [*self._edits, *(self._arguments(*one) for one in self._added.items())]
        for edit in sorted(edits, key=lambda edit: edit.start):  # stable: ties keep their order
            assert edit.start >= at, "edits do not overlap"
            parts += [self.data[at : edit.start], edit.text.encode("utf-8")]
            at = edit.end
        changed = b"".join([*parts, self.data[at:]])
        ast.parse(changed)  # an edit that breaks the script must never be shown
        return changed

    def _arguments(self, call: ast.Call, added: Sequence[str]) -> _Edit:
        """Return the edit that adds arguments at the end of a call."""
        end = self._span(call)[1] - 1
        last = max((word for word in self._words if word[1] <= end), key=lambda word: word[1])
        assert call.end_lineno is not None
        if last[2] == "(":
            return _Edit(end, end, ", ".join(added))
        comma = "" if last[2] == "," else ","
        if self.data[self._starts[call.end_lineno - 1] : end].strip():
            return _Edit(last[1], last[1], f"{comma} {', '.join(added)}")
        # The closing parenthesis has its own line, so each new argument gets its own line, too.
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        line = self._lines[min(one.lineno for one in given) - 1]
        indent = line[: len(line) - len(line.lstrip())]
        text = "".join(f"{self.newline}{indent}{argument}," for argument in added)
        return _Edit(last[1], last[1], comma + text)

    def _indented(self, statement: ast.stmt, lines: Sequence[str]) -> str:
        start = self._starts[statement.lineno - 1]
        indent = self.data[start : start + statement.col_offset].decode("utf-8")
        if indent.strip():
            raise self.refuse(statement, "the statement shares its line with another one")
        return "".join(f"{indent}{line}{self.newline}" for line in lines)

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _place(self, row: int, column: int) -> int:
        """Convert the row and column of a token, which count characters, to an offset in bytes."""
        if row < 1 or row > len(self._lines):
            return len(self.data)
        return self._starts[row - 1] + len(self._lines[row - 1][:column].encode("utf-8"))


def called_name(call: ast.Call) -> str:
    """Return the last part of a called function's name; empty if the function has no name."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a keyword argument; None if the call does not pass the keyword."""
    return next((one.value for one in call.keywords if one.arg == name), None)


def parameters_of(scope: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of a function's parameters."""
    given = scope.args
    return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def assignments_in(
    within: ast.AST, *, deep: bool = True
) -> Iterator[tuple[str, ast.expr, ast.stmt]]:
    """Yield each assignment to a single name or attribute, as its name, value and statement."""
    nodes = ast.walk(within) if deep else iter(getattr(within, "body", []))
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name | ast.Attribute):
                    yield ast.unparse(target), node.value, node
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield ast.unparse(node.target), node.value, node


def loops_around(script: Script, statement: ast.stmt) -> list[Loop]:
    """Return the loops around a statement within its function, innermost first."""
    loops: list[Loop] = []
    node: ast.AST = statement
    scope = script.scope_of(statement)
    while node is not scope:
        node = script.parents[node]
        if isinstance(node, ast.For | ast.While):
            loops.append(node)
    return loops


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                yield (one.asname, one.name) if one.asname else (one.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"
