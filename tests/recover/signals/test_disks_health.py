"""The disks' own health, in the form that `smartctl --json` prints."""

import json

import pytest

from holdfast.recover.detectors.node import meaning_of
from holdfast.recover.signals.disks import Disks
from holdfast.recover.signals.facts import CannotSee

NVME = {"name": "/dev/nvme0", "info_name": "/dev/nvme0", "type": "nvme", "protocol": "NVMe"}
DENIED = {
    "smartctl": {
        "messages": [
            {
                "string": "Smartctl open device: /dev/sda failed: Permission denied",
                "severity": "error",
            }
        ],
        "exit_status": 2,
    }
}


@pytest.fixture
def disks(tmp_path):
    """The disks of a host, and a function that sets what `smartctl` prints of each."""
    program = tmp_path / "smartctl"

    def says(scan, **health):
        cases = "\n".join(f"*{name}) echo '{json.dumps(told)}';;" for name, told in health.items())
        scanned = json.dumps({"devices": scan})
        program.write_text(
            f"#!/bin/sh\ncase \"$*\" in *--scan) echo '{scanned}';;\n{cases}\nesac\n"
        )
        program.chmod(0o755)

    return Disks(str(program)), says


def test_a_disk_that_says_that_it_fails_is_a_signal_and_a_good_one_is_not(disks):
    source, says = disks
    log = {"critical_warning": 4, "media_errors": 12, "unsafe_shutdowns": 0}
    says(
        [NVME, {"name": "/dev/sda", "type": "sat"}],
        nvme0={"smart_status": {"passed": False}, "nvme_smart_health_information_log": log},
        sda={"smart_status": {"passed": True}},
    )
    (found,) = source.read()
    assert (found.name, found.where) == ("disk-failing", "/dev/nvme0")
    assert (
        found.text == "/dev/nvme0 reports that it is failing: critical warning 4, media errors 12"
    )
    assert meaning_of(found).weight == "hardware"


def test_a_disk_that_cannot_be_read_hides_itself_alone(disks):
    source, says = disks
    sda = {"name": "/dev/sda", "type": "sat"}
    says([NVME, sda], nvme0={"smart_status": {"passed": True}}, sda=DENIED)
    assert source.read() == []
    says([sda], sda=DENIED)
    with pytest.raises(CannotSee, match=r"/dev/sda: .*Permission denied"):
        source.read()


def test_a_host_without_disks_or_without_the_program_is_not_unhealthy(disks, tmp_path):
    source, says = disks
    says([])
    with pytest.raises(CannotSee, match="finds no disk"):
        source.read()
    with pytest.raises(CannotSee, match="No such file"):
        Disks(str(tmp_path / "none")).read()
