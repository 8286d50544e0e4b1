"""Check that no two public classes of one room share a name."""

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src/holdfast"
ROOMS = sorted(init.parent for init in PACKAGE.glob("*/__init__.py"))


def shared_names(room):
    """Return the names that more than one public class at the top of a room's modules has."""
    classes = Counter(
        node.name
        for file in room.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, count in classes.items() if count > 1)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_class_of_a_room_has_a_name_of_its_own(room):
    assert shared_names(room) == []


def test_shared_names_are_found(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("class Watch: ...\nclass _Own: ...\n")
    (tmp_path / "inner/two.py").write_text("class Watch: ...\nclass _Own: ...\n")
    assert shared_names(tmp_path) == ["Watch"]
