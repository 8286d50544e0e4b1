"""Test what `holdfast doctor` finds on hosts with faults, and that no check holds up the others."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from holdfast.adopt import examine
from holdfast.adopt.doctor import limits, machine, schedulers, software
from holdfast.adopt.doctor.checking import CHECKS, findings_of
from holdfast.cluster.kubernetes_nodes import Fact, Look
from holdfast.core.processes import module_command
from holdfast.profile.sources.nvidia import Nvidia
from holdfast.profile.sources.probe import gpu_memory, has_gpu
from holdfast.testing.nvml import FakeGpu, FakeNvml

GIB = 1 << 30


def outcomes(findings):
    return [one.outcome for one in findings]


def test_the_command_looks_at_everything_and_imports_no_torch(tmp_path):
    if not has_gpu():  # an import of torch fails
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    command, environment = module_command("holdfast.cli.main")
    path = f"{tmp_path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*command, "doctor", str(tmp_path), "--json"],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    told = json.loads(done.stdout)
    assert (told["schema"], told["folder"]) == ("holdfast.doctor", str(tmp_path))
    assert list(dict.fromkeys(one["check"] for one in told["findings"])) == list(CHECKS)
    found = {one["outcome"] for one in told["findings"]}
    assert done.returncode == (1 if "wrong" in found else 4 if "not looked at" in found else 0)
    assert all(one["mend"] for one in told["findings"] if one["outcome"] == "wrong")
    assert not any("The check failed" in one["what"] for one in told["findings"])
    assert not list(tmp_path.glob(".holdfast-doctor-*"))


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def answering(then):
    """Return a command whose process answers each check with its name, and does `then` at "bad"."""
    program = (
        "import json, os, signal, sys, time\n"
        "for name in sys.argv[1:]:\n"
        f"    if name == 'bad': {then}\n"
        "    print(json.dumps([{'outcome': 'good', 'what': name, 'mend': ''}]), flush=True)\n"
    )
    return lambda folder, names: ([sys.executable, "-c", program, *names], dict(os.environ))


def test_a_check_that_dies_hides_no_other(tmp_path):
    command = answering("os.kill(os.getpid(), signal.SIGKILL)")
    found = list(examine(tmp_path, names=["a", "b", "bad", "c", "d"], command=command))
    assert [name for name, _ in found] == ["a", "b", "bad", "c", "d"]
    assert [one.what for _, one in found] == ["a", "b", "The check ended its process.", "c", "d"]
    assert [one.outcome for _, one in found if one.what.startswith("The")] == ["not looked at"]


def test_a_check_that_hangs_is_killed_with_its_commands(tmp_path):
    then = f"os.system('sleep 1000 & echo $! > {tmp_path}/pid; touch {tmp_path}/there; wait')"
    found = list(examine(tmp_path, names=["bad"], limit_s=1.0, command=answering(then)))
    assert [(name, one.what) for name, one in found] == [
        ("bad", "The check did not end within 1 s.")
    ]
    if (tmp_path / "there").exists():  # a machine that stands still may not have come so far
        pid = int((tmp_path / "pid").read_text())
        deadline_s = time.monotonic() + 120
        while is_running(pid):  # the kernel ends a killed process when a core is free
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_an_error_of_a_check_is_a_finding_beside_the_others(tmp_path):
    def check(folder):
        yield limits.good("one")
        raise RuntimeError("torn")

    assert [(one.outcome, one.what) for one in findings_of(check, tmp_path)] == [
        ("good", "one"),
        ("not looked at", "The check failed: RuntimeError: torn."),
    ]


def test_libraries_of_other_versions():
    found = list(
        software.unfit(
            [
                "click>=999",
                "rich>=1",
                "no-such-package>=2",
                "no-such-extra>=2; extra == 'all'",
                "xxhash<1; extra == 'train'",
                "pytest<1; extra == 'dev'",
            ]
        )
    )
    assert [one.mend for one in found] == [
        "pip install 'click>=999'",
        "pip install 'no-such-package>=2'",
        "pip install 'xxhash<1'",
    ]
    assert outcomes(found) == ["wrong"] * 3


def pci_device(root, number, vendor, kind):
    device = root / f"0000:0{number}:00.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def test_gpus_without_a_driver(tmp_path, monkeypatch):
    pci_device(tmp_path, 1, "0x10de", "0x030200")
    pci_device(tmp_path, 2, "0x10de", "0x030200")
    pci_device(tmp_path, 3, "0x10de", "0x068000")  # a switch of NVLinks
    pci_device(tmp_path, 4, "0x8086", "0x030000")
    pci_device(tmp_path, 5, "0x1002", "0x120000")
    found = software.gpus_on_bus(tmp_path)
    assert found == ["2 NVIDIA GPUs", "1 AMD GPU"]
    monkeypatch.setattr("holdfast.profile.has_gpu", lambda: False)
    monkeypatch.setattr(software, "gpus_on_bus", lambda: found)
    (finding,) = software.gpus(tmp_path)
    assert finding.outcome == "wrong"
    assert finding.what == "2 NVIDIA GPUs, 1 AMD GPU on the PCI bus, and no driver is loaded here."


def test_the_memory_of_gpus_is_read_once():
    nvml = FakeNvml([FakeGpu(), FakeGpu()])
    memory, missing = gpu_memory({"nvml": lambda: Nvidia(nvml, with_gpm=False)})
    assert (list(memory), missing) == ([0, 1], {})
    assert min(memory.values()) > GIB


def test_a_torch_for_cpus_on_a_host_with_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.profile.has_gpu", lambda: True)
    monkeypatch.setattr("holdfast.profile.gpu_memory", lambda: ({0: 80.0 * GIB}, {}))
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    of_driver, of_torch, health = software.gpus(tmp_path)
    assert of_driver.what == "The driver has 1 GPUs of 80 GiB."
    assert of_torch.outcome == "wrong"
    assert "is a build for CPUs" in of_torch.what
    assert (health.outcome, health.mend) == ("not looked at", "nvidia-smi -q")


def test_gpus_that_torch_cannot_use_or_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.profile.has_gpu", lambda: True)
    monkeypatch.setattr("holdfast.profile.gpu_memory", lambda: (dict.fromkeys(range(8), GIB), {}))
    monkeypatch.setattr(software, "_health", lambda: iter(()))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(software.gpus(tmp_path))[1].what.endswith("can use no GPU here.")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    fewer = list(software.gpus(tmp_path))[1]
    assert (fewer.outcome, fewer.what) == ("wrong", "torch uses 2 GPUs. The driver has 8.")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    chosen = list(software.gpus(tmp_path))[1]
    assert (chosen.outcome, chosen.what) == (
        "good",
        "torch uses 2 GPUs, by CUDA_VISIBLE_DEVICES=0,1.",
    )


def space(*, size, free, files=10**6):
    return SimpleNamespace(
        f_frsize=1, f_blocks=size, f_bavail=free, f_files=files, f_favail=min(files, 10**6)
    )


@pytest.mark.parametrize(
    ("size", "free", "outcome", "mend"),
    [
        (64 << 20, 64 << 20, "wrong", "sudo mount -o remount"),
        (4 * GIB, 1 << 20, "wrong", "ls -la"),
        (4 * GIB, 3 * GIB, "good", ""),
    ],
)
def test_shared_memory(tmp_path, monkeypatch, size, free, outcome, mend):
    monkeypatch.setattr(os, "statvfs", lambda _: space(size=size, free=free))
    finding = limits.shared_memory_in(tmp_path)
    assert finding.outcome == outcome
    assert finding.mend.startswith(mend)


def test_no_shared_memory(tmp_path):
    finding = limits.shared_memory_in(tmp_path / "shm")
    assert (finding.outcome, finding.mend) == ("wrong", f"sudo mount -t tmpfs shm {tmp_path}/shm")


@pytest.mark.parametrize(
    ("limit", "what", "mend"),
    [
        ("-Sn 512", "`ulimit -n` allows a process 512 open files", "ulimit -n "),
        (
            "-n 512",
            "`ulimit -n` allows a process 512 open files",
            "sudo prlimit --pid $$ --nofile=",
        ),
        ("-f 100", "`ulimit -f` allows a process files of ", "ulimit -f unlimited"),
    ],
)
def test_real_limits_of_a_process(tmp_path, limit, what, mend):
    command, environment = module_command("holdfast.adopt.doctor.checking")
    done = subprocess.run(
        ["bash", "-c", f'ulimit {limit} && exec "$@"', "bash", *command, str(tmp_path), "ulimits"],
        env=environment,
        capture_output=True,
        check=True,
    )
    (finding,) = json.loads(done.stdout)
    assert finding["outcome"] == "wrong"
    assert finding["what"].startswith(what)
    assert finding["mend"].startswith(mend)


def test_control_groups_that_are_too_small(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"
    )
    job = tmp_path / "sys/fs/cgroup/job"
    job.mkdir(parents=True)
    content = {"memory.max": GIB, "memory.current": GIB // 2, "pids.max": 100, "pids.current": 60}
    for name, value in content.items():
        (job / name).write_text(f"{value}\n")
    (job / "cpu.max").write_text("50000 100000\n")
    memory, pids, cpu = limits.groups_below(tmp_path)
    assert memory.what == "This process can still take 0.5 GiB of memory."
    assert pids.what.endswith("allows 40 more processes and threads.")
    assert cpu.mend == "export OMP_NUM_THREADS=1"
    assert outcomes([memory, pids, cpu]) == ["wrong"] * 3
    (job / "pids.max").write_text("max\n")
    (job / "cpu.max").write_text("max 100000\n")
    (job / "memory.max").write_text("max\n")
    assert outcomes(limits.groups_below(tmp_path)) == ["good"]


def test_storage(tmp_path):
    fast = iter([0.0, 0.0, 1.0, 2.0, 2.0])
    (finding,) = machine.storage_of(tmp_path / "not/there", lambda: next(fast))
    assert finding.what.startswith(f"{tmp_path} takes 8 MiB/s, written durably: saves take long")
    assert finding.mend.startswith("holdfast doctor FOLDER")
    ticks = iter([0.0, 0.0, *[0.01] * 40])
    (finding,) = machine.storage_of(tmp_path, lambda: next(ticks))
    assert finding.outcome == "good"
    assert not list(tmp_path.iterdir())


def test_no_storage_is_measured_below_a_file(tmp_path):
    file = tmp_path / "train.py"
    file.touch()
    for folder in (file, file / "checkpoints"):
        (finding,) = machine.storage_of(folder, lambda: 0.0)
        assert (finding.outcome, finding.what) == ("wrong", f"{file} is not a folder.")


def test_storage_that_is_full_or_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: space(size=GIB, free=GIB, files=10))
    full, files, unwritable = machine.storage_of(Path("/proc/sys/kernel"), lambda: 0.0)
    assert full.what == "/proc/sys/kernel has 1.0 GiB of free space."
    assert files.mend == "df -i /proc/sys/kernel"
    assert unwritable.what.startswith("/proc/sys/kernel cannot be written: ")
    assert outcomes([full, files, unwritable]) == ["wrong"] * 3


@pytest.mark.parametrize(
    ("is_synchronised", "outcome"), [(True, "good"), (False, "wrong"), (None, "not looked at")]
)
def test_the_clock(is_synchronised, outcome):
    assert machine.clock_finding(is_synchronised).outcome == outcome


def test_ports_that_outgoing_connections_take(tmp_path):
    path = tmp_path / "range"
    path.write_text("1024\t65000\n")
    (finding,) = machine.range_of_ports(path)
    assert finding.what.startswith("Outgoing connections take ports from 1024 on")
    path.write_text("32768\t60999\n")
    assert list(machine.range_of_ports(path)) == []
    path.write_text("")
    assert outcomes(machine.range_of_ports(path)) == ["not looked at"]


def test_a_name_without_an_address_and_one_that_is_no_own_address(monkeypatch):
    assert outcomes(machine.reached_by_name("localhost")) == ["good"]
    (finding,) = machine.reached_by_name("192.0.2.1")  # RFC 5737: nobody's address
    assert "cannot be reached from here" in finding.what
    (finding,) = machine.reached_by_name("no such name")
    assert finding.what.startswith("The name of this host, no such name, has no address")
    assert finding.mend == 'echo "ADDRESS no such name" | sudo tee -a /etc/hosts'


@pytest.mark.parametrize(
    ("states", "outcome", "what"),
    [
        ("IDLE DOWN MIXED+DRAIN", "good", "Slurm answers: 3 nodes, 1 down, 1 drained or reserved."),
        ("IDLE", "good", "Slurm answers: 1 nodes."),
        ("DOWN IDLE+DRAIN", "wrong", "None of Slurm's 2 nodes accepts jobs."),
        (
            "",
            "wrong",
            "Slurm does not answer: scontrol failed: Unable to contact slurm controller.",
        ),
    ],
)
def test_slurm(tmp_path, monkeypatch, states, outcome, what):
    lines = "".join(f"echo NodeName=n{at} State={one}\n" for at, one in enumerate(states.split()))
    fails = "echo Unable to contact slurm controller >&2; exit 1\n"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\n{lines or fails}")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (finding,) = schedulers.slurm(tmp_path)
    assert (finding.outcome, finding.what) == (outcome, what)


def test_kubernetes(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    assert outcomes(schedulers.kubernetes(tmp_path)) == ["not looked at"]  # no credentials
    ready = Fact(subject="node", name="n1", kind="Ready", is_bad=False)
    pressure = Fact(subject="node", name="n1", kind="DiskPressure", is_bad=True, detail="full")
    (finding,) = schedulers.of_look(Look(facts=(ready,)))
    assert finding.what == "Kubernetes reports 1 conditions, none of them bad."
    bad, hidden = schedulers.of_look(Look(facts=(ready, pressure), unseen=("No pod.",)))
    assert (bad.outcome, bad.mend) == ("wrong", "kubectl describe node n1")
    assert bad.what == "The node n1 has DiskPressure (full)."
    assert (hidden.outcome, hidden.what) == ("not looked at", "No pod.")
