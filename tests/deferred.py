"""Import a framework when a test uses it, since each worker of pytest collects all test files."""

import gc
import importlib
import sys
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
        if self._name not in sys.modules:
            importlib.import_module(self._name)
            # A framework has a million objects for good. Each later collection, such as the one at
            # the end of each training with transformers, would look for cycles among them.
            gc.freeze()
        return getattr(sys.modules[self._name], name)


def needs(package, reason):
    """Return a mark that skips tests without `package`, which is not imported."""
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)
