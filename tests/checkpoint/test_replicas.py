"""Test state that several ranks hold: which rank writes it, and the errors if it differs."""

import json
from pathlib import Path

import pytest
import torch
from started_ranks import run
from torch.distributed.checkpoint.metadata import MetadataIndex

from holdfast.checkpoint.format.replica_digests import Differing, compare, name_key, pack
from holdfast.checkpoint.snapshot import replicas

SCRIPT = Path(__file__).parent / "replica_ranks.py"


def test_what_may_differ_is_written_by_the_lowest_rank_and_what_an_optimizer_owns_is_spread(
    tmp_path,
):
    run(SCRIPT, tmp_path, 2, "what_differs_comes_from_rank_0", "rank_0_writes_all")


def test_of_three_ranks_the_lowest_that_has_an_entry_writes_it(tmp_path):
    run(SCRIPT, tmp_path, 3, "the_lowest_rank_that_has_it_writes_it")


def test_what_differs_is_named_once_or_refused(tmp_path):
    run(
        SCRIPT,
        tmp_path,
        2,
        "what_differs_is_named_once",
        "what_differs_is_refused",
        "a_refusal_is_raised",
    )


def packed(**digests):
    return pack((name_key(name), 0, digest) for name, digest in digests.items())


def test_each_entry_is_compared_with_the_lowest_rank_that_has_it():
    names = ("a", "b", "c")
    same = packed(a=1, b=2)
    assert compare([([0, 1, 2], same)], names) == Differing()
    assert compare([([3], packed(c=5)), ([0, 1], same), ([2], packed(b=2))], names) == Differing()
    found = compare(
        [
            ([1, 4, 5, 6], packed(a=9, b=2)),
            ([2], packed(b=3, c=6)),
            ([3], packed(c=5)),
            ([0], same),
        ],
        names,
    )
    assert found == Differing(
        count=3, entries=(("a", "ranks 1, 4-6"), ("b", "rank 2"), ("c", "rank 3"))
    )
    assert str(found) == "'a' (ranks 1, 4-6), 'b' (rank 2), 'c' (rank 3)"
    assert Differing.of_json(json.loads(json.dumps(found.as_json()))) == found


def test_of_many_entries_the_first_are_named():
    names = [f"{number:04}" for number in range(500)]
    groups = [([rank], packed(**dict.fromkeys(names, rank))) for rank in range(100)]
    found = compare(groups, names)
    assert found.count == 500
    assert found.entries[0] == ("0000", "ranks 1-99")
    assert (
        str(found) == "'0000' (ranks 1-99), '0001' (ranks 1-99), '0002' (ranks 1-99) and 497 more"
    )
    assert len(json.dumps(found.as_json())) < 10_000


def tensors():
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(5, 7, generator=generator),
        torch.randn((), generator=generator),
        torch.empty(0),
        torch.randn(9, generator=generator).bfloat16(),
        torch.randn(3, 4, generator=generator).t(),
        torch.randn(6, generator=generator)[1:],  # 4 bytes behind a word's begin
        torch.randn(2, dtype=torch.complex64, generator=generator).conj(),
        torch.tensor([True, False, True]),
        torch.arange(300),
    ]


@pytest.fixture(params=["host", "device"])
def digests_of(request, monkeypatch):
    """Return the digest function of the host, or of a GPU (on the CPU, in batches of 64 bytes)."""
    if request.param == "host":
        return replicas.digest_tensors
    monkeypatch.setattr(replicas, "_BATCH_BYTES", 64)
    return replicas.position_sums


def test_equal_bytes_have_equal_digests_wherever_they_lie(digests_of):
    assert digests_of(tensors()) == digests_of([each.clone() for each in tensors()])
    assert digests_of(tensors()) == [digests_of([each])[0] for each in tensors()]
    nan = torch.full((4,), float("nan"))
    assert digests_of([nan]) == digests_of([nan.clone()])


def test_digests_do_not_depend_on_the_size_of_a_batch(monkeypatch):
    before = replicas.position_sums(tensors())
    for batch_bytes in (8, 64, 1 << 10):
        monkeypatch.setattr(replicas, "_BATCH_BYTES", batch_bytes)
        assert replicas.position_sums(tensors()) == before


def test_each_changed_bit_and_each_swap_changes_the_digest(digests_of):
    plain = torch.arange(40, dtype=torch.int64)
    [before] = digests_of([plain])
    found = {before}
    for word in range(len(plain)):
        for bit in (0, 31, 62):
            changed = plain.clone()
            changed[word] ^= 1 << bit
            found.update(digests_of([changed]))
    assert len(found) == 1 + 40 * 3
    swapped = plain.clone()
    swapped[[3, 17]] = plain[[17, 3]]
    assert digests_of([swapped]) != [before]
    assert digests_of([plain.roll(8)]) != [before]


def test_type_and_shape_belong_to_a_digest():
    zeros = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
    ]
    assert len(set(replicas.digest_tensors(zeros))) == len(zeros)


def test_what_forward_may_write_to_meanwhile_is_left_out():
    leaves = {name: torch.ones(2) for name in ("owned", "buffer", "copied")} | {"value": 1}
    index = [MetadataIndex(name, torch.Size([0])) for name in leaves]
    copied = {id(leaves["copied"]): torch.ones(2)}

    def found(**options):
        return replicas.digest_replicas(
            index, leaves, copied, owned=frozenset({"owned"}), **options
        )

    assert len(found(all_stand_still=True)) == 4 * 24
    assert len(found(all_stand_still=False)) == 3 * 24
    leaves["copied"] += 1  # after the call
    assert found(all_stand_still=False) == found(all_stand_still=False)
    leaves["value"] = 2
    assert compare([([0], found(all_stand_still=True))], leaves) == Differing()
