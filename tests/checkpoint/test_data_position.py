"""Test the lines in the docs that save the data position: a killed training resumes bit by bit."""

import re
from pathlib import Path

import pytest
from started_ranks import run_program

DOCS = Path(__file__).parents[2] / "docs" / "checkpoints" / "how-to.md"
TRAINING = """
import contextlib, itertools, json, sys, warnings
import torch
from torch.utils.data import DistributedSampler, TensorDataset
warnings.simplefilter("ignore")  # of torchdata
from torchdata.stateful_dataloader import StatefulDataLoader
from holdfast import Checkpointer

torch.set_num_threads(1)
LINES, folder, *DIES_AT = sys.argv[1:]
LENGTH, STEPS = 40, 35  # four epochs


class Died(Exception):
    pass


def train(folder, *, dies_at=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []

    def train_one_step(batch):
        if len(seen) == dies_at:
            raise Died
        (inputs,) = batch
        seen.append(inputs.flatten().tolist())
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with Checkpointer(folder, every=2) as ckpt:
        names = dict(globals(), data=TensorDataset(torch.arange(float(LENGTH))[:, None]), world_size=1, rank=0)
        names |= dict(model=model, optimizer=optimizer, ckpt=ckpt, steps=STEPS, train_one_step=train_one_step)
        exec(LINES, names)
    return seen, [tensor.tolist() for tensor in model.state_dict().values()]


seen, weights = train(f"{folder}/whole")
print(json.dumps(len({sample for batch in seen[:10] for sample in batch})))
for dies_at in map(int, DIES_AT):
    with contextlib.suppress(Died):
        train(f"{folder}/{dies_at}", dies_at=dies_at)
    again, found = train(f"{folder}/{dies_at}")
    print(json.dumps([len(again), again == seen[-len(again):], found == weights]))
"""


WRAPPED = """
import holdfast
from torch.utils.data import DataLoader, RandomSampler
sampler = RandomSampler(data)
sampler.set_epoch = lambda epoch: None
loader, epochs = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2), 4
"""
"""A script around the lines of the docs."""


def lines_of_the_docs(word="StatefulData"):
    (lines,) = (
        each
        for each in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
        if word in each
    )
    return lines


def outcome(lines, folder, *dies_at):
    done = run_program(TRAINING, lines, folder, *dies_at)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_the_docs_say_goes_on_to_the_last_bit(tmp_path, workers):
    lines = lines_of_the_docs().replace("num_workers=2", f"num_workers={workers}")
    samples, *ends = outcome(lines, tmp_path, 3, 10, 25)  # an epoch ends with 10
    assert samples == "40"
    assert ends == [f"[{left}, true, true]" for left in (33, 25, 11)]


def test_wrapped_batches_go_on_to_the_last_bit(tmp_path):
    """The training shuffles with the generator that it also draws from, and workers load ahead."""
    samples, *ends = outcome(WRAPPED + lines_of_the_docs("attach().batches"), tmp_path, 10, 25)
    assert samples == "40"
    assert ends == [f"[{left}, true, true]" for left in (30, 16)]


def test_without_these_lines_it_does_not(tmp_path):
    """Otherwise the test above could not fail."""
    lines = lines_of_the_docs().replace("num_workers=2", "num_workers=0")
    for given, left_out in ((", per_rank=position", ""), (", generator=torch.Generator()", "")):
        assert given in lines
        _, end = outcome(lines.replace(given, left_out), tmp_path / str(len(given)), 3)
        assert end.endswith("false]")
