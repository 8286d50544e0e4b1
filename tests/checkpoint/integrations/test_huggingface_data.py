"""Test the data of a Trainer that leaves out batches, also of one that is interrupted.

`test_huggingface_trainer.py` trains without these batches.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from deferred import Deferred
from holdfast.core.errors import BadUse
from holdfast.core.left_out import LeftOut

huggingface_data = Deferred("holdfast.checkpoint.integrations.huggingface_data")


def sampler(samples, size, ranks=1, rank=0):
    from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler

    order = SeedableRandomSampler(range(samples), data_seed=5)
    order.generator = torch.Generator()
    batches = BatchSampler(order, size, drop_last=False)
    return batches if ranks == 1 else BatchSamplerShard(batches, ranks, rank)


class Process:
    """The data handling of a Trainer in one process, whose loader reads `ahead` batches ahead."""

    def __init__(self, source, left_out, *, per_step, accumulation=1, state=None, step=0, ahead=0):
        self.data = huggingface_data.TrainerData(source, left_out, accumulation)
        self.per_step, self.ahead, self.step = per_step, ahead, step
        self.passed = self.data.go_on(state, step=step, accumulation_steps=per_step)
        self.epoch_ahead = None

    def steps(self, count):
        """Yield the batches of each step."""
        for _ in range(count):
            if self.epoch_ahead is None:
                self.data.begin_epoch(passed=self.passed)
                entries = iter(self.data)
                assert list(itertools.islice(entries, self.passed)) == [[]] * self.passed
                self.left, self.passed = len(self.data) - self.passed, 0
                self.read, self.epoch_ahead = [], entries
            due = min(self.per_step, self.left)
            more = itertools.islice(self.epoch_ahead, max(0, due + self.ahead - len(self.read)))
            self.read += list(more)
            batches, self.read = self.read[:due], self.read[due:]
            self.left -= due
            self.step += 1
            self.data.took(len(batches))
            if not self.left:
                assert not self.read
                assert next(self.epoch_ahead, None) is None
                self.epoch_ahead = None
            yield batches


@settings(max_examples=60, deadline=None)
@given(
    skips=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=4),
    stops=st.sets(st.integers(1, 14), max_size=3),
    per_step=st.integers(1, 4),
    ahead=st.integers(0, 5),
)
def test_a_trainer_that_is_interrupted_takes_the_order_without_what_is_left_out(
    skips, stops, per_step, ahead
):
    left_out = LeftOut.of((first, first + more) for first, more in skips)
    whole, length = [], len(sampler(23, 3))
    for epoch in range(20):
        source = sampler(23, 3)
        source.sampler.set_epoch(epoch)
        whole += list(source)
    expected = [one for number, one in enumerate(whole, 1) if number not in left_out]
    process = Process(sampler(23, 3), left_out, per_step=per_step, ahead=ahead)
    seen = []
    for step in range(1, 16):
        seen += next(process.steps(1))
        if step in stops:
            process = Process(
                sampler(23, 3), left_out, per_step=per_step, ahead=ahead, state=process.data.state(), step=step
            )  # fmt: skip
    assert length == 8
    assert seen == expected[: len(seen)]
    assert len(seen) >= 15


def test_fewer_ranks_take_the_same_samples_in_each_step():
    """The number of ranks may also change during the run, and change back."""
    left_out = LeftOut.of([(2, 3), (8, 8)])

    def processes(ranks, state=None, step=0):
        more = 4 // ranks
        return [
            Process(
                sampler(48, 3, ranks, rank), left_out, per_step=2 * more, accumulation=more, state=state, step=step
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def step_of(run):
        return sorted(index for one in run for batch in next(one.steps(1)) for index in batch)

    usual, changing, seen = processes(4), processes(4), []
    for step, ranks in enumerate([2, 2, 1, 4, 2, 4, 4, 1], 1):
        seen.append((step_of(usual), step_of(changing)))
        changing = processes(ranks, changing[0].data.state(), step)
    assert all(one == other for one, other in seen)


def test_a_range_that_has_grown_behind_the_position_changes_nothing_after_it():
    first = Process(sampler(24, 3), LeftOut.of([(2, 2)]), per_step=2)
    before = list(first.steps(3))
    grown = Process(
        sampler(24, 3), LeftOut.of([(2, 4)]), per_step=2, state=first.data.state(), step=3
    )
    after = [batch for step in grown.steps(4) for batch in step]
    order = sampler(24, 3)
    order.sampler.set_epoch(0)
    numbered = list(order)
    assert [*itertools.chain(*before), after[0]] == [numbered[0], *numbered[2:]]


def test_a_position_in_other_data_is_refused_if_batches_are_left_out():
    first = Process(sampler(24, 3), LeftOut(), per_step=2)
    list(first.steps(1))
    state = first.data.state()
    again = huggingface_data.TrainerData(sampler(24, 4), LeftOut(), 1)
    assert again.go_on(state, step=1, accumulation_steps=2) == 2
    with pytest.raises(BadUse, match=r"An epoch had 8 batches a rank .* and has 6"):
        huggingface_data.TrainerData(sampler(24, 4), LeftOut.of([(3, 4)]), 1).go_on(
            state, step=1, accumulation_steps=2
        )
    with pytest.raises(BadUse, match="no valid position"):
        huggingface_data.TrainerData(sampler(24, 3), LeftOut(), 1).go_on(
            {**state, "taken": "2"}, step=1, accumulation_steps=2
        )


def test_an_epoch_that_a_callback_ends_early_ends_in_the_data():
    data = huggingface_data.TrainerData(sampler(24, 3), LeftOut(), 1)
    data.begin_epoch()
    next(entries := iter(data))
    assert next(iter(data)) is not None, "somebody looks at the data beside the training"
    next(entries)
    data.took(2)
    assert data.state()["taken"] == 2
    data.begin_epoch()
    again = sampler(24, 3)
    again.sampler.set_epoch(1)
    assert list(data) == list(again)
