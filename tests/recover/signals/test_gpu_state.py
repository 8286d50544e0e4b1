"""The GPUs' state from the output of `nvidia-smi`, in recorded and in unknown forms."""

import sys

import pytest

from holdfast.recover.signals.facts import CannotSee
from holdfast.recover.signals.gpu.gpus import Gpus
from holdfast.recover.signals.gpu.smi import Smi

GPU = """
<gpu id="{bus}">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <{reasons}s>
    <{reasons}_gpu_idle>Not Active</{reasons}_gpu_idle>
    <{reasons}_hw_thermal_slowdown>{thermal}</{reasons}_hw_thermal_slowdown>
    <{reasons}_hw_power_brake_slowdown>Not Active</{reasons}_hw_power_brake_slowdown>
    <{reasons}_sw_thermal_slowdown>Active</{reasons}_sw_thermal_slowdown>
  </{reasons}s>
  <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
  <ecc_errors>
    <volatile>
      <sram_correctable>7</sram_correctable>
      <sram_uncorrectable_parity>{parity}</sram_uncorrectable_parity>
      <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
      <dram_correctable>3</dram_correctable>
      <dram_uncorrectable>{dram}</dram_uncorrectable>
    </volatile>
    <aggregate><dram_uncorrectable>4711</dram_uncorrectable></aggregate>
  </ecc_errors>
  <remapped_rows>
    <remapped_row_corr>0</remapped_row_corr>
    <remapped_row_pending>{pending}</remapped_row_pending>
    <remapped_row_failure>{failure}</remapped_row_failure>
  </remapped_rows>
  <temperature><gpu_temp>88 C</gpu_temp></temperature>
  <gpu_recovery_action>{action}</gpu_recovery_action>
</gpu>
"""
HEALTHY = {
    "bus": "00000000:19:00.0",
    "reasons": "clocks_event_reason",
    "thermal": "Not Active",
    "parity": "0",
    "dram": "0",
    "pending": "No",
    "failure": "No",
    "action": "None",
}


def smi(*gpus):
    inner = "".join(GPU.format(**{**HEALTHY, **gpu}) for gpu in gpus)
    return f'<?xml version="1.0" ?>\n<nvidia_smi_log><driver_version>580</driver_version>{inner}</nvidia_smi_log>'


@pytest.fixture
def printing(tmp_path):
    """A function that reads the GPUs, and one that sets what `nvidia-smi` does next."""
    script = tmp_path / "smi.py"

    def says(text, code=0):
        script.write_text(f"import sys; print({text!r}); sys.exit({code})")

    gpus, reader = Gpus(), Smi((sys.executable, "-S", str(script)))
    return lambda: gpus.facts_of(reader.read()), says


def names(facts):
    return [(fact.name, fact.where, fact.count) for fact in facts]


def test_healthy_gpus_have_no_signals_and_neither_do_those_without_counters(printing):
    read, says = printing
    says(smi({}, {"bus": "00000000:3B:00.0", "dram": "N/A", "pending": "N/A", "failure": "N/A"}))
    assert read() == []
    says(smi({}, {"bus": "00000000:3B:00.0", "action": "N/A", "parity": "[Unknown Error]"}))
    assert read() == []


def test_new_uncorrectable_errors_count_and_old_ones_do_not(printing):
    read, says = printing
    says(smi({"dram": "5"}))
    assert read() == []
    says(smi({"dram": "6", "parity": "1"}))
    assert names(read()) == [("ecc-uncorrectable", "00000000:19:00.0", 2)]


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"failure": "Yes"}, "row-remap-failure"),
        ({"pending": "Yes"}, "row-remap-pending"),
        ({"action": "Drain and Reset"}, "gpu-needs-reset"),
        ({"thermal": "Active"}, "gpu-slowed"),
        ({"thermal": "Active", "reasons": "clocks_throttle_reason"}, "gpu-slowed"),
    ],
)
def test_a_state_is_a_signal_while_it_lasts(printing, state, name):
    read, says = printing
    says(smi(state))
    (found,) = read()
    assert found.name == name
    assert "00000000:19:00.0" in found.text
    says(smi({}))
    assert read() == []


def test_a_gpu_that_is_shown_no_more_or_called_lost_is_lost(printing):
    read, says = printing
    other = "00000000:3B:00.0"
    says(smi({}, {"bus": other}))
    assert read() == []
    says(smi({}))
    assert names(read()) == [("gpu-lost", other.lower(), 1)]
    says(
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system.",
        15,
    )
    assert names(read()) == [("gpu-lost", "0000:3b:00.0", 1)]


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", 18, "ended with code 18: Failed to init"),
        ("<nvidia_smi_log><gpu id=", 0, "printed no XML"),
        ("", 0, "printed no XML"),
        ("<nvidia_smi_log></nvidia_smi_log>", 0, "shows no GPU"),
    ],
)  # fmt: skip
def test_output_that_cannot_be_read_says_nothing_of_the_gpus(printing, text, code, why):
    read, says = printing
    says(text, code)
    with pytest.raises(CannotSee, match=why):
        read()


def test_a_host_without_the_driver_or_the_program_is_not_unhealthy(tmp_path, monkeypatch):
    monkeypatch.delenv("HOLDFAST_DCGM_EXPORTER", raising=False)
    gpus = Gpus(driver=tmp_path / "none", command=("/no/such/program",))
    with pytest.raises(CannotSee, match="no NVIDIA driver"):
        gpus.read()
    with pytest.raises(CannotSee, match="No such file"):
        Smi((str(tmp_path / "nvidia-smi"),)).read()


def test_a_program_that_hangs_is_killed_and_run_again_later(tmp_path):
    script = tmp_path / "smi.py"
    script.write_text("import time; time.sleep(3600)")
    reader = Smi((sys.executable, "-S", str(script)), timeout_s=0.5)
    with pytest.raises(CannotSee, match=r"did not answer within 0\.5 s"):
        reader.read()
    reader._stuck.wait(60)
    reader._timeout_s = 60
    script.write_text(f"print({smi({'failure': 'Yes'})!r})")
    (found,) = Gpus().facts_of(reader.read())
    assert found.name == "row-remap-failure"
