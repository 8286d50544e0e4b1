"""Record what an integration reports to a supervisor."""

from contextlib import contextmanager

from holdfast.core import link as link_module
from holdfast.core.link import Unsupervised


class Supervised(Unsupervised):
    """Record the reports in order."""

    def __init__(self):
        self.reported = []

    def watch(self):
        self.reported.append("watch")

    def take_back_sigterm(self, replaced):
        self.reported.append("take back")

    def step(self, step, loss, metrics):
        self.reported.append((step, None if loss is None else float(loss), dict(metrics)))

    @contextmanager
    def section(self, name, *, limit_s=None):
        if name in ("save", "restore"):  # reported by the Checkpointer
            yield
            return
        self.reported.append(f"enter {name}")
        yield
        self.reported.append(f"leave {name}")

    @property
    def steps(self):
        return [each for each in self.reported if isinstance(each, tuple)]

    def order(self):
        return [each if isinstance(each, str) else each[0] for each in self.reported]


def supervised(monkeypatch):
    """Let the process have a supervisor, and return the link that records the reports."""
    link = Supervised()
    monkeypatch.setattr(link_module, "_link", link)
    return link
