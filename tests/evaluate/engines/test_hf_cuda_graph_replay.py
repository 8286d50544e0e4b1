"""Check that replayed forwards have the same bits, or are refused."""

import pytest
import torch

from holdfast.evaluate.engines.hf.calls import Calls, ReplayedCalls, calls_of
from holdfast.evaluate.engines.hf.cuda_graph_replay import replay_of
from holdfast.evaluate.engines.hf.weights import load_model
from holdfast.evaluate.types.engine import EngineSpec

WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def vectors(length):
    return [torch.randn(length, 8, generator=torch.Generator().manual_seed(length))]


def replayed(forward, *, verify=(3, 20)):
    return replay_of(forward, vectors, record=(5, 9, 16), verify=verify)


def test_operations_and_numbers_that_grow_with_the_length_are_repeated():
    def forward(given):
        (rows,) = given
        positions = torch.arange(2 * rows.shape[0] + 1)[: rows.shape[0]]
        parts = torch.cat([rows @ WEIGHT, rows], dim=-1).split(8, dim=-1)
        return [parts[0].softmax(-1) + positions[:, None], rows.view(rows.shape[0] * 2, 4).float()]

    replay = replayed(forward)
    assert replay is not None
    for length in (1, 2, 40):
        given = vectors(length)
        assert all(map(torch.equal, forward(given), replay(given, length)))


def test_parameters_changed_in_place_are_those_of_the_replay():
    weight = torch.nn.Parameter(WEIGHT.clone())

    def forward(given):
        return [given[0] @ weight]

    replay = replayed(forward)
    with torch.no_grad():
        weight.mul_(3)
    given = vectors(7)
    with torch.inference_mode():
        assert torch.equal(replay(given, 7)[0], forward(given)[0])


def by_its_data(given):
    return [given[0] + 1 if given[0].sum() > 0 else given[0] - 1]


def with_chosen_rows(given):
    return [given[0][given[0][:, 0] > 0]]


def with_chance(given):
    return [given[0] + torch.rand(8)]


def with_dropout(given):
    return [torch.nn.functional.dropout(given[0], 0.5, training=True)]


def with_a_state(given):
    return [STATE.add_(1) + given[0]]


def by_its_length(given):
    return [given[0] + (2.0 if given[0].shape[0] > 10 else 1.0)]


def with_a_power_of_its_length(given):
    return [given[0] + torch.arange(given[0].shape[0] ** 2)[0]]


def with_its_length_in_a_tensor(given):
    return [given[0] * torch.tensor(float(given[0].shape[0]))]


def with_more_steps_when_longer(given):
    rows = given[0]
    for _ in range(rows.shape[0]):
        rows = rows + 1
    return [rows]


STATE = torch.zeros(8)


@pytest.mark.parametrize(
    "forward",
    [
        by_its_data,
        with_chosen_rows,
        with_chance,
        with_dropout,
        with_a_state,
        by_its_length,
        with_a_power_of_its_length,
        with_its_length_in_a_tensor,
        with_more_steps_when_longer,
    ],
)
def test_what_is_more_than_a_list_of_operations_is_not_repeated(forward):
    assert replayed(forward) is None


def test_what_shows_itself_only_at_other_lengths_is_found_by_verifying():
    def forward(given):
        return [given[0] + (1.0 if given[0].shape[0] < 18 else 2.0)]

    assert replayed(forward, verify=(3,)) is not None
    assert replayed(forward, verify=(3, 20)) is None


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_small_models_are_replayed_with_their_own_bits(models, name):
    model = load_model(models[name], EngineSpec(), torch.device("cpu"))
    direct, replayed = Calls(model), calls_of(model, 96)
    assert isinstance(replayed, ReplayedCalls)
    assert None not in (replayed._scores, replayed._read, replayed._read_on)
    with torch.inference_mode():
        for length in range(1, 96, 5):
            tokens = torch.randint(
                2, 300, (1, length), generator=torch.Generator().manual_seed(length)
            )
            assert torch.equal(direct.scores(tokens), replayed.scores(tokens))
            (one, cache), (other, again) = direct.read(tokens), replayed.read(tokens)
            assert torch.equal(one[:, -1], other[:, -1])
            for step in range(4):
                token = tokens[:, step % length][None]
                one, cache = direct.read_on(token, length + step, cache)
                other, again = replayed.read_on(token, length + step, again)
                assert torch.equal(one, other)


def test_a_short_model_is_called_itself(models):
    model = load_model(models["llama"], EngineSpec(), torch.device("cpu"))
    calls = calls_of(model, 16)
    assert calls._scores is None
    tokens = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        assert torch.equal(calls.scores(tokens), Calls(model).scores(tokens))
        _, cache = calls.read(tokens)
        calls.read_on(tokens[:, :1], 3, cache)
