"""Test that a cause shared by many ranks is paid for once, with two ranks or 512."""

import random

import pytest
from failures import GLOO, TORCH, launcher, raised, steps, watchdog
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose import diagnose, packaged_rules, scan
from holdfast.diagnose.explain.explain import explain, first_end
from holdfast.diagnose.explain.scan import scan_texts
from holdfast.diagnose.logs.files import find_files

ROOTS = {
    "key": raised(0, "KeyError: 'missing'"),
    "memory": raised(0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    "disk": raised(0, "OSError: [Errno 28] No space left on device: '/ckpt/1'"),
}


def explained(lines):
    events = scan_texts(lines, packaged_rules())
    return explain(events, first_end(events))


def said_by(ranks):
    """Return the lines that each of `ranks` ranks prints of the failure, in different words."""
    names = ["".join(chr(97 + int(digit)) for digit in str(rank)) for rank in range(1, ranks)]
    return [
        line
        for rank, name in enumerate(names, 1)
        for line in (
            *watchdog(rank),
            f"[rank{rank}]: NCCL WARN Connection closed by remote peer node-{name}<51022>",
            f"[rank{rank}]: srun: error: node-{name}: task {rank}: Exited with exit code 1",
        )
    ]


@pytest.mark.parametrize("root", ROOTS)
def test_the_cost_of_an_explanation_does_not_grow_with_the_ranks(root):
    few, many = (explained(ROOTS[root] + said_by(ranks)) for ranks in (3, 512))
    assert few.ranked[0].first.text == many.ranked[0].first.text
    assert few.reckonings[0].total == pytest.approx(many.reckonings[0].total)
    assert few.shares[0] == pytest.approx(many.shares[0], abs=0.15)


@settings(max_examples=40, deadline=None)
@given(
    root=st.sampled_from(list(ROOTS)),
    ranks=st.sampled_from([2, 3, 9, 40]),
    seed=st.integers(0, 1 << 32),
)
def test_no_number_of_ranks_and_no_order_changes_the_root(root, ranks, seed):
    draw = random.Random(seed)
    cascade = said_by(ranks)
    draw.shuffle(cascade)
    at = draw.randrange(len(cascade) + 1)
    found = explained([*cascade[:at], *ROOTS[root], *cascade[at:], *launcher(0)])
    assert found.ranked[0].first.text in ROOTS[root][-1]


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(4)), faulty=st.integers(0, 3))
def test_the_rank_that_failed_is_the_root_whatever_its_number_and_file(
    tmp_path_factory, order, faulty
):

    folder = tmp_path_factory.mktemp("job")
    for rank in range(4):
        lines = steps(rank, *range(9)) + (
            raised(rank, "KeyError: 'missing'") if rank == faulty else raised(rank, GLOO, TORCH)
        )
        (folder / f"rank-{rank}.log").write_text("".join(f"{line}\n" for line in lines))
    found = diagnose([folder / f"rank-{rank}.log" for rank in order])
    assert (found.reason, found.scope) == ("KeyError", {"rank": faulty})


def test_a_consequence_hangs_from_what_brought_it_about_and_not_from_the_root():
    """Test a killed rank: the errors of its peers do not raise the cost of the kill."""
    found = explained([*launcher(1, -9), *raised(0, GLOO, TORCH), *raised(2, GLOO, TORCH)])
    assert found.ranked[0].first.rule.id == "launcher-killed"
    assert all(how == "follows" for _, how, _ in found.reckonings[0].others)


def test_a_survived_line_brings_nothing_about(tmp_path):
    """Test watchdogs at the end of a job that survived a disk error."""
    lines = [
        *steps(0, *range(9)),
        "[rank0]: OSError: [Errno 28] No space left on device: '/ckpt/1'",
        *steps(0, *range(9, 99)),
        *raised(1, "KeyError: 'missing'"),
        *watchdog(0),
    ]
    (tmp_path / "job.log").write_text("".join(f"{line}\n" for line in lines))

    events = scan(find_files([tmp_path / "job.log"]).files, packaged_rules())
    found = explain(events, first_end(events))
    hows = {one.first.rule.kind: how for one, how, _ in found.reckonings[0].others}
    assert found.ranked[0].first.rule.reason == "KeyError"
    assert (hows["disk"], hows["collective_timeout"]) == ("unrelated", "follows")
