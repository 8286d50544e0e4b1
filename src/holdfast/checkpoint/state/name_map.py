r"""Map the names of a checkpoint's tensors to the names of a model's tensors.

If the checkpoint has the model's own names after a prefix (such as `model.` or `module.`), no name
map is needed, because the prefix is found automatically. The parts that torch.compile, FSDP and
activation checkpointing insert (such as `_orig_mod`) are ignored. In all other cases, the user
writes a name map, which is a TOML file. Names in the map are written without the prefix:

    prefix = "model."                      # the prefix of the model's tensors; found if left out
    drop = ["rope.frequencies"]            # tensors that are not needed
    transposed = ["layers.{n}.up.weight"]  # two-dimensional tensors that were stored transposed

    [names]                                # saved name = model name; {anything} matches one part
    "tokens.weight" = "model.embed_tokens.weight"
    "layers.{n}.up.weight" = "model.layers.{n}.mlp.up_proj.weight"

    [patterns]                             # RE2 regular expressions that match whole names
    'blocks\.(\d+)\.(.*)' = 'model.layers.\1.\2'

Rules are tried in this order, and the first that matches applies: exact names, names with
placeholders, patterns. A name that no rule matches is unchanged. Tensors that the model ties (for
example, if the output layer is the embedding) are written once, and their saved values must be
equal.
"""

import difflib
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import re2

from holdfast.core.errors import BadUse

