"""The model of the demonstration is a GPT: causal, and it learns."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from holdfast.demo.model import GPT, GPTConfig

SMALL = GPTConfig(vocabulary_size=32, context=16, layers=2, heads=2, width=32)


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield GPT(SMALL)


def test_logits_for_each_token(model):
    assert model(torch.zeros(3, 16, dtype=torch.long)).shape == (3, 16, 32)
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, 32)


def test_a_future_token_does_not_change_past_logits(model):
    model.eval()
    tokens = torch.randint(32, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 32
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_a_past_token_changes_every_later_logit(model):
    model.eval()
    tokens = torch.randint(32, (1, 16))
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 32
    assert (model(tokens) != model(changed)).any(dim=-1).all()


def test_it_knows_nothing_at_first_and_learns(model):
    tokens = torch.randint(32, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(3.47, abs=0.1)  # ln 32: every byte equally likely
    assert losses[-1] < losses[0] - 0.5


def test_dropout_draws_from_the_torch_generator_in_training_only(model):
    tokens = torch.randint(32, (1, 16))
    before = torch.get_rng_state()
    model.eval()
    model(tokens)
    assert torch.equal(before, torch.get_rng_state())
    model.train()
    model(tokens)
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 10, "heads": 4}, "width is 10: give a multiple of heads, which is 4"),
        ({"layers": 0}, "layers is 0: give at least 1"),
        ({"dropout": 1.0}, r"dropout is 1\.0: give at least 0 and less than 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**sizes)
