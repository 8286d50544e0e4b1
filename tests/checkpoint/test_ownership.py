"""Test which tensors an optimizer owns."""

import gc

import torch

from holdfast.checkpoint.snapshot.ownership import OptimizerTensors


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def owned_names(owner, state):
    return {
        name for name, owned in zip(state, owner.owned(list(state.values())), strict=True) if owned
    }


def test_an_optimizer_that_steps_owns_its_parameters_and_not_the_buffers():
    owner = OptimizerTensors()
    model, optimizer = trained()
    state = model.state_dict()
    assert owned_names(owner, state) == set()
    step(model, optimizer)
    assert owned_names(owner, state) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    moments = optimizer.state_dict()["state"][0]
    assert owned_names(owner, moments) == {"step", "exp_avg", "exp_avg_sq"}
    owner.close()


def test_an_added_optimizer_owns_what_it_has_before_its_first_step():
    owner = OptimizerTensors()
    model, optimizer = trained()
    owner.add([optimizer])
    assert "0.weight" in owned_names(owner, model.state_dict())
    assert not any(owner.owned([torch.ones(4), torch.empty(0)]))
    owner.close()


def test_an_optimizer_is_not_kept_alive_and_nothing_is_watched_after_close():
    owner = OptimizerTensors()
    model, optimizer = trained()
    step(model, optimizer)
    weight = model[0].weight
    del model, optimizer
    gc.collect()
    assert owner.owned([weight]) == [False]
    owner.close()
    model, optimizer = trained()
    step(model, optimizer)
    assert not any(owner.owned(list(model.parameters())))