Shape = tuple[int, ...]
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The name parts that torch.compile, FSDP and activation checkpointing insert."""
_USUAL_PREFIX_PARTS = {"model", "module", "state_dict", "app", *WRAPPERS}
_OTHER_STATE = ("optim", "holdfast.", "scheduler", "lr_scheduler")
"""The prefixes of other saved entries, such as optimizers, beside a model without a prefix."""
_DEEPEST_PREFIX = 4
_ENTRIES: dict[str, tuple[type, str]] = {
    "prefix": (str, "a text"),
    "drop": (list, "a list of names"),
    "transposed": (list, "a list of names"),
    "names": (dict, "a table of names"),
    "patterns": (dict, "a table of names"),
}
_SHOWN = 5
_GROUP = re.compile(r"\\(\d+)")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """Match one tensor of the model with the saved tensor to read for it.

    Attributes:
        saved: the name in the checkpoint.
        name: the name in the model.
        transposed: whether the tensor was stored transposed.
        tied: whether the model ties this tensor to one that is written under another name. The
            saved tensor is then only compared.
    """

    saved: str
    name: str
    transposed: bool = False
    tied: bool = False


class NameMap:
    """Map saved tensor names to new names, by the rules of a name map.

    Raises:
        BadUse: the name map is not valid; the message names the entry.
    """

    def __init__(self, text: str | Mapping[str, Any] = "", *, where: str = "the name map") -> None:
        try:
            content = tomllib.loads(text) if isinstance(text, str) else text
        except tomllib.TOMLDecodeError as error:
            raise BadUse(f"{where} is not a TOML file: {error}. Correct it.") from error
        for key, value in content.items():
            if key not in _ENTRIES:
                raise BadUse(f"{where} has an entry {key!r}. It may have: {', '.join(_ENTRIES)}.")
            kind, description = _ENTRIES[key]
            if not isinstance(value, kind) or not all(
                isinstance(each, str) for each in _inside(value)
            ):
                raise BadUse(f"{key} of {where} is {value!r}. It must be {description}.")
        self.where = where
        self.prefix: str | None = content.get("prefix")
        if self.prefix is not None:
            self.prefix = without_wrapper_parts(self.prefix)
        names: dict[str, str] = {}
        for old, new in content.get("names", {}).items():
            if names.setdefault(without_wrapper_parts(old), new) != new:
                raise BadUse(
                    f"Two entries of {where} are equal without wrapper parts: {old!r}. Leave "
                    "one of them out."
                )
        self._exact = {old: new for old, new in names.items() if not _PLACEHOLDER.search(old)}
        self._rules = [
            (old, *self._placeholders(old, new))
            for old, new in names.items()
            if _PLACEHOLDER.search(old)
        ]
        self._patterns = [
            (old, *self._pattern(old, new)) for old, new in content.get("patterns", {}).items()
        ]
        dropped, turned = (
            map(without_wrapper_parts, content.get(key, [])) for key in ("drop", "transposed")
        )
        self._drop = [(old, self._placeholders(old, "")[0]) for old in dropped]
        self._transposed = [(old, self._placeholders(old, "")[0]) for old in turned]
        self.used: Counter[str] = Counter()

    def new_name(self, old: str) -> str | None:
        """Return the model's name of a saved tensor; None if the map drops the tensor.

        Raises:
            BadUse: two rules of the same kind give the tensor different names.
        """
        for rule, pattern in self._drop:
            if pattern.fullmatch(old):
                self.used[rule] += 1
                return None
        if old in self._exact:
            self.used[old] += 1
            return self._exact[old]
        for rules in (self._rules, self._patterns):
            found = [
                (rule, _filled(new, match))
                for rule, pattern, new in rules
                if (match := pattern.fullmatch(old))
            ]
            if len({new for _, new in found}) > 1:
                matches = " and ".join(f"{rule!r} ({new})" for rule, new in found[:2])
                raise BadUse(
                    f"Two entries of {self.where} fit {old!r}: {matches}. Make one of them more exact."
                )
            if found:
                self.used.update(rule for rule, _ in found)
                return str(found[0][1])
        return old

    def is_transposed(self, old: str) -> bool:
        """Return True if the name map lists the tensor under `transposed`."""
        found = [rule for rule, pattern in self._transposed if pattern.fullmatch(old)]
        self.used.update(found)
        return bool(found)

    def unused(self) -> list[str]:
        """Return the rules that have not matched any name so far."""
        found = [rule for rule, _, _ in (*self._rules, *self._patterns)]
        rules = [*self._exact, *found, *(rule for rule, _ in (*self._drop, *self._transposed))]
        return [rule for rule in rules if not self.used[rule]]

    def _placeholders(self, old: str, new: str) -> tuple[Any, list[str | int]]:
        """Compile a rule for names with placeholders.

        Returns:
            The pattern of the old name, and the new name in pieces. A piece is a text, or the
            number of the group whose match is inserted there.
        """
        numbers: dict[str, int] = {}
        pattern = ""
        for index, piece in enumerate(_PLACEHOLDER.split(old)):
            if index % 2 == 0:
                pattern += re2.escape(piece)
            elif piece in numbers:
                raise BadUse(
                    f"{old!r} of {self.where} has {{{piece}}} twice. Give the second another name."
                )
            else:
                numbers[piece] = len(numbers) + 1
                pattern += r"([^.]+)"
        for name in _PLACEHOLDER.findall(new):
            if name not in numbers:
                raise BadUse(
                    f"{new!r} of {self.where} has {{{name}}}, which {old!r} does not have. Correct it."
                )
        pieces = enumerate(_PLACEHOLDER.split(new))
        return self._compiled(pattern), [
            numbers[piece] if index % 2 else piece for index, piece in pieces
        ]

    def _pattern(self, old: str, new: str) -> tuple[Any, list[str | int]]:
        pattern = self._compiled(old)
        pieces: list[str | int] = [
            int(each) if index % 2 else each for index, each in enumerate(_GROUP.split(new))
        ]
        for group in pieces[1::2]:
            if isinstance(group, int) and group > pattern.groups:
                raise BadUse(
                    f"{new!r} of {self.where} refers to a group {group}, and {old!r} has "
                    f"{pattern.groups}. Correct it."
                )
        return pattern, pieces

    def _compiled(self, pattern: str) -> Any:
        try:
            return re2.compile(pattern, _quiet())
        except re2.error as error:
            reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error
            raise BadUse(
                f"{pattern!r} of {self.where} is not an RE2 pattern: {reason}. Correct it."
            ) from error


def settle(
    saved: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    ties: Iterable[Sequence[str]] = (),
    name_map: NameMap | None = None,
    *,
    checkpoint: str = "the checkpoint",
) -> list[PlannedTensor]:
    """Find a saved tensor for each tensor of a model.

    Args:
        saved: the shapes of all tensors of the checkpoint, by name.
        expected: the shapes of the model's tensors, by name; a tied tensor appears under each of
            its names.
        ties: groups of names that are the same tensor of the model. The first name of a group is
            the one to write.
        name_map: the rules for names that differ.
        checkpoint: the name of the checkpoint for error messages.

    Returns:
        The matched tensors, in the model's order.

    Raises:
        BadUse: a tensor is missing, unexpected, ambiguous, or has another shape; the message names
            the tensor.
    """
    name_map = name_map or NameMap()
    kept = {name: group[0] for group in ties for name in group}
    prefix = name_map.prefix
    if prefix is None:
        prefix = _find_prefix(saved, expected, kept, name_map, checkpoint)
    found: dict[str, str] = {}
    transposed: set[str] = set()
    for full in saved:
        if not (name := without_wrapper_parts(full)).startswith(prefix):
            continue
        old = name.removeprefix(prefix)
        if not prefix and old.startswith(_OTHER_STATE):
            continue
        if (new := name_map.new_name(old)) is None:
            continue
        if new in found:
            raise BadUse(
                f"Both {found[new]!r} and {full!r} of {checkpoint} become {new!r}. Name one under "
                "`drop`."
            )
        found[new] = full
        if name_map.is_transposed(old):
            transposed.add(full)
    _check_complete(found, expected, kept, prefix, checkpoint)
    _check_shapes(found, saved, expected, transposed)
    if unused := name_map.unused():
        names = [
            without_wrapper_parts(name).removeprefix(prefix)
            for name in saved
            if name.startswith(prefix)
        ]
        raise BadUse(
            f"{name_map.where} names tensors that are not in {checkpoint}: "
            f"{_listed(unused, names)}."
        )
    plan = []
    written: set[str] = set()
    for name in expected:
        if name in found:
            target = kept.get(name, name)
            tied = target in written
            written.add(target)
            plan.append(
                PlannedTensor(
                    saved=found[name], name=target, transposed=found[name] in transposed, tied=tied
                )
            )
    return plan


def _find_prefix(
    saved: Collection[str],
    expected: Collection[str],
    kept: Mapping[str, str],
    name_map: NameMap,
    checkpoint: str,
) -> str:
    """Return the prefix of saved names after which most of the model's tensors are found."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in {without_wrapper_parts(name) for name in saved}:
        parts = name.split(".")
        for depth in range(min(_DEEPEST_PREFIX, len(parts) - 1) + 1):
            new = name_map.new_name(".".join(parts[depth:]))
            if new is not None and new in expected:
                found["".join(f"{part}." for part in parts[:depth])].add(kept.get(new, new))
    name_map.used.clear()
    if not found:
        names = [name for name in saved if not name.startswith(_OTHER_STATE)]
        raise BadUse(
            f"None of the {len(saved)} tensors of {checkpoint} has a name of the model's "
            f"({_few(names)} against {_few(expected)}). Give a name map, or the configuration "
            "that fits."
        )
    best = max(map(len, found.values()))
    candidates = [prefix for prefix, tensors in found.items() if len(tensors) == best]
    usual = [prefix for prefix in candidates if set(prefix.split(".")[:-1]) <= _USUAL_PREFIX_PARTS]
    if len(candidates) > 1 and len(usual) != 1:
        raise BadUse(
            f"{checkpoint} holds several models: after "
            f"{' and after '.join(map(repr, sorted(candidates)))}. Choose one by `prefix` "
            "in a name map."
        )
    return (usual or candidates)[0] if len(candidates) > 1 else candidates[0]


