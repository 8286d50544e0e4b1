"""Read the host's CPUs, memory, disks, network and ranks' processes from /proc and /sys."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from holdfast.profile.metrics import HOST
from holdfast.profile.recording import SeriesId
from holdfast.profile.sources.source import CannotRead, Rates, plausible

SECTOR_BYTES: Final = 512
"""Bytes per sector in /proc/diskstats, for every device.

Source: Linux, Documentation/admin-guide/iostats.rst.
"""
INFINIBAND_WORD_BYTES: Final = 4
"""Bytes per unit of `port_rcv_data` and `port_xmit_data` (InfiniBand 1.4, PortCounters)."""
_TICKS_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_PARTS_AND_STACKS: Final = re.compile(r"^(loop|ram|dm-|md|zram|sr)|^(sd|hd|vd|xvd)[a-z]+\d+$|p\d+$")
"""Names of partitions and stacked block devices, whose bytes another device counts already."""


class Host:
    """The counters of this host, and of the ranks' processes on it."""

    name = HOST

    def __init__(
        self, *, interval_s: float = 1.0, proc: Path = Path("/proc"), sys: Path = Path("/sys")
    ) -> None:
        """Store where to read the counters.

        Args:
            interval_s: seconds between two reads.
            proc: the folder where procfs is mounted.
            sys: the folder where sysfs is mounted.
        """
        self._interval_s = interval_s
        self._proc = proc
        self._sys = sys
        self._rates = Rates()
        self._cpu: tuple[int, int] | None = None
        self.pids: Mapping[int, int] = {}
        """The process id of each rank on this node, by rank."""

    def read(self, now_ns: int) -> dict[SeriesId, float]:
        """See `Source.read`."""
        try:
            return plausible(
                (SeriesId(metric, HOST, rank=rank, interval_s=self._interval_s), value)
                for metric, rank, value in self._all(now_ns)
            )
        except OSError as error:
            raise CannotRead(f"{error.filename}: {error.strerror}") from error
        except (ValueError, LookupError) as error:  # other kernels may use other formats
            raise CannotRead(f"/proc has an unknown form: {error!r}") from error

    def close(self) -> None:
        """See `Source.close`."""

    def _all(self, now_ns: int) -> Iterator[tuple[str, int | None, float | None]]:
        yield "cpu_utilization", None, self._cpu_share()
        total_bytes, available_bytes = self._memory()
        yield "host_memory_total", None, total_bytes
        yield "host_memory_used", None, total_bytes - available_bytes
        totals = {
            **dict(zip(("disk_read", "disk_write"), self._disks(), strict=True)),
            **dict(zip(("network_rx", "network_tx"), self._network(), strict=True)),
            **self._infiniband(),
        }
        for metric, bytes_ in totals.items():
            yield metric, None, self._rates.of(self._id(metric), now_ns, bytes_)
        for rank, pid in self.pids.items():
            used = self._process(pid)
            if used is not None:
                cpu_s, resident_bytes = used
                yield "process_memory", rank, resident_bytes
                share = self._rates.of(self._id("process_cpu", rank), now_ns, cpu_s)
                yield "process_cpu", rank, None if share is None else 100 * share
        mine = os.times()
        yield "sampler_cpu", None, mine.user + mine.system

    def _id(self, metric: str, rank: int | None = None) -> SeriesId:
        return SeriesId(metric, HOST, rank=rank, interval_s=self._interval_s)

    def _cpu_share(self) -> float | None:
        """Return the busy share of all CPUs since the previous call, in percent.

        Guest time is not added, because the kernel already includes it in `user`.
        """
        line = (self._proc / "stat").read_text().split("\n", 1)[0]
        ticks = [int(word) for word in line.split()[1:9]]
        now = sum(ticks), ticks[3] + ticks[4]  # idle and iowait
        before, self._cpu = self._cpu, now
        if before is None or now[0] <= before[0]:
            return None
        return 100 * (1 - (now[1] - before[1]) / (now[0] - before[0]))

    def _memory(self) -> tuple[int, int]:
        fields = {}
        for line in (self._proc / "meminfo").read_text().splitlines()[:8]:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
        return fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])

    def _disks(self) -> tuple[int, int]:
        read = written = 0
        for line in (self._proc / "diskstats").read_text().splitlines():
            words = line.split()
            if len(words) >= 10 and not _PARTS_AND_STACKS.search(words[2]):
                read += int(words[5]) * SECTOR_BYTES
                written += int(words[9]) * SECTOR_BYTES
        return read, written

    def _network(self) -> tuple[int, int]:
        received = sent = 0
        for line in (self._proc / "net" / "dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            words = rest.split()
            if name.strip() != "lo" and len(words) >= 9:
                received += int(words[0])
                sent += int(words[8])
        return received, sent

    def _infiniband(self) -> dict[str, int]:
        received = sent = 0
        found = False
        for counters in (self._sys / "class" / "infiniband").glob("*/ports/*/counters"):
            try:
                received += int((counters / "port_rcv_data").read_text())
                sent += int((counters / "port_xmit_data").read_text())
            except (OSError, ValueError):  # a port that is down may have none
                continue
            found = True
        if not found:
            return {}
        return {
            "infiniband_rx": received * INFINIBAND_WORD_BYTES,
            "infiniband_tx": sent * INFINIBAND_WORD_BYTES,
        }

    def _process(self, pid: int) -> tuple[float, int] | None:
        """Return the CPU seconds and resident bytes of a process; None if the process has ended."""
        try:
            text = (self._proc / str(pid) / "stat").read_text()
        except OSError:
            return None
        words = text.rpartition(")")[2].split()  # the name may contain spaces and brackets
        return (int(words[11]) + int(words[12])) / _TICKS_S, int(words[21]) * _PAGE_BYTES
