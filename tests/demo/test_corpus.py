"""The text that both runs must see alike, and the position in it."""

import pytest
import torch

from holdfast.core.errors import BadUse, NotFound
from holdfast.demo.corpus import Sampler, is_validation, load_corpus


@pytest.fixture
def library(tmp_path):
    """Sixty small files, each of a letter of its own."""
    for index in range(60):
        folder = tmp_path / ("package" if index % 2 else ".")
        folder.mkdir(exist_ok=True)
        (folder / f"module_{index}.py").write_bytes(bytes([index]) * 40)
    return tmp_path


def test_the_standard_library_is_read_alike_twice():
    first, second = load_corpus(limit_bytes=1_000_000), load_corpus(limit_bytes=1_000_000)
    assert first.sha256 == second.sha256
    assert torch.equal(first.train, second.train)
    assert first.train.dtype == torch.uint8
    total = len(first.train) + len(first.validation)
    assert 800_000 < total <= 1_000_000
    assert 0 < len(first.validation) < total / 5


def test_no_file_is_in_both_splits(library):
    corpus = load_corpus(library)
    train, validation = set(corpus.train.tolist()), set(corpus.validation.tolist())
    assert train | validation == set(range(60))
    assert not train & validation
    assert len(corpus.train) + len(corpus.validation) == 60 * 40


def test_a_new_file_moves_no_other_to_the_other_split(library):
    before = load_corpus(library)
    (library / "another.py").write_bytes(bytes([200]) * 40)
    after = load_corpus(library)
    assert set(before.train.tolist()) <= set(after.train.tolist())
    assert set(before.validation.tolist()) <= set(after.validation.tolist())
    assert before.sha256 != after.sha256


@pytest.mark.parametrize("folder", ["test", "site-packages", "package/tests", "idlelib/idle_test"])
def test_tests_and_installed_packages_are_skipped(library, folder):
    before = load_corpus(library)
    (library / folder).mkdir(parents=True)
    (library / folder / "extra.py").write_text("extra")
    assert load_corpus(library).sha256 == before.sha256


def test_about_one_file_in_twenty_is_held_out():
    held_out = sum(is_validation(f"module_{index}.py") for index in range(2000))
    assert 70 < held_out < 130


def test_a_folder_without_source_is_named(tmp_path):
    with pytest.raises(NotFound, match=str(tmp_path)):
        load_corpus(tmp_path)


def sampler(*, seed=0, rank=0):
    text = torch.arange(250, dtype=torch.uint8)
    return Sampler(text, batch_size=3, context=8, seed=seed, rank=rank)


def test_a_target_is_the_byte_that_follows():
    inputs, targets = sampler().draw()
    assert inputs.shape == targets.shape == (3, 8)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_every_window_can_be_drawn():
    text = torch.arange(10, dtype=torch.uint8)
    source = Sampler(text, batch_size=100, context=8, seed=0)
    assert set(source.draw()[0][:, 0].tolist()) == {0, 1}


def test_a_restored_sampler_goes_on_exactly():
    source = sampler()
    source.draw()
    position = source.state_dict()
    expected = [source.draw()[0] for _ in range(3)]
    restored = sampler(seed=7, rank=1)
    restored.load_state_dict(position)
    assert all(torch.equal(batch, restored.draw()[0]) for batch in expected)


def test_ranks_and_seeds_draw_different_batches():
    draws = [sampler(seed=seed, rank=rank).draw()[0] for seed in (0, 1) for rank in (0, 1)]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 4


def test_sampling_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    sampler().draw()
    assert torch.equal(before, torch.get_rng_state())


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(BadUse, match="8 bytes, too few for a context of 8"):
        Sampler(torch.zeros(8, dtype=torch.uint8), batch_size=1, context=8, seed=0)
