"""What is said of a save that failed."""

import errno
import os

import pytest
from images import order_of

from holdfast.checkpoint.failures import explain

MORE_THAN_THERE_IS = 1 << 60


@pytest.mark.parametrize(
    "error", [TimeoutError("the other ranks were not through after 5 s"), OSError(errno.EIO, "broke")]
)
def test_what_has_another_reason_is_not_said_to_be_a_full_disk(tmp_path, error):
    told = explain(order_of(tmp_path, 1), MORE_THAN_THERE_IS, error)
    assert str(error) in told
    assert "full" not in told


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_as_one(tmp_path, code):
    told = explain(order_of(tmp_path, 1), 1, OSError(code, os.strerror(code)))
    assert f"Step 1 was not saved: {tmp_path} is full: about 1 bytes are needed" in told
