"""Test the location of a fault: from the root's lines, or from the one rank without a report."""

import random

import pytest
from failures import GLOO, NCCL, TORCH, raised, steps, watchdog

from holdfast.diagnose import diagnose


@pytest.fixture
def scope(tmp_path):
    def located(*lines, **logs):
        texts = {"job": lines} if lines else logs
        for old in tmp_path.iterdir():
            old.unlink()
        for name, text in texts.items():
            (tmp_path / f"{name.replace('_', '-')}.log").write_text(
                "".join(f"{line}\n" for line in text)
            )
        return dict(diagnose(tmp_path).scope)

    return located


XID = "NVRM: Xid (PCI:0000:B3:00): 79, pid=7301, name=python, GPU has fallen off the bus."
LINK = "NVRM: Xid (PCI:0000:B3:00): 74, pid=7301, name=python, NVLink: fatal error detected on link 8(0x1, 0x0)"
OOM = "Out of memory: Killed process 4242 (python) total-vm:9000kB, anon-rss:8000kB, UID:0"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("[rank5]: KeyError: 'a'", {"rank": 5}),
        ("[default3]:[rank11]: KeyError: 'a'", {"rank": 11, "local_rank": 3}),
        ("[default3]:KeyError: 'a'", {"local_rank": 3}),
        ("12: KeyError: 'a'", {"rank": 12}),
        ("12: [rank13]: KeyError: 'a'", {"rank": 13}),
        ("(RayTrainWorker pid=811, ip=10.0.0.3) KeyError: 'a'", {}),
        (
            "(RayTrainWorker pid=811, ip=10.0.0.3) RuntimeError: CUDA error: unspecified launch failure",
            {"node": "10.0.0.3"},
        ),
        (
            "(RayTrainWorker pid=811, ip=127.0.0.1) RuntimeError: CUDA error: unspecified launch failure",
            {},
        ),
        ("KeyError: 'a'", {}),
        (f"[ 4213.1] {XID}", {"gpu": "0000:b3:00"}),
        (f"[ 4213.1] {LINK}", {"gpu": "0000:b3:00", "link": 8}),
        (f"Jun  1 03:11:47 gn17 kernel: [ 4213.1] {XID}", {"gpu": "0000:b3:00", "node": "gn17"}),
        (
            f"2026-06-01T03:11:47.123456+00:00 gn17 kernel: {XID}",
            {"gpu": "0000:b3:00", "node": "gn17"},
        ),
        ("srun: error: Node failure on gn17", {"node": "gn17"}),
        (
            "slurmstepd: error: *** JOB 12 ON gn3 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
            {},
        ),
        ("gn17:13571:13590 [3] KeyError: 'a'", {"local_rank": 3, "node": "gn17"}),
        ("gn17:13571:13590 [0] KeyError: 'a'", {}),
        ("Jun  1 03:11:47 gn17 python[811]: KeyError: 'a'", {}),
        ("2026-06-01T03:11:47+0000 gn17 python[811]: MemoryError", {"node": "gn17"}),
    ],
)
def test_what_a_line_names(scope, line, wanted):
    assert scope(line) == wanted


def test_who_tells_of_a_peer_is_not_at_fault(scope):
    for exception in (GLOO, NCCL, "ConnectionResetError: [Errno 104] Connection reset by peer"):
        assert scope(*raised(0, exception, TORCH)).get("rank") is None


def test_several_ranks_with_the_same_error_are_a_list(scope):
    assert scope(*raised(3, "KeyError: 'a'"), *raised(1, "KeyError: 'a'")) == {"rank": [1, 3]}
    assert scope(rank_0=["KeyError: 'a'"], rank_7=["KeyError: 'a'"]) == {"rank": [0, 7]}


def test_ranks_with_another_error_are_not_among_them(scope):
    assert scope(
        *raised(3, "torch.OutOfMemoryError: CUDA out of memory."), *raised(1, NCCL, TORCH)
    ) == {"rank": 3}


