"""Links, file systems, memory, clock, planned shutdowns: from prepared trees and this machine."""

import pytest

from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.host import Clocks, FileSystems, Memory, Shutdown
from holdfast.recover.signals.links import Links

MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 {root}
23 22 0:21 / /proc rw,nosuid - proc proc rw
24 22 259:2 / /data rw,relatime - xfs /dev/nvme1n1 {data}
25 22 0:40 / /shared rw - nfs4 server:/x rw
26 22 7:0 / /snap ro - ext4 /dev/loop0 ro
garbage
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def link(root, name, state="up", errors=0, physical=True):
    folder = root / "net" / name
    write(folder / "operstate", state)
    write(folder / "statistics/rx_errors", errors)
    write(folder / "carrier_down_count", 0)
    if physical:
        (folder / "device").mkdir(exist_ok=True)
    return folder


def port(root, state="4: ACTIVE", symbols=0):
    folder = root / "infiniband" / "mlx5_0" / "ports" / "1"
    write(folder / "state", state)
    write(folder / "counters/symbol_error", symbols)
    write(folder / "counters/link_downed", 0)
    return folder


def names(facts):
    return [(fact.name, fact.where) for fact in facts]


def test_a_link_that_goes_down_is_a_signal_and_one_that_never_was_up_is_none(tmp_path):
    link(tmp_path, "eth0")
    link(tmp_path, "eth1", state="down")
    link(tmp_path, "veth7", physical=False)
    port(tmp_path)
    links = Links(tmp_path)
    assert links.read() == []
    link(tmp_path, "eth0", state="down")
    link(tmp_path, "veth7", state="down", physical=False)
    port(tmp_path, state="1: DOWN")
    assert names(links.read()) == [("link-down", "eth0"), ("link-down", "mlx5_0 port 1")]
    link(tmp_path, "eth0")
    port(tmp_path)
    assert links.read() == []


def test_errors_since_the_start_count_at_each_doubling(tmp_path):
    link(tmp_path, "eth0", errors=1_000_000)
    port(tmp_path, symbols=5)
    links = Links(tmp_path)
    assert links.read() == []
    link(tmp_path, "eth0", errors=1_000_099)
    assert links.read() == []
    link(tmp_path, "eth0", errors=1_000_150)
    (first,) = links.read()
    link(tmp_path, "eth0", errors=1_000_199)
    assert links.read() == [first]
    port(tmp_path, symbols=905)
    ethernet, infiniband = links.read()
    assert (ethernet, infiniband.count) == (first, 800)
    write(tmp_path / "net/eth0/carrier_down_count", 2)
    assert ("link-flapped", "eth0") in names(links.read())


def test_counters_that_cannot_be_read_are_no_errors(tmp_path):
    folder = link(tmp_path, "eth0")
    links = Links(tmp_path)
    links.read()
    write(folder / "statistics/rx_errors", "garbage")
    (folder / "statistics/tx_errors").mkdir()
    assert links.read() == []
    with pytest.raises(CannotSee):
        Links(tmp_path / "none").read()


def test_a_file_system_that_becomes_read_only_or_full_is_a_signal(tmp_path):
    mounts, free = tmp_path / "mountinfo", {"/": 10**12, "/data": 10**12}
    mounts.write_text(MOUNTS.format(root="rw,errors=remount-ro", data="rw"))
    disks = FileSystems(mounts, free=lambda point: (free[point], 10**13))
    assert disks.read() == []
    mounts.write_text(MOUNTS.format(root="ro,errors=remount-ro", data="rw"))
    free["/data"] = 10**9
    assert sorted(names(disks.read())) == [("disk-full", "/data"), ("disk-read-only", "/")]
    mounts.write_text(MOUNTS.format(root="rw", data="rw"))
    free["/data"] = 10**12
    assert disks.read() == []
    with pytest.raises(CannotSee):
        FileSystems(tmp_path / "none").read()


def test_kills_and_uncorrectable_errors_of_the_memory_count_from_the_start(tmp_path):
    vmstat, errors = tmp_path / "vmstat", tmp_path / "mc" / "mc0" / "ue_count"
    write(vmstat, "nr_free_pages 12\noom_kill 3")
    write(errors, 1)
    memory = Memory(vmstat, tmp_path / "mc")
    assert memory.read() == []
    write(vmstat, "nr_free_pages 12\noom_kill 5")
    write(errors, 2)
    kill, error = memory.read()
    assert (kill.name, kill.count, error.name, error.where) == (
        "oom-kill",
        2,
        "memory-uncorrectable",
        "mc0",
    )
    write(errors, "garbage")
    assert memory.read() == [kill]
    with pytest.raises(CannotSee):
        Memory(tmp_path / "none").read()


def test_a_clock_that_jumps_or_loses_its_server_is_a_signal_and_a_suspended_machine_is_none():
    now = {"wall": 1000.0, "running": 10.0, "status": 0x40}
    clocks = Clocks(lambda: now["wall"], lambda: now["running"], lambda: now["status"])
    assert clocks.read() == []  # it was never synchronised
    now |= {"wall": 4600.0, "running": 3610.5, "status": 0}
    assert clocks.read() == []
    now |= {"wall": 4500.0}
    (jump,) = clocks.read()
    assert (jump.name, jump.text) == ("clock-jump", "the clock jumped by -100.0 s")
    now |= {"status": 0x40 | 0x2000}
    assert names(clocks.read()) == [("clock-jump", ""), ("clock-unsynchronised", "")]
    now |= {"status": None}
    assert clocks.read() == [jump]


def test_a_planned_shutdown_is_a_notice_with_its_moment(tmp_path):
    path = tmp_path / "scheduled"
    shutdown = Shutdown(path)
    assert shutdown.read() == []
    path.write_text("USEC=1700000060000000\nWARN_WALL=1\nMODE=reboot\nWALL_MESSAGE=kernel update\n")
    (notice,) = shutdown.read()
    assert (notice.kind, notice.text, notice.until_s) == (
        "maintenance",
        "reboot is planned",
        1_700_000_060.0,
    )
    assert notice.to_json(1_700_000_000.0)["left_s"] == 60.0
    path.write_text("USEC=\n")
    with pytest.raises(CannotSee, match="has no valid time"):
        shutdown.read()


@pytest.mark.parametrize("source", [Links(), FileSystems(), Memory(), Clocks(), Shutdown()])
def test_this_machine_can_be_read(source):
    for fact in source.read():
        assert fact.name == "disk-full"
