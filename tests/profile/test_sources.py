"""The sources: units, sentinels, the order of the probe, and devices that cannot answer."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from holdfast.core.exporter import ENV_EXPORTER
from holdfast.profile.metrics import METRICS
from holdfast.profile.recording import SeriesId
from holdfast.profile.sources.amd import Amd
from holdfast.profile.sources.dcgm import FIELDS, LAST_WAIT_S, Dcgmi, Exporter, parse_page
from holdfast.profile.sources.host import Host
from holdfast.profile.sources.nvidia import GPM_METRICS, Nvidia
from holdfast.profile.sources.probe import gpu_sources, has_gpu, probe
from holdfast.profile.sources.source import CannotRead, Source, SourceEnded
from holdfast.testing.dcgm import exporter_page, fake_dcgmi
from holdfast.testing.nvml import FakeGpu, FakeNvml

SECOND_NS = 1_000_000_000
MIB = 1024 * 1024


def by_metric(values: dict[SeriesId, float], device: int | None = 0) -> dict[str, float]:
    return {key.metric: value for key, value in values.items() if key.device == device}


def read_at(source: Nvidia, nvml: FakeNvml, at_s: float) -> dict[SeriesId, float]:
    nvml.now_s = at_s
    return source.read(round(at_s * SECOND_NS))


def test_gpm_gives_the_mean_between_two_samples_in_the_units_of_the_table() -> None:
    # SM activity rises from 0 by 10 a second: its mean over the second from 1 to 2 s is 15.
    gpu = FakeGpu(gpm={2: lambda at_s: 10 * at_s, 5: lambda _: 25.0, 20: lambda _: 3.0})
    nvml = FakeNvml([gpu])
    source = Nvidia(nvml, with_gpm=True)

    first = by_metric(read_at(source, nvml, 1))
    second = by_metric(read_at(source, nvml, 2))

    assert "gpu_sm_active" not in first
    assert second["gpu_sm_active"] == pytest.approx(15)
    assert second["gpu_tensor_active"] == pytest.approx(25)
    assert second["gpu_pcie_tx"] == pytest.approx(3 * MIB)
    assert "gpu_dram_active" not in second  # the device does not count it


def test_nvml_names_the_source_of_each_value() -> None:
    values = {"nvmlDeviceGetPowerUsage": 350_500, "nvmlDeviceGetTotalEnergyConsumption": 9_000_000}
    nvml = FakeNvml([FakeGpu(gpm={2: lambda _: 50.0}, values=values)])
    source = Nvidia(nvml, with_gpm=True, interval_s=0.5)
    read_at(source, nvml, 1)

    found = read_at(source, nvml, 2)

    assert found[SeriesId("gpu_power", "nvml", device=0, interval_s=0.5)] == 350.5
    assert found[SeriesId("gpu_energy", "nvml", device=0, interval_s=0.5)] == 9000
    assert found[SeriesId("gpu_sm_active", "gpm", device=0, interval_s=0.5)] == pytest.approx(50)


def test_reads_closer_than_gpm_allows_give_no_counters() -> None:
    nvml = FakeNvml([FakeGpu(gpm={2: lambda _: 50.0})])
    source = Nvidia(nvml, with_gpm=True)
    read_at(source, nvml, 1)

    assert "gpu_sm_active" not in by_metric(read_at(source, nvml, 1.05))
    assert "gpu_sm_active" in by_metric(read_at(source, nvml, 1.2))


def test_sentinels_are_dropped() -> None:
    nothing = float(2**64 - 1)
    values = {"nvmlDeviceGetPowerUsage": 2**32 - 1, "nvmlDeviceGetMemoryInfo": nothing}
    nvml = FakeNvml([FakeGpu(gpm={2: lambda _: float("nan"), 3: lambda _: 2.0**47}, values=values)])
    source = Nvidia(nvml, with_gpm=True)
    read_at(source, nvml, 1)

    found = by_metric(read_at(source, nvml, 2))

    assert not found.keys() & {"gpu_sm_active", "gpu_sm_occupancy", "gpu_power", "gpu_memory_used"}
    assert found["gpu_utilization"] == 0


def test_a_call_that_a_device_lacks_costs_that_metric_alone() -> None:
    nvml = FakeNvml(
        [FakeGpu(missing=frozenset({"nvmlDeviceGetTotalEnergyConsumption"})), FakeGpu()]
    )

    found = read_at(Nvidia(nvml, with_gpm=False), nvml, 1)

    assert "gpu_energy" not in by_metric(found, 0)
    assert "gpu_energy" in by_metric(found, 1)


def test_a_device_older_than_hopper_is_read_without_gpm() -> None:
    nvml = FakeNvml([FakeGpu(has_gpm=False)])

    with pytest.raises(CannotRead, match="Hopper"):
        Nvidia(nvml, with_gpm=True)
    assert Nvidia(nvml, with_gpm=False).name == "nvml"


def test_gpm_samples_are_freed() -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    source = Nvidia(nvml, with_gpm=True)
    assert nvml.open_samples == 4

    source.close()

    assert nvml.open_samples == 0


def test_the_fake_has_what_the_real_module_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    calls = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML", "c_"))]

    assert len(calls) > 15
    assert not [name for name in calls if not hasattr(pynvml, name)]
    numbers = [name for name in calls if isinstance(getattr(FakeNvml, name), int)]
    assert "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION" in numbers
    numbers.remove("NVML_GPM_METRICS_GET_VERSION")
    assert {name: getattr(FakeNvml, name) for name in numbers} == {
        name: getattr(pynvml, name) for name in numbers
    }
    names = {2: "SM_UTIL", 3: "SM_OCCUPANCY", 5: "ANY_TENSOR_UTIL", 10: "DRAM_BW_UTIL"}
    names |= {20: "PCIE_TX_PER_SEC", 21: "PCIE_RX_PER_SEC"}
    names |= {60: "NVLINK_TOTAL_RX_PER_SEC", 61: "NVLINK_TOTAL_TX_PER_SEC"}
    assert {getattr(pynvml, f"NVML_GPM_METRIC_{name}") for name in names.values()} == set(
        GPM_METRICS
    )
    assert all(
        getattr(pynvml, f"NVML_GPM_METRIC_{name}") == number for number, name in names.items()
    )
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.metrics[len(GPM_METRICS) - 1].metricId = 61


def test_an_exporters_page_is_read_in_old_and_new_names() -> None:
    page = exporter_page(
        [
            {
                "DCGM_FI_PROF_SM_ACTIVE": 0.4,
                "DCGM_FI_DEV_FB_USED": 1000,
                "DCGM_FI_DEV_GPU_TEMP": 50,
            },
            {"DCGM_FI_PROF_SM_ACTIVE": 0.5, "DCGM_FI_DEV_GPU_TEMP_CELSIUS": 60},
        ],
        host_label="hostname",
    )

    found = parse_page(page)

    assert by_metric(found, 0) == {
        "gpu_sm_active": pytest.approx(40),
        "gpu_memory_used": 1000 * MIB,
        "gpu_temperature": 50,
    }
    assert by_metric(found, 1) == {"gpu_sm_active": pytest.approx(50), "gpu_temperature": 60}
    assert {key.interval_s for key in found} == {30.0}


@pytest.mark.parametrize("blank", [2147483632, 9223372036854775792, 140737488355328.0])
def test_blanks_of_dcgm_are_dropped(blank: float) -> None:
    names = ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_POWER_USAGE")
    names += ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_UTIL")

    assert parse_page(exporter_page([dict.fromkeys(names, blank)])) == {}


def test_mig_instances_and_other_pages_are_left_out() -> None:
    assert parse_page(exporter_page([{"DCGM_FI_PROF_SM_ACTIVE": 0.4}], mig_instance="3")) == {}
    with pytest.raises(CannotRead, match="names no GPU"):
        Exporter(lambda: b"node_cpu_seconds_total 1\n")


def test_an_exporter_is_read_at_its_own_pace() -> None:
    reads = []

    def fetch() -> bytes:
        reads.append(1)
        return exporter_page([{"DCGM_FI_PROF_SM_ACTIVE": 0.4}])

    source = Exporter(fetch)
    answers = [bool(source.read(second * SECOND_NS)) for second in range(1, 62)]

    assert answers.count(True) == 3
    assert len(reads) == 4


def test_dcgmi_is_read_by_the_fields_numbers(tmp_path: Path) -> None:
    row = ["N/A"] * len(FIELDS)
    row[list(FIELDS).index(1002)] = "0.731"
    row[list(FIELDS).index(155)] = "412.5"
    row[list(FIELDS).index(156)] = "9223372036854775792"
    source = Dcgmi(command=str(fake_dcgmi(tmp_path / "dcgmi", [row, row])), answer_s=60)
    try:
        found: dict[SeriesId, float] = {}
        while len(found) < 4:
            found |= source.read(0)
    finally:
        source.close()

    assert by_metric(found, 1) == {"gpu_sm_active": pytest.approx(73.1), "gpu_power": 412.5}


def write_program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_dcgmi_without_a_host_engine_is_quoted_and_the_next_source_is_tried(
    tmp_path: Path,
) -> None:
    command = write_program(
        tmp_path / "dcgmi", "echo Error: unable to connect to the host engine; exit 3"
    )
    nvml = FakeNvml([FakeGpu()])

    source, missing = probe(
        {
            "dcgm": lambda: Dcgmi(command=command, answer_s=60),
            "nvml": lambda: Nvidia(nvml, with_gpm=False),
        }
    )

    assert source is not None
    assert source.name == "nvml"
    assert missing == {
        "dcgm": "dcgmi ended with code 3: Error: unable to connect to the host engine"
    }


def test_a_dcgmi_that_prints_other_lines_only_is_waited_for_in_bounds(tmp_path: Path) -> None:
    command = write_program(tmp_path / "dcgmi", "echo Waiting for the host engine; exec sleep 600")

    with pytest.raises(CannotRead, match="printed no table within"):
        Dcgmi(command=command, answer_s=0.5)


def test_a_dcgmi_that_ends_later_gives_its_rows_first(tmp_path: Path) -> None:
    row = ["412.5"] * len(FIELDS)
    command = fake_dcgmi(tmp_path / "dcgmi", [row], then="sh -c 'echo Error: lost; exit 3'")
    source = Dcgmi(command=str(command), answer_s=60)
    found: dict[SeriesId, float] = {}
    try:
        with pytest.raises(SourceEnded, match="code 3: Error: lost"):  # noqa: PT012
            while True:
                found |= source.read(0)
    finally:
        source.close()

    assert by_metric(found)["gpu_power"] == 412.5


def test_a_stuck_dcgmi_ends_with_a_reader_that_is_killed(tmp_path: Path) -> None:
    command = fake_dcgmi(tmp_path / "dcgmi", [["1"] * len(FIELDS)])
    opens = (
        "import sys, time; from holdfast.profile.sources.dcgm import Dcgmi; "
        "print(Dcgmi(command=sys.argv[1], answer_s=60)._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", opens, str(command)], stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        stuck = psutil.Process(int(reader.stdout.readline()))
        assert stuck.is_running()
        reader.kill()
        # The test's process may be no parent of it: the kernel reaps it, or leaves a zombie.
        gone, alive = psutil.wait_procs([stuck], timeout=60)
    assert gone or alive[0].status() == psutil.STATUS_ZOMBIE


def test_a_dcgmi_that_outlives_sigkill_is_not_waited_for(tmp_path: Path) -> None:
    source = Dcgmi(command=str(fake_dcgmi(tmp_path / "dcgmi", [["1"] * len(FIELDS)])), answer_s=60)
    process = source._process
    waits: list[float | None] = []

    def never_ends(timeout: float | None = None) -> int:
        waits.append(timeout)
        raise subprocess.TimeoutExpired("dcgmi", timeout or 0.0)

    with patch.object(process, "wait", never_ends):
        source.close()
    process.wait()
    assert waits == [LAST_WAIT_S]


def test_a_missing_dcgmi_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotRead, match="No such file"):
        Dcgmi(command=str(tmp_path / "dcgmi"))


class FakeAmdsmi:
    """The part of the module `amdsmi` that Holdfast calls."""

    AmdSmiClkType = SimpleNamespace(GFX=1)
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)

    class AmdSmiException(Exception):
        pass

    def amdsmi_init(self) -> None: ...

    def amdsmi_shut_down(self) -> None: ...

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["a"]

    def amdsmi_get_gpu_activity(self, _: str) -> dict[str, Any]:
        return {"gfx_activity": 55, "umc_activity": "N/A"}

    def amdsmi_get_gpu_vram_usage(self, _: str) -> dict[str, int]:
        return {"vram_total": 196_592, "vram_used": 1024}

    def amdsmi_get_power_info(self, _: str) -> dict[str, Any]:
        return {"current_socket_power": "N/A", "average_socket_power": 320}

    def amdsmi_get_temp_metric(self, _: str, _type: int, _metric: int) -> int:
        raise self.AmdSmiException("not supported")

    def amdsmi_get_clock_info(self, _: str, _type: int) -> dict[str, Any]:
        return {"clk": 0xFFFF}


def test_amd_gives_what_its_device_counts() -> None:
    found = by_metric(Amd(FakeAmdsmi()).read(0))

    assert found == {
        "gpu_utilization": 55,
        "gpu_memory_used": 1024 * MIB,
        "gpu_memory_total": 196_592 * MIB,
        "gpu_power": 320,
    }


def test_the_probe_takes_the_first_source_that_answers_and_says_why_others_do_not() -> None:
    class Answers:
        def __init__(self, name: str) -> None:
            self.name = name

        def read(self, now_ns: int) -> dict[SeriesId, float]:
            return {}

        def close(self) -> None: ...

    def fails(error: Exception) -> Source:
        raise error

    opens = {
        "gpm": lambda: fails(CannotRead("too old")),
        "dcgm": lambda: fails(OSError("broken library")),
        "exporter": lambda: Answers("exporter"),
        "nvml": lambda: Answers("nvml"),
    }

    source, missing = probe(opens)

    assert source is not None
    assert source.name == "exporter"
    assert missing == {"gpm": "too old", "dcgm": "OSError: broken library"}


def test_sources_are_probed_from_the_most_telling_one() -> None:
    assert list(gpu_sources(1.0)) == ["gpm", "dcgm", "dcgm-exporter", "nvml", "amdsmi"]


def test_a_host_without_a_driver_is_not_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_EXPORTER, raising=False)
    (tmp_path / "kfd").touch()

    assert not has_gpu([tmp_path / "nvidia"])
    assert has_gpu([tmp_path / "kfd"])
    monkeypatch.setenv(ENV_EXPORTER, "http://localhost:1/metrics")
    assert has_gpu([tmp_path / "nvidia"])


def write_proc(
    proc: Path, *, busy: int, idle: int, sectors: int, received: int, ticks: int
) -> None:
    (proc / "net").mkdir(parents=True, exist_ok=True)
    (proc / "77").mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 {busy} 0\ncpu0 0\n")
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n")
    (proc / "diskstats").write_text(
        f" 8 0 sda 1 0 {sectors} 1 1 0 {2 * sectors} 1 0 1 1\n"
        f" 8 1 sda1 1 0 {sectors} 1 1 0 {sectors} 1 0 1 1\n"
        f" 253 0 dm-0 1 0 {sectors} 1 1 0 {sectors} 1 0 1 1\n"
    )
    (proc / "net" / "dev").write_text(
        f"a\nb\n    lo: 9 0 0 0 0 0 0 0 9 0\n  eth0: {received} 0 0 0 0 0 0 0 {received * 3} 0\n"
    )
    fields = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 8, "7", "0"]
    (proc / "77" / "stat").write_text(f"77 (a (b) c) {' '.join(fields)}\n")


def test_the_host_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    host = Host(proc=tmp_path / "proc", sys=tmp_path / "sys")
    host.pids = {5: 77, 6: 78}
    for second, (busy, idle, sectors, received, ticks) in enumerate(
        ((0, 0, 0, 0, 0), (30, 70, 100, 500, 50)), 1
    ):
        (port / "port_rcv_data").write_text(str(25 * (second - 1)))
        (port / "port_xmit_data").write_text("0")
        write_proc(
            tmp_path / "proc", busy=busy, idle=idle, sectors=sectors, received=received, ticks=ticks
        )
        found = host.read(second * SECOND_NS)

    of_host = {key.metric: value for key, value in found.items() if key.rank is None}
    of_host.pop("sampler_cpu")
    assert of_host == {
        "cpu_utilization": pytest.approx(30),
        "host_memory_total": 1_024_000,
        "host_memory_used": 409_600,
        "disk_read": 51_200,
        "disk_write": 102_400,
        "network_rx": 500,
        "network_tx": 1500,
        "infiniband_rx": 100,
        "infiniband_tx": 0,
    }
    of_ranks = {
        (key.metric, key.rank): value for key, value in found.items() if key.rank is not None
    }
    assert of_ranks.keys() == {("process_memory", 5), ("process_cpu", 5)}  # rank 6 has ended
    assert of_ranks["process_cpu", 5] > 0


def test_this_host_is_read() -> None:
    host = Host()
    host.read(1)
    found = host.read(2)

    assert found.keys() >= {SeriesId("host_memory_used", "proc"), SeriesId("sampler_cpu", "proc")}
    assert all(key.metric in METRICS for key in found)