def test_the_process_that_the_kernel_killed_has_a_rank(scope):
    observer = "2026-11-21T01:30:19.123Z holdfast: rank 1 (pid 4242) was killed by SIGKILL after step 37; it ended first"  # noqa: E501
    assert scope(dmesg=[f"[12.5] {OOM}"], observer=[observer]) == {"rank": 1}
    assert (
        scope(dmesg=[f"[12.5] {OOM.replace('4242', '999')}"], observer=[observer]).get("rank")
        != 999
    )


def test_what_every_rank_says_is_nobodys_fault(scope):
    missing = "ImportError: no module named flash_attn"
    assert scope(*(f"[rank{rank}]: {missing}" for rank in range(60))) == {}
    assert scope(*(f"[default{rank}]:{missing}" for rank in range(8))) == {}
    assert scope(f"[rank0]: {missing}") == {"rank": 0}


def test_ranks_are_named_up_to_a_limit(scope):
    """Test with one rank that works without the error."""
    failed = [f"[rank{rank}]: ImportError: no module named x" for rank in range(1, 61)]
    assert scope(*steps(0, 1), *failed) == {"rank": list(range(1, 61))}
    failed += [f"[rank{rank}]: ImportError: no module named x" for rank in range(61, 2000)]
    assert len(scope(*steps(0, 1), *failed)["rank"]) <= 64


# --- absence -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [4, 8, 64])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_the_one_that_does_not_report_is_at_fault(scope, world, place):
    """Test an absent rank that is known from its steps."""
    absent = {"first": 0, "middle": world // 2, "last": world - 1}[place]
    lines = [line for rank in range(world) for line in steps(rank, 1, 2, 3)]
    lines += [line for rank in range(world) if rank != absent for line in watchdog(rank)]
    assert scope(*lines) == {"rank": absent}


def test_also_where_each_rank_has_a_file(scope):
    """Test a rank with an empty file."""
    logs = {f"rank_{rank}": [] if rank == 3 else watchdog(rank) for rank in range(4)}
    assert scope(**logs) == {"rank": 3}


@pytest.mark.parametrize("world", [4, 8, 64])
@pytest.mark.parametrize("seed", range(4))
def test_the_one_that_is_behind_is_at_fault(scope, world, seed):
    draw = random.Random(seed)
    behind = draw.randrange(world)
    lines = [
        line for rank in range(world) for line in watchdog(rank, 900 if rank == behind else 902)
    ]
    draw.shuffle(lines)
    assert scope(*lines) == {"rank": behind}


def test_where_all_report_the_same_nobody_is_named(scope):
    assert scope(*(line for rank in range(8) for line in watchdog(rank))).get("rank") is None


def test_one_report_alone_names_nobody(scope):
    assert scope(*watchdog(5)).get("rank") is None


def test_reports_that_were_survived_do_not_count(scope):
    early = [line for rank in range(3) for line in watchdog(rank, 7)]
    going_on = [line for step in range(9, 20) for rank in range(4) for line in steps(rank, step)]
    late = [line for rank in (0, 1, 3) for line in watchdog(rank, 900)]
    assert scope(*early, *going_on, *late) == {"rank": 2}


def test_the_labelled_cases(dev_answers):
    """Test that at least 85 of 100 ranks, nodes and GPUs that logs name are found."""

    def names(scope, place, value):
        given = scope.get(place, [])
        given = given if isinstance(given, list) else [given]
        return str(value).lower().split(".")[0] in {str(one).lower().split(".")[0] for one in given}

    for answers in dev_answers.values():
        located = [(case["faulty"], answer.scope) for case, answer in answers if case["faulty"]]
        right = [
            any(
                names(scope, place, value)
                or (place == "rank" and names(scope, "local_rank", value))
                for place, value in faulty.items()
            )
            for faulty, scope in located
        ]
        assert sum(right) >= 0.85 * len(right), [
            one for one, fits in zip(located, right, strict=True) if not fits
        ]
