"""Keep lm-eval's index of thousands of YAML files on disk, so that it is built only once.

lm-eval itself reads all these files in every process, which takes 6 s and more. This module keeps
the name, kind, file and tags of each entry as JSON in the user's cache folder. The name of the JSON
file includes lm-eval's version, and a digest of the paths, sizes and modification times of all YAML
files. So another version or an edited file leads to a new index.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind, TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml

from holdfast.core.atomic import write_atomic
from holdfast.core.errors import BadUse, NotFound
from holdfast.evaluate.types.suite import nearest

DEFAULT_TASKS = Path(lm_eval.tasks.__file__).parent


class Catalog:
    """Index the tasks of `include_paths`, and lm-eval's own tasks when they are first needed.

    A name in a later folder overrides the same name in an earlier folder.
    """

    def __init__(self, include_paths: Sequence[str] = (), *, cache: Path | None = None) -> None:
        self._cache = cache_folder() if cache is None else cache
        self._index: dict[str, Entry] = {}
        self._has_defaults = False
        self._folders: set[str] = set()
        self.include(include_paths)

    def include(self, folders: Iterable[str]) -> None:
        """Add folders of tasks to the index.

        Raises:
            NotFound: a folder does not exist.
        """
        for folder in folders:
            if folder in self._folders:
                continue
            if not Path(folder).is_dir():
                raise NotFound(
                    f"There is no folder {folder} to include tasks from. Correct include_paths."
                )
            self._folders.add(folder)
            self._index |= TaskIndex.build([Path(folder)])

    def check(self, name: str) -> None:
        """Check that a task, group, tag or YAML file exists, and all tasks that belong to it.

        Raises:
            BadUse: the name does not exist; the message suggests similar names.
        """
        if not self._has_defaults and any(part not in self._index for part in self._parts(name)):
            self._index = _default_index(self._cache) | self._index
            self._has_defaults = True
        if name not in self._index and not (
            name.endswith((".yaml", ".yml")) and Path(name).is_file()
        ):
            raise BadUse(
                f"lm-eval has no task, group or tag {name!r}.{nearest(name, self._index, 3)} "
                "`lm-eval ls tasks` lists what it has; include_paths adds folders of your own."
            )

    def runs_code(self, name: str) -> bool:
        """Return True if any task of this name declares that it runs the model's code.

        The name may be of a task, a group or a tag.
        """
        entries = [self._index[part] for part in self._parts(name) if part in self._index]
        files = [
            entry.yaml_path for entry in entries if entry.kind is Kind.TASK and entry.yaml_path
        ]
        return any(load_yaml(path, resolve_func=False).get("unsafe_code") for path in files)

    def manager(
        self, metadata: dict[str, Any], on_load: Callable[[Any], None]
    ) -> "PreparedManager":
        """Create a task manager of lm-eval that uses this index."""
        return PreparedManager(self._index, metadata, on_load)

    def _parts(self, name: str, seen: set[str] | None = None) -> Iterator[str]:
        """Yield a name, and the names of all known tasks and groups that belong to it."""
        seen = set() if seen is None else seen
        if name in seen:
            return
        seen.add(name)
        yield name
        entry = self._index.get(name)
        if entry is None:
            return
        members: list[Any] = sorted(entry.tags) if entry.kind is Kind.TAG else []
        if entry.kind is Kind.GROUP and entry.yaml_path:
            stated = load_yaml(entry.yaml_path, resolve_func=False).get("task") or []
            members = stated if isinstance(stated, list) else [stated]
        for member in members:
            if isinstance(member, str):
                yield from self._parts(member, seen)
            elif (
                isinstance(member, dict)
                and isinstance(inner := member.get("task"), str)
                and len(member) == 1
            ):
                yield from self._parts(inner, seen)


class PreparedManager(TaskManager):  # type: ignore[misc]
    """Load tasks like lm-eval's `TaskManager`, but with an existing index.

    `on_load` is called with the loaded tasks.
    """

    def __init__(
        self, index: dict[str, Entry], metadata: dict[str, Any], on_load: Callable[[Any], None]
    ) -> None:
        super().__init__(include_defaults=False, metadata=metadata)
        self._index, self._on_load = dict(index), on_load

    def load(self, task_list: Any) -> Any:
        """See lm-eval's `TaskManager.load`."""
        loaded = super().load(task_list)
        self._on_load(loaded)
        return loaded


def cache_folder() -> Path:
    """Return the user's cache folder, which all evaluations share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast"


def _default_index(cache: Path) -> dict[str, Entry]:
    """Return the index of lm-eval's own tasks, from the cache or by reading them."""
    path = cache / f"lm-eval-{version('lm_eval')}-{_state_of(DEFAULT_TASKS)}.json"
    try:
        rows = json.loads(path.read_bytes())
        return {
            name: Entry(
                name=name,
                kind=Kind[kind],
                yaml_path=DEFAULT_TASKS / file if file else None,
                tags=set(tags),
            )
            for name, kind, file, tags in rows
        }
    except (OSError, ValueError, KeyError, TypeError):  # no valid cache: make it again
        pass
    index: dict[str, Entry] = TaskIndex.build([DEFAULT_TASKS])
    rows = [
        (
            name,
            entry.kind.name,
            str(entry.yaml_path.relative_to(DEFAULT_TASKS)) if entry.yaml_path else "",
            [*entry.tags],
        )
        for name, entry in index.items()
    ]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(rows).encode())
    except OSError:  # an unwritable home only costs time
        pass
    return index


def _state_of(folder: Path) -> str:
    """Return a digest of the path, size and modification time of every YAML file below a folder."""
    digest = hashlib.blake2b(digest_size=8)
    for line in sorted(_files(str(folder), "")):
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _files(folder: str, below: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, f"{below}{entry.name}/")
            elif entry.name.endswith(".yaml"):
                stat = entry.stat()
                yield f"{below}{entry.name} {stat.st_size} {stat.st_mtime_ns}\n"
