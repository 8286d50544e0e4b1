"""Read PyTorch's Flight Recorder dumps, to find ranks that did not join a collective.

A dump is a pickle of lists, dicts, strings and numbers. The pickle is not loaded, since loading a
pickle can run code. Instead, its opcodes are read. Only opcodes for plain values are carried out,
and all others are refused.
"""

import pickletools
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from holdfast.diagnose.logs.files import Reading

_SIZE_LIMIT_BYTES: Final = 64 << 20
_NAME_CHARACTERS: Final = 200
_RANK_IN_NAME = re.compile(r"(\d+)$")
_DONE: Final = "completed"
_MARK: Final = object()

_CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
_VALUES: Final = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
})  # fmt: skip
_CONTAINERS: Final = {"EMPTY_LIST": list, "EMPTY_TUPLE": list, "EMPTY_DICT": dict}
_IGNORED: Final = frozenset({"PROTO", "FRAME", "STOP"})


def read_dump(path: Path) -> dict[str, Any]:
    """Return the dump in `path`.

    Raises:
        ValueError: the file is too large, is damaged, is no dump, or has other values than plain
            ones.
        OSError: the file cannot be read.
    """
    if path.stat().st_size > _SIZE_LIMIT_BYTES:
        raise ValueError(f"larger than {_SIZE_LIMIT_BYTES >> 20} MiB")
    try:
        dump = _plain_value(path.read_bytes())
    except (
        IndexError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        StopIteration,
    ) as error:
        raise ValueError("it is damaged") from error
    if isinstance(dump, dict) and isinstance(dump.get("entries"), list):
        return dump
    raise ValueError("it has no list of entries")


def _plain_value(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, given, _ in pickletools.genops(data):
        name, argument = opcode.name, cast("Any", given)
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _CONTAINERS:
            stack.append(_CONTAINERS[name]())
        elif name.endswith(("PUT", "MEMOIZE")):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[argument])  # a container may contain itself; no code here recurses
        elif name not in _IGNORED:
            _gather(name, stack)
    return stack[-1]


def _gather(name: str, stack: list[Any]) -> None:
    """Carry out an opcode that collects values from the stack into a container.

    Raises:
        ValueError: the opcode does not collect values.
    """
    if name in {"APPEND", "SETITEM"}:
        _into(stack, 1 if name == "APPEND" else 2)
    elif name in {"APPENDS", "SETITEMS"}:
        _into(stack, len(stack) - _mark_of(stack) - 1, marked=True)
    elif name in {"TUPLE1", "TUPLE2", "TUPLE3"}:
        stack[-int(name[-1]) :] = [stack[-int(name[-1]) :]]
    elif name in {"TUPLE", "LIST"}:
        stack[_mark_of(stack) :] = [stack[_mark_of(stack) + 1 :]]
    else:
        raise ValueError("it holds more than plain values")


def _mark_of(stack: list[Any]) -> int:
    return next(index for index in range(len(stack) - 1, -1, -1) if stack[index] is _MARK)


def _into(stack: list[Any], count: int, *, marked: bool = False) -> None:
    """Move the last `count` values of the stack into the list or dict before them."""
    values = stack[len(stack) - count :]
    del stack[len(stack) - count - int(marked) :]
    if isinstance(stack[-1], list):
        stack[-1].extend(values)
    else:
        keys = values[::2]
        if not all(isinstance(key, str | int) for key in keys):
            raise ValueError("it holds more than plain values")
        stack[-1].update(zip(keys, values[1::2], strict=True))


def flight_lines(
    paths: Sequence[Path], reading: Reading
) -> dict[Path, list[tuple[int | None, str]]]:
    """Compare the dumps of one job, and describe each rank in a line for the rules.

    Returns:
        For each dump, the ranks in it, each with a line about the rank.
    """
    last: dict[str, dict[int, tuple[int, str, bool]]] = defaultdict(dict)
    members: dict[str, set[int]] = defaultdict(set)
    path_of: dict[int, Path] = {}
    for path in paths:
        try:
            dump = read_dump(path)
        except (OSError, ValueError) as error:
            reading.notes.append(
                f"{path}: no Flight Recorder dump that can be used ({error}); skipped."
            )
            continue
        rank = _rank_of(path, dump)
        path_of[rank] = path
        for group, names in _groups_of(dump).items():
            members[group] |= names
        for entry in dump["entries"]:
            if isinstance(entry, dict) and not entry.get("is_p2p"):
                group = _group(entry)
                sequence = _whole(entry.get("collective_seq_id"))
                if sequence >= last[group].get(rank, (-1, "", True))[0]:
                    done = entry.get("state") == _DONE or entry.get("retired") is True
                    last[group][rank] = (sequence, _short(entry.get("profiling_name")), done)
    statements: dict[Path, list[tuple[int | None, str]]] = defaultdict(list)
    for group, ranks in sorted(last.items()):
        _behind(group, ranks, members[group] | set(ranks), path_of, statements)
    return dict(statements)


def _behind(
    group: str,
    last: dict[int, tuple[int, str, bool]],
    members: set[int],
    path_of: dict[int, Path],
    statements: dict[Path, list[tuple[int | None, str]]],
) -> None:
    waiting = {rank: one for rank, one in last.items() if not one[2]}
    if not waiting:
        return
    sequence, name, _ = max(waiting.values())
    late = sorted(rank for rank in members if last.get(rank, (0,))[0] < sequence)
    silent = [rank for rank in late if rank not in path_of]
    # If only a few ranks have no dump, they are probably dead. If most have none, their dumps were
    # left out of the input.
    if silent and 3 * len(silent) <= len(members):
        for rank in silent:
            text = (
                f"flight recorder: rank {rank} left no dump, and {len(waiting)} ranks of group {group} wait "
                f"in collective {sequence} ({name})"
            )
            statements[path_of[min(waiting)]].append((rank, text))
        return
    for rank in late if not silent else [rank for rank in late if rank in path_of]:
        reached = last[rank][0] if rank in last else 0
        text = (
            f"flight recorder: rank {rank} did not come to collective {sequence} ({name}) of group {group}, "
            f"where {len(waiting)} ranks wait; its last one is {reached}"
        )
        statements[path_of[rank]].append((rank, text))
    if not late:
        rank = min(waiting)
        text = f"flight recorder: all {len(last)} ranks of group {group} wait in collective {sequence} ({name})"
        statements[path_of[rank]].append((None, text))


def _rank_of(path: Path, dump: dict[str, Any]) -> int:
    given = dump.get("rank")
    if isinstance(given, int):
        return given
    found = _RANK_IN_NAME.search(path.stem if path.suffix in (".pkl", ".pickle") else path.name)
    return int(found[1]) if found else 0


def _groups_of(dump: dict[str, Any]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    config = dump.get("pg_config")
    for key, one in config.items() if isinstance(config, dict) else ():
        ranks = one.get("ranks") if isinstance(one, dict) else None
        if isinstance(ranks, str):
            ranks = [int(each) for each in re.findall(r"\d{1,9}", ranks)]
        if isinstance(ranks, list):
            found[str(key)] = {rank for rank in ranks if isinstance(rank, int)}
    return found


def _group(entry: dict[str, Any]) -> str:
    name = entry.get("process_group") or entry.get("pg_id", "0")
    return _short(name[0] if isinstance(name, list) and name else name)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 63 else 0


def _short(value: Any) -> str:
    return value[:_NAME_CHARACTERS] if isinstance(value, str) else str(_whole(value))
