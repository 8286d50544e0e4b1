import random
import signal
import threading
from datetime import timedelta

import numpy as np
import pytest
import seaweedfs_server
import torch
from waiting import ENDS_S
from writer_bench import Bench

from holdfast.checkpoint.catalog import writer_lease
from holdfast.checkpoint.save import staging_thread
from holdfast.checkpoint.save.engine import Engine
from holdfast.checkpoint.storage import uploader
from holdfast.core import link as link_module
from holdfast.core.link import Unsupervised, set_job_link
from holdfast.testing import FakeClock


class RecordingLink(Unsupervised):
    """Record the calls of a rank, and request a stop at step `stop_at`."""

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
def _no_checkpointer_is_left(monkeypatch):
    """Close the Checkpointers that a test has left open, as the end of a process would."""
    made, make, handler = [], Engine.__init__, signal.getsignal(signal.SIGTERM)

    def record(self, *arguments):
        make(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Engine, "__init__", record)
    yield
    for engine in made:
        engine.close()
    signal.signal(signal.SIGTERM, handler)  # else a later collection restores the handler
    for lease in list(writer_lease._held.values()):
        lease.users = 1
        lease.release()


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_test():
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


@pytest.fixture(scope="module")
def s3_credentials():
    """Set the credentials that every server here accepts in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ACCESS_KEY_ID": "key",
            "SECRET_ACCESS_KEY": "secret",
            "REGION": "us-east-1",
        }.items():
            patch.setenv(f"AWS_{name}", value)
        yield


@pytest.fixture(scope="module")
def s3(s3_credentials, tmp_path_factory):
    """Yield the URL of an S3 server that is used in production."""
    with seaweedfs_server.serve(tmp_path_factory.mktemp("seaweedfs")) as url:
        yield url


@pytest.fixture(scope="module")
def moto(s3_credentials):
    """Yield the URL of a server with a settable clock and failing buckets (`holdfast.testing.s3`)."""
    from holdfast.testing import s3 as server  # absent where GPUs are tested

    with server.serve() as url:
        yield url


@pytest.fixture
def storage_clock(monkeypatch):
    """Return the clock of moto, which dates objects by the second; only a test moves the clock."""
    from moto.s3 import models

    clock, began = FakeClock(), models.utcnow()
    monkeypatch.setattr(models, "utcnow", lambda: began + timedelta(seconds=clock.monotonic_s()))
    return clock


@pytest.fixture
def held(monkeypatch):
    """Return an event: once a test clears it, saves copy nothing until the test sets it."""
    gate, copy_into = threading.Event(), staging_thread.copy_into

    def later(*arguments, **named):
        assert gate.wait(ENDS_S)
        copy_into(*arguments, **named)

    gate.set()
    monkeypatch.setattr(staging_thread, "copy_into", later)
    yield gate
    gate.set()


@pytest.fixture
def bench(tmp_path):
    """Return a function that makes a writer with an arena and a layout; close each at the end."""
    made = []

    def make(**options):
        made.append(Bench(tmp_path / "checkpoints", **options))
        made[-1].folder.mkdir(exist_ok=True)
        return made[-1]

    yield make
    for each in made:
        each.writer.close()


@pytest.fixture
def there(tmp_path):
    """Return a folder that is the object storage."""
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture
def no_pusher_is_left(monkeypatch):
    """End all pushing processes, also those of jobs that have only restored."""
    made, start = [], uploader.Pusher.start

    def record(self):
        made.append(self)
        start(self)

    monkeypatch.setattr(uploader.Pusher, "start", record)
    yield
    for pusher in made:
        pusher._is_needed = False
        if pusher._process is not None:
            pusher._process.kill()
            pusher._process.wait()
