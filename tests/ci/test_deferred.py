"""Test that collecting tests does not import what `deferred` names."""

import sys

from deferred import Deferred, needs

NAME = "framework_that_one_test_uses"


def test_a_module_is_imported_at_the_first_use_and_not_by_collecting(tmp_path, monkeypatch):
    (tmp_path / f"{NAME}.py").write_text("STEPS = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = Deferred(NAME)
    for looked_up_by_pytest in ("__test__", "_pytestfixturefunction", "__name__"):
        assert not hasattr(module, looked_up_by_pytest)
    assert NAME not in sys.modules
    assert module.STEPS == 3
    assert sys.modules.pop(NAME).STEPS == 3


def test_tests_are_skipped_without_their_package():
    assert needs(NAME, "absent").args == (True,)
    assert needs("pytest", "present").args == (False,)
