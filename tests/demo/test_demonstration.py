"""The folder of a demonstration, which one demonstration at a time may make anew."""

import fcntl

import pytest

from holdfast.core.errors import BadUse
from holdfast.demo.demonstration import MARKER, Demonstration


def test_a_demonstration_that_still_runs_keeps_its_folder(tmp_path):
    kept = tmp_path / "holdfast" / "ledger"
    kept.parent.mkdir()
    kept.touch()
    with (tmp_path / MARKER).open("a") as running:
        fcntl.flock(running, fcntl.LOCK_EX)
        with pytest.raises(BadUse, match=r"Another demonstration runs in .* Wait for its end"):
            Demonstration(out=tmp_path).run(lambda *_event: None)
    assert kept.exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadUse, match=r"cannot be written: .* Give another folder with --out"):
        Demonstration(out=tmp_path / "file" / "out").run(lambda *_event: None)
