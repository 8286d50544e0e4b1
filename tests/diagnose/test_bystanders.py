"""Test that no host, exit or peer that is only near the root is named as the fault's location."""

import pytest
from failures import NCCL, RANKS, TORCH, raised, steps, watchdog
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose import diagnose

# Faults of the program, its settings or a service: a restart on other hosts changes nothing.
OF_THE_PROGRAM = [
    "KeyError: 'a'",
    "ValueError: asked for 16 GPUs, the cluster has 8",
    "ZeroDivisionError: integer division or modulo by zero",
    "botocore.exceptions.ConnectionClosedError: Connection was closed before we received a valid response",
    "RuntimeError: Error(s) in loading state_dict for Model:",
    "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.6",
    "slurmstepd: error: *** JOB 12 ON gn17 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
    "Fatal Python error: Floating point exception",
]
# Faults of a host or its devices: the host that printed the line is named.
OF_A_HOST = [
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "NVRM: Xid (PCI:0000:B3:00): 79, pid=7301, name=python, GPU has fallen off the bus.",
    "EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#1_DIMM#0",
    "OSError: [Errno 28] No space left on device: '/scratch/x'",
]
HOSTS = st.sampled_from(["gn17", "node03", "ip-10-0-0-3"])
BESIDE = st.lists(
    st.sampled_from(
        [
            "srun: error: {}: task 0: Exited with exit code 1",
            "pdsh@login1: {}: ssh exited with exit code 1",
            "Jun  1 03:11:47 {} systemd[1]: Started Session 3 of user ops.",
            "slurmstepd: error: *** STEP 12.0 ON {} CANCELLED AT 2026-01-01T00:00:00 ***",
            "\tip: 10.0.0.3",
        ]
    ),
    max_size=4,
)
PREFIXES = st.sampled_from(["", "Jun  1 03:11:47 {} ", "(RayTrainWorker pid=811, ip=10.0.0.3) "])


@settings(max_examples=80, deadline=None)
@given(cause=st.sampled_from(OF_THE_PROGRAM), host=HOSTS, prefix=PREFIXES, beside=BESIDE)
def test_no_host_is_at_fault_for_the_program(tmp_path_factory, cause, host, prefix, beside):
    log = tmp_path_factory.mktemp("log") / "job.log"
    lines = [prefix + cause, *beside]
    log.write_text("".join(line.replace("{}", host) + "\n" for line in lines))
    found = diagnose(log)
    assert found.reason != "Unknown"
    assert "node" not in found.scope


@pytest.mark.parametrize("cause", OF_A_HOST)
@pytest.mark.parametrize("other", ["srun: error: gn99: task 0: Exited with exit code 1", ""])
def test_the_host_that_printed_its_own_fault_is_named(tmp_path, cause, other):
    (tmp_path / "job.log").write_text(f"Jun  1 03:11:47 gn17 kernel: {cause}\n{other}\n")
    assert diagnose(tmp_path).scope["node"] == "gn17"


@settings(max_examples=30, deadline=None)
@given(hosts=st.lists(st.integers(10, 99), min_size=1, max_size=8, unique=True))
def test_peers_are_named_only_where_all_name_the_same(tmp_path_factory, hosts):
    log = tmp_path_factory.mktemp("log") / "job.log"
    closed = "misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer"
    lines = [f"gn0:1:1 [0] {closed} gn{host}.cluster<40031>\n" for host in hosts]
    log.write_text("".join(lines * 2))
    found = diagnose(log).scope.get("node")
    assert found == (f"gn{hosts[0]}.cluster" if len(hosts) == 1 else None)


@pytest.mark.parametrize("world", [2, 8, 512])
def test_an_error_of_all_ranks_is_no_ranks(tmp_path, world):
    log = tmp_path / "job.log"
    every = [line for rank in range(world) for line in raised(rank, "ImportError: no module x")]
    log.write_text("\n".join(every) + "\n")
    assert diagnose(log).scope == {}
    log.write_text("\n".join([*steps(world, 1), *every, *raised(world, NCCL, TORCH)]) + "\n")
    named = diagnose(log).scope["rank"]
    assert set(named) <= set(range(world))


@pytest.mark.parametrize("failed", [0, 3])
def test_the_rank_that_a_gang_died_of_is_the_one_its_peers_lost(tmp_path, failed):
    """Test a scheduler that reports why it ended all other tasks."""
    lost = [
        "[rank1] WatchTasksAsync failed for task 1: UNAVAILABLE: failed to connect to all addresses",
        "ipv4:10.0.3.7:1305: Failed to connect to remote host: Connection refused",
    ]
    log = tmp_path / "job.log"
    log.write_text("\n".join(lost) + "\n")
    assert "rank" not in diagnose(log).scope
    log.write_text("\n".join([*lost, f"task {failed}: failed   tasks 4-15: cosched_failed"]) + "\n")
    assert diagnose(log).scope == {"rank": failed, "node": "10.0.3.7"}


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_monitor_that_was_refused_lost_no_peer(tmp_path, place):
    """Test a monitor's error while three of four ranks wait for the last."""
    monitor = ["node-exporter: push to 10.4.0.9:9091: connection refused"]
    waiting = [line for rank in (1, 2, 3) for line in watchdog(rank)]
    begun = [line for rank in range(RANKS) for line in steps(rank, 101, 102)]
    end = [*monitor, *waiting] if place == "before" else [*waiting, *monitor]
    (tmp_path / "job.log").write_text("\n".join([*begun, *end]) + "\n")
    found = diagnose(tmp_path / "job.log")
    assert (found.reason, found.scope) == ("NCCLTimeoutError", {"rank": 0})
