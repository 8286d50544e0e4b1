"""What holds for all tests."""

import importlib.util
import os
import signal
import subprocess

import pytest

# Hypothesis would time each example, and a machine that is busy is no fault.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    settings.register_profile("holdfast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("holdfast")

# A shell starts what goes on in the background, and nohup its command, with Ctrl-C ignored, and children inherit that:
# tests that press it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Where nothing answers, a question to Hugging Face's Hub is asked again for 23 s. Its libraries read this when they
# are imported, by whichever test comes first.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@pytest.fixture
def small_disk(tmp_path, request):
    """A real file system of 3 MiB, or of the size that is the parameter."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small-disk"
    folder.mkdir()
    size = getattr(request, "param", "3m")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def fill():
    """A function that writes a file until its disk is full."""

    def pour(file):
        while True:
            file.write(b"x" * 4096)

    def write(path):
        with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            pour(file)

    return write
