"""Lines of the kernel's log, recorded and made up, and the faults that they report."""

import os
import sys

import pytest

from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.kernel import KernelLog, fault_in

XID_79 = (
    "NVRM: Xid (PCI:0000:4e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)


def record(stamp_s, text):
    return f"6,1042,{round(stamp_s * 1e6)},-;{text}\n"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (XID_79, ("xid-79", "0000:4e:00")),
        ("NVRM: Xid (PCI:0000:07:00): 31, pid=81, name=python, Ch 00000008", ("xid-31", "0000:07:00")),
        ("nvidia-nvswitch2: SXid (PCI:0000:c1:00): 20034, Fatal, Link 30 LTSSM", ("sxid-20034", "0000:c1:00")),
        ("NVRM: GPU 0000:4e:00.0: GPU has fallen off the bus.", ("gpu-lost", "")),
        ("blk_update_request: I/O error, dev sdb, sector 2056 op 0x0:(READ)", ("disk-error", "sdb")),
        ("EXT4-fs error (device nvme0n1p1): ext4_find_entry:1455: inode #2", ("file-system-error", "nvme0n1p1")),
        ("XFS (nvme1n1): Filesystem has been shut down due to log error (0x2).", ("file-system-error", "nvme1n1")),
        ("nvme nvme0: controller is down; will reset: CSTS=0xffffffff", ("disk-lost", "nvme0")),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0", ("machine-check", "")),
        ("{1}[Hardware Error]: event severity: fatal", ("machine-check", "")),
        ("NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 3 timed out", ("nic-stuck", "eth0")),
        ("mlx5_core 0000:5d:00.0: device's health compromised - reached miss count", ("nic-fault", "0000:5d:00.0")),
        ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:812]", ("cpu-lockup", "")),
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0", None),
        ("{1}[Hardware Error]: event severity: corrected", None),
        ("XFS (nvme1n1): Mounting V5 Filesystem", None),
        ("EXT4-fs (sda1): mounted filesystem with ordered data mode", None),
        ("nvme nvme0: 8/0/0 default/read/poll queues", None),
        ("eth0: renamed from veth1f", None),
    ],
)  # fmt: skip
def test_a_line_names_its_fault_and_the_device(line, fault):
    assert fault_in(line) == fault


def test_new_lines_are_counted_and_lines_from_before_the_start_are_left_out(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text(record(99.0, XID_79) + record(100.5, "usb 1-1: new device"))
    source = KernelLog(since_s=100.0, path=log)
    assert source.read() == []
    with log.open("a") as more:
        more.write(record(101.0, XID_79))
        more.write(" SUBSYSTEM=pci\n")
        more.write(record(102.0, XID_79)[:-1])  # the end of the line is not there yet
    (found,) = source.read()
    assert (found.name, found.where, found.count, found.text) == ("xid-79", "0000:4e:00", 1, XID_79)
    with log.open("a") as more:
        more.write("\n")
    (again,) = source.read()
    assert again.count == 2
    assert again.key == found.key


def test_garbage_is_no_fault(tmp_path):
    log = tmp_path / "kmsg"
    log.write_bytes(
        os.urandom(4096) + b"\n6,1,2\n;;;\n" + record(5.0, "NVRM: Xid (PCI:): ,").encode()
    )
    assert KernelLog(since_s=0.0, path=log).read() == []


def journal_of(tmp_path, text, code=0, said=""):
    script = tmp_path / "journalctl.py"
    told = f"import sys; assert sys.argv[1] == '--since=-120s'; print({text!r}); print({said!r}, file=sys.stderr)"
    script.write_text(f"{told}; sys.exit({code})")
    return sys.executable, "-S", str(script)


def test_without_the_device_new_lines_of_the_journal_are_read(tmp_path):
    lines = [f"[   99.000001] n1 kernel: {XID_79}", f"[  101.500000] n1 kernel: {XID_79}"]
    journal = journal_of(tmp_path, "\n".join(lines))
    source = KernelLog(since_s=100.0, path=tmp_path / "none", journal=journal)
    (found,) = source.read()
    assert (found.name, found.count) == ("xid-79", 1)
    assert source.read() == [found]
    journal_of(tmp_path, "\n".join([*lines, f"[  101.500001] n1 kernel: {XID_79}"]))
    assert source.read()[0].count == 2
    assert source.period_s == 30.0


@pytest.mark.parametrize(
    ("text", "code", "said", "why"),
    [
        ("", 1, "No journal files were found.", "ended with code 1: No journal files"),
        (
            "",
            0,
            "Hint: You are currently not seeing messages from other users",
            "not seeing messages",
        ),
    ],
)
def test_a_journal_that_may_not_be_read_is_said_and_no_fault(tmp_path, text, code, said, why):
    journal = journal_of(tmp_path, text, code, said)
    source = KernelLog(since_s=0.0, path=tmp_path / "none", journal=journal)
    with pytest.raises(CannotSee, match=f"none: No such file or directory; .*{why}"):
        source.read()


def test_neither_device_nor_journal_is_said(tmp_path):
    source = KernelLog(since_s=0.0, path=tmp_path / "none", journal=(str(tmp_path / "no"),))
    with pytest.raises(CannotSee, match=r"none: No such file or directory; .*no: No such file"):
        source.read()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg may not be read here")
def test_the_log_of_this_machine_can_be_read():
    assert KernelLog(since_s=1e12).read() == []
