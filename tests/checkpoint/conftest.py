import random

import numpy as np
import pytest
import torch

from holdfast.core import link as link_module
from holdfast.core.link import Unsupervised, set_job_link


class RecordingLink(Unsupervised):
    """Hears what a rank says; asks it to stop at `stop_at`."""

    def __init__(self, stop_at=None):
        self.events = []
        self.sections = []
        self.left_at = None
        self._stop_at = stop_at

    def emit(self, kind, data):
        self.events.append((kind, dict(data)))

    def section(self, name, *, limit_s=None):
        self.sections.append(name)
        return super().section(name, limit_s=limit_s)

    def stop_due(self, step):
        return self._stop_at is not None and step >= self._stop_at

    def leave(self, step):
        self.left_at = step

    def of(self, kind):
        return [data for name, data in self.events if name == kind]


@pytest.fixture
def link(monkeypatch):
    recording = RecordingLink()
    monkeypatch.setattr(link_module, "_link", recording)
    return recording


@pytest.fixture
def stop_at(monkeypatch):
    def ask(step):
        recording = RecordingLink(stop_at=step)
        set_job_link(recording)
        return recording

    monkeypatch.setattr(link_module, "_link", Unsupervised())
    return ask


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_test():
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