def _check_complete(
    found: Mapping[str, str],
    expected: Collection[str],
    kept: Mapping[str, str],
    prefix: str,
    checkpoint: str,
) -> None:
    there = {kept.get(name, name) for name in found}
    missing = [name for name in expected if kept.get(name, name) not in there]
    unexpected = [name for name in found if name not in expected]
    if missing:
        others = unexpected or [name for name in found if name in expected]
        raise BadUse(
            f"{checkpoint} lacks {len(missing)} of the model's {len(expected)} tensors (looked "
            f"for after {prefix!r}): {_listed(missing, others)}. Give a name map, or the "
            "configuration that fits."
        )
    if unexpected:
        raise BadUse(
            f"{checkpoint} has {len(unexpected)} tensors that the model does not have: "
            f"{_listed(unexpected, expected)}. Name them in a name map: under [names] to rename "
            "them, under `drop` to leave them out."
        )


def _check_shapes(
    found: Mapping[str, str],
    saved: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    transposed: Collection[str],
) -> None:
    for name, full in found.items():
        shape, wanted = saved[full], expected[name]
        if full in transposed:
            if len(shape) != 2:
                raise BadUse(
                    f"{full!r} has {len(shape)} dimensions and cannot be transposed. Correct the "
                    "name map."
                )
            shape = shape[::-1]
        if shape != wanted:
            hint = (
                "It fits when transposed: name it under `transposed` in a name map"
                if len(shape) == 2 and shape[::-1] == wanted
                else "Give the configuration that the model was trained with"
            )
            raise BadUse(
                f"{full!r} has the shape {_shape(saved[full])}, the model's {name!r} "
                f"{_shape(wanted)}. {hint}."
            )


def _filled(pieces: Iterable[str | int], match: Any) -> str:
    """Join the pieces of a new name, and insert the text that each numbered group matched."""
    return "".join(
        piece if isinstance(piece, str) else match.group(piece) or "" for piece in pieces
    )


def without_wrapper_parts(name: str) -> str:
    """Return a name without the parts in `WRAPPERS`, which wrappers such as FSDP insert."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _listed(names: Sequence[str], others: Collection[str]) -> str:
    """List the first names, each with the most similar name in `others`, for an error message."""
    shown = []
    for name in names[:_SHOWN]:
        near = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
        shown.append(f"{name!r} (nearest: {near[0]!r})" if near else repr(name))
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _few(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in list(names)[:2])


def _shape(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _inside(value: Any) -> Iterable[Any]:
    return (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    )


def _quiet() -> Any:
    options = re2.Options()
    options.log_errors = False
    return options


def read_name_map(path: Path | None) -> NameMap:
    """Read the name map in a file; return an empty map if `path` is None.

    Raises:
        BadUse: the file cannot be read, or is not a valid name map.
    """
    if path is None:
        return NameMap()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadUse(f"The name map {path} cannot be read ({error}). Give a TOML file.") from error
    return NameMap(text, where=str(path))
