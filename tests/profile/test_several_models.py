"""The phases of a process that trains several models, or one model by several optimizers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.profile import Recording
from holdfast.profile.phases import end_step, start_phases, stop_phases
from holdfast.profile.trained_modules import SILENT_STEPS

STEPS = 3 * SILENT_STEPS


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path) -> Iterator[None]:
    start_phases(tmp_path, rank=0, node="n1", attempt=1)
    yield
    stop_phases()


def phases_of_step(folder: Path, step: int) -> list[str]:
    stop_phases()
    return [one.phase for one in Recording.read(folder).spans if one.step == step]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


GAN_STEP = [
    *("forward", "forward", "backward", "optimizer"),  # the discriminator, of a made batch
    *("forward", "forward", "backward", "optimizer"),  # the generator, through the discriminator
]


def train_gan(generator: nn.Module, discriminator: nn.Module) -> None:
    of_discriminator, of_generator = sgd(discriminator), sgd(generator)
    noise = torch.ones(4, 8)
    for step in range(1, STEPS + 1):
        discriminator(generator(noise).detach()).sum().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        discriminator(generator(noise)).sum().backward()
        of_generator.step()
        end_step(step)


def test_both_models_of_a_gan_have_phases(tmp_path: Path) -> None:
    generator, discriminator = nn.Linear(8, 8), nn.Linear(8, 1)
    train_gan(generator, discriminator)

    assert phases_of_step(tmp_path, STEPS) == GAN_STEP
    assert not generator._forward_hooks
    assert not discriminator._forward_hooks


def test_both_models_below_a_module_that_is_never_called_have_phases(tmp_path: Path) -> None:
    whole = nn.ModuleDict({"generator": nn.Linear(8, 8), "discriminator": nn.Linear(8, 1)})
    train_gan(whole["generator"], whole["discriminator"])

    assert not whole._forward_hooks
    assert phases_of_step(tmp_path, STEPS) == GAN_STEP


def test_a_model_of_two_optimizers_stays_hooked_as_a_whole(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    first, second = sgd(model[0]), sgd(model[1])
    for step in range(1, STEPS + 1):
        model(torch.ones(4, 8)).sum().backward()
        first.step()
        second.step()
        end_step(step)

    assert model._forward_hooks
    assert phases_of_step(tmp_path, STEPS) == ["forward", "backward", "optimizer", "optimizer"]
