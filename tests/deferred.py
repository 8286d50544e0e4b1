"""Import a framework when a test uses it, since each worker of pytest collects all test files."""

import importlib
from importlib.util import find_spec

import pytest


class Deferred:
    """A module that is imported at the first use of one of its names."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        # pytest looks up private names on each object of a file that it collects.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def needs(package, reason):
    """Return a mark that skips tests without `package`, which is not imported."""
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)
