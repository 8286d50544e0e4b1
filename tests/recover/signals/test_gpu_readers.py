"""The GPUs' health by NVML and DCGM, and the process that asks them."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from holdfast.recover.detectors.node import meaning_of
from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.gpu.dcgm import FIELDS, Dcgmi, Exporter
from holdfast.recover.signals.gpu.gpus import MIN_PERIOD_S, NVLINK_ERRORS, SHARE, Gpus
from holdfast.recover.signals.gpu.nvml import Nvml
from holdfast.recover.signals.gpu.reader import READERS
from holdfast.testing.dcgm import exporter_page, fake_dcgmi
from holdfast.testing.nvml import FakeGpu, FakeNvml

BUS = "00000000:19:00.0"


def names(facts):
    return [(fact.name, fact.where, fact.count) for fact in facts]


@pytest.fixture
def card():
    return FakeGpu(nvlinks=[True] * 18, fields={230: 0, 38: 7, 45: 0, 52: 3, 59: 0})


@pytest.fixture
def read(card):
    """A function that reads two GPUs by NVML, of which the first is `card`."""
    nvml = FakeNvml([card, FakeGpu(bus="00000000:3B:00.0", missing=MISSING)])
    reader, gpus = Nvml(nvml), Gpus()
    look = lambda: gpus.facts_of(reader.read())  # noqa: E731
    assert look() == []
    look.nvml = nvml
    return look


MISSING = frozenset(
    {
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetFieldValues",
    }
)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"failure": 1}, "row-remap-failure"),
        ({"pending": 1}, "row-remap-pending"),
        ({"nvmlDeviceGetTotalEccErrors": 1}, "ecc-uncorrectable"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x40 | 0x1}, "gpu-slowed"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x80}, "gpu-slowed"),
    ],
)
def test_nvml_shows_a_state_while_it_lasts(card, read, values, name):
    card.values |= values
    (found,) = read()
    assert found.name == name
    assert BUS in found.text
    assert meaning_of(found).weight in ("decisive", "hardware")
    card.values = {"nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x20}  # a cap of the power
    assert read() == []


def test_a_driver_with_the_older_name_of_the_clocks_reasons_shows_a_slowdown():
    older = {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x40}
    missing = frozenset({"nvmlDeviceGetCurrentClocksEventReasons"})
    reading = Nvml(FakeNvml([FakeGpu(values=older, missing=missing)])).read()
    assert reading.gpus[BUS].slowdowns == ("hw_thermal_slowdown",)


def test_a_reset_that_the_driver_wants_is_named(card, read):
    card.fields[230] = 1
    (found,) = read()
    assert (found.name, found.where) == ("gpu-needs-reset", BUS)
    assert found.text.endswith("the driver recommends: GPU RESET")


def test_errors_of_the_nvlinks_count_from_the_first_look(card, read):
    card.fields[52] += NVLINK_ERRORS - 1
    assert read() == []
    card.fields[38] += 1
    assert names(read()) == [("nvlink-errors", BUS, NVLINK_ERRORS)]
    card.fields[59] += 2 * NVLINK_ERRORS
    assert names(read()) == [("nvlink-errors", BUS, 2 * NVLINK_ERRORS)]


def test_errors_after_a_reset_of_the_gpu_count_from_the_reset(card, read):
    card.values["nvmlDeviceGetTotalEccErrors"] = 5
    assert names(read()) == [("ecc-uncorrectable", BUS, 5)]
    card.values["nvmlDeviceGetTotalEccErrors"] = 0
    card.fields[38] = 0
    assert read() == []
    card.values["nvmlDeviceGetTotalEccErrors"] = 1
    card.fields[38] = NVLINK_ERRORS
    assert {name for name, _, _ in names(read())} == {"ecc-uncorrectable", "nvlink-errors"}


def test_an_nvlink_that_was_up_and_is_down_is_a_signal(card, read):
    card.nvlinks[3] = False
    (found,) = read()
    assert (found.name, found.text) == ("nvlink-down", f"GPU {BUS}: 17 of its 18 NVLinks are up")
    card.nvlinks[3] = True
    assert read() == []


def test_xid_events_count_and_mean_what_the_diagnosis_says_of_the_line(card, read):
    read.nvml.xids += [(card, 79), (card, 31), (card, 31)]
    lost, program = read()
    assert names([lost, program]) == [("xid-79", BUS, 1), ("xid-31", BUS, 2)]
    assert (meaning_of(lost).weight, meaning_of(lost).reason) == ("decisive", "NodeFailure")
    assert meaning_of(program).weight == "record"
    assert names(read()) == [("xid-79", BUS, 1), ("xid-31", BUS, 2)]  # an event stays


def test_a_gpu_that_nvml_calls_lost_is_lost_and_one_that_lacks_values_is_not(card, read):
    card.is_lost = True
    (found,) = read()
    assert (found.name, found.where) == ("gpu-lost", BUS)


def test_a_library_that_is_not_usable_any_more_says_nothing_of_the_gpus(card, read):
    class Reloaded:
        @staticmethod
        def get(*_):
            raise FakeNvml.NVMLError(FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    read.nvml.nvmlDeviceGetRemappedRows = Reloaded.get
    with pytest.raises(CannotSee, match="NVML"):
        read()


def test_another_reader_with_other_names_for_the_gpus_loses_none(card, read):
    gpus = Gpus()
    assert gpus.facts_of(Nvml(read.nvml).read()) == []
    page = exporter_page([{"DCGM_FI_DEV_ROW_REMAP_FAILURE": 0}])
    assert gpus.facts_of(Exporter(lambda: page).read()) == []


def test_an_exporters_page_shows_what_its_administrator_has_chosen():
    healthy = {"DCGM_FI_DEV_XID_ERRORS": 31, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2}
    pages = [
        healthy,
        {**healthy, "DCGM_FI_DEV_GPU_TEMP": 91, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": 0x40},
        {"DCGM_FI_DEV_XID_ERRORS": 48, "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 5,
         "DCGM_FI_DEV_ROW_REMAP_PENDING": 1, "DCGM_FI_DEV_ROW_REMAP_FAILURE": 9223372036854775794},
    ]  # fmt: skip
    gpus, reader = Gpus(), Exporter(lambda: exporter_page([pages.pop(0)]))
    assert gpus.facts_of(reader.read()) == []  # the Xid may be of another job, long ago
    (slow,) = gpus.facts_of(reader.read())
    assert slow.text == "GPU number 0: hw_thermal_slowdown is active at 91 C"
    found = gpus.facts_of(reader.read())
    assert {fact.name for fact in found} == {"xid-48", "ecc-uncorrectable", "row-remap-pending"}
    with pytest.raises(CannotSee, match="no field about the health"):
        Exporter(lambda: exporter_page([{"DCGM_FI_DEV_GPU_TEMP": 40}])).read()


def test_dcgmi_is_read_by_the_numbers_of_its_fields(tmp_path):
    row = dict.fromkeys(FIELDS, "0") | {395: "1", 409: "N/A"}
    program = fake_dcgmi(tmp_path / "dcgmi", [[row[number] for number in FIELDS]], then="true")
    (found,) = Gpus().facts_of(Dcgmi(str(program)).read())
    assert found.name == "row-remap-failure"
    program.write_text("#!/bin/sh\necho 'Error: unable to connect to the host engine'; exit 240")
    with pytest.raises(CannotSee, match="code 240: Error: unable to connect"):
        Dcgmi(str(program)).read()
    with pytest.raises(CannotSee, match="No such file"):
        Dcgmi(str(tmp_path / "none")).read()


def served(readers):
    """The command of a reader process with other readers."""
    program = (
        "from holdfast.recover.signals.gpu.reader import *; from holdfast.testing.nvml import *; "
        f"import pathlib; serve({readers})"
    )
    return sys.executable, "-c", program


def test_the_process_reads_by_the_first_reader_that_answers(tmp_path):
    smi = tmp_path / "smi"
    smi.write_text("#!/bin/sh\necho no driver; exit 9")
    smi.chmod(0o755)
    readers = (
        f"{{'nvidia-smi': lambda: Smi([{str(smi)!r}]),"
        " 'NVML': lambda: __import__('holdfast.recover.signals.gpu.nvml').recover.signals.gpu.nvml.Nvml("
        "FakeNvml([FakeGpu(values={'failure': 1})]))}"
    )
    gpus = Gpus(driver=tmp_path, command=served(readers))
    first, again = gpus.read(), gpus.read()
    assert first == again
    assert names(first) == [("row-remap-failure", BUS, 1)]
    gpus._process.stdin.close()
    assert gpus._process.wait(60) == 0  # the process ends with its standard input
    gpus._process.stdout.close()


@pytest.mark.parametrize(
    ("work", "least_s", "most_s"),
    [
        ("sleep 1", MIN_PERIOD_S, 0.5 / SHARE),
        ("i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done", 2 * MIN_PERIOD_S, 3600.0),
    ],
)
def test_a_look_that_uses_the_cpu_is_rare_and_one_that_waits_is_not(
    tmp_path, work, least_s, most_s
):
    smi = tmp_path / "smi"
    smi.write_text(f"#!/bin/sh\n{work}\necho '<log><gpu id=\"{BUS}\"/></log>'\n")
    smi.chmod(0o755)
    readers = f"{{'nvidia-smi': lambda: Smi([{str(smi)!r}])}}"
    gpus = Gpus(driver=tmp_path, command=served(readers))
    assert gpus.read() == []
    assert least_s <= gpus.period_s <= most_s
    gpus._process.stdin.close()
    gpus._process.wait(60)
    gpus._process.stdout.close()


def test_a_driver_call_that_blocks_costs_the_look_alone(tmp_path):
    open_it = tmp_path / "open"
    readers = (
        "{'NVML': lambda: pathlib.Path("
        f"{str(open_it)!r}).exists() or __import__('time').sleep(3600)}}"
    )
    gpus = Gpus(driver=tmp_path, command=served(readers), timeout_s=1.0)
    with pytest.raises(CannotSee, match="the driver did not answer within 1 s"):
        gpus.read()
    assert gpus.period_s == MIN_PERIOD_S  # not blind for long: the next look may succeed
    assert gpus._stuck.wait(60) < 0
    open_it.touch()
    gpus._timeout_s = 60.0
    with pytest.raises(
        CannotSee, match="AttributeError"
    ):  # True is no reader: the next process has answered
        gpus.read()
    gpus._process.stdin.close()
    gpus._process.wait(60)
    gpus._process.stdout.close()


class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(exporter_page([{"DCGM_FI_DEV_ROW_REMAP_FAILURE": 1}]))

    def log_message(self, *_):
        pass


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host's GPU is read by NVML")
def test_the_real_process_names_every_reason_and_reads_an_exporter_that_is_there(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(READERS) == ["NVML", "nvidia-smi", "DCGM", "dcgm-exporter"]
    server = HTTPServer(("127.0.0.1", 0), Page, bind_and_activate=False)
    server.server_bind()  # not yet listening
    address = f"http://127.0.0.1:{server.server_port}/metrics"
    monkeypatch.setenv("HOLDFAST_DCGM_EXPORTER", address)
    gpus = Gpus(driver=tmp_path / "none")
    with pytest.raises(CannotSee) as error:
        gpus.read()
    for word in ("NVML", "nvidia-smi", "dcgmi", "Connection refused"):
        assert word in str(error.value)
    server.server_activate()
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    assert names(gpus.read()) == [("row-remap-failure", "number 0", 1)]
    thread.join()
    server.server_close()
    gpus._process.stdin.close()
    gpus._process.wait(60)
    gpus._process.stdout.close()
