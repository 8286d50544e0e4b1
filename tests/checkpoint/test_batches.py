"""Test that batches continue unchanged for any loader, interruption and left-out batches."""

import itertools
import json
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from started_ranks import run_program
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from holdfast.checkpoint import Batches, Checkpointer
from holdfast.core.errors import BadUse, StateMismatch
from holdfast.core.left_out import ENV_LEAVE_OUT, LeftOut
from holdfast.core.link import take_batches

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torchdata
    from torchdata.stateful_dataloader import StatefulDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")  # which torchdata calls
SAMPLES, SIZE = 23, 4


class Numbers(Dataset):
    """A dataset of numbers, which records the loaded ones."""

    def __init__(self):
        self.loaded = []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(random.sample(range(SAMPLES), SAMPLES))


class StatefulStream(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < SAMPLES:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class OldSampler(Sampler):
    """Draw the whole order from NumPy's generator at once."""

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(np.random.permutation(SAMPLES).tolist())


class OwnIteration(DataLoader):
    """A loader with its own iteration."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + 100


def generator():
    return torch.Generator().manual_seed(7)


def distributed(loader_type):
    sampler = DistributedSampler(Numbers(), 2, 1, seed=3)
    return loader_type(Numbers(), batch_size=2, sampler=sampler, generator=generator())


LOADERS = {
    "in order": lambda: DataLoader(Numbers(), batch_size=SIZE),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=SIZE, shuffle=True),
    "shuffled by its own generator": lambda: DataLoader(
        Numbers(), batch_size=SIZE, shuffle=True, generator=generator()
    ),
    "with replacement": lambda: DataLoader(
        Numbers(),
        batch_size=SIZE,
        sampler=RandomSampler(Numbers(), replacement=True, num_samples=40, generator=generator()),
    ),
    "a sampler of its own": lambda: DataLoader(Numbers(), batch_size=SIZE, sampler=OldSampler()),
    "a batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), SIZE, drop_last=True)
    ),
    "without batches": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "distributed": lambda: distributed(DataLoader),
    "of another class": lambda: OwnIteration(Numbers(), batch_size=SIZE, shuffle=True),
    "a stream": lambda: DataLoader(Stream(), batch_size=SIZE),
    "stateful": lambda: StatefulDataLoader(Numbers(), batch_size=SIZE, shuffle=True),
    "stateful with a generator": lambda: StatefulDataLoader(
        Numbers(), batch_size=SIZE, shuffle=True, generator=generator()
    ),
    "stateful with a sampler of torch's": lambda: StatefulDataLoader(
        Numbers(), batch_size=SIZE, sampler=RandomSampler(Numbers())
    ),
    "stateful with a sampler of its own": lambda: StatefulDataLoader(
        Numbers(), batch_size=SIZE, sampler=OldSampler()
    ),
    "stateful with a stateful stream": lambda: StatefulDataLoader(
        StatefulStream(), batch_size=SIZE
    ),
    "stateful with a stream": lambda: StatefulDataLoader(Stream(), batch_size=SIZE),
    "stateful and distributed": lambda: distributed(StatefulDataLoader),
    "batches of indices": lambda: BatchSampler(RandomSampler(Numbers()), SIZE, drop_last=False),
    "a list": lambda: [[number] for number in range(7)],
    "an iterator": lambda: iter([[number] for number in range(40)]),
}


def seed():
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)


def generators():
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_generators(states):
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def as_list(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def trained(make, count, *, stops=(), left_out=()):
    """Return the batches of a training of `count` steps, each with random draws, as dropout has.

    The training dies after each of the steps in `stops`, and a simulated new process continues.
    """
    seed()
    loader, stops = make(), set(stops)
    batches, seen, saved = Batches(loader, left_out=LeftOut.of(left_out)), [], None
    while len(seen) < count:
        if not isinstance(loader, DataLoader) and iter(loader) is loader and batches.epoch:
            break
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(batches.epoch)
        for batch in batches:
            noise = torch.rand(1).item(), np.random.rand(), random.random()
            seen.append((batches.number, batches.epoch, as_list(batch), *noise))
            if len(seen) in stops or len(seen) == count:
                saved = batches.state_dict(), generators()
                break
        if len(seen) in stops and len(seen) < count:
            stops.remove(len(seen))
            seed()
            loader = make()
            torch.rand(3)  # a new process does other things before its restore
            batches = Batches(loader, left_out=LeftOut.of(left_out))
            batches.load_state_dict(saved[0])
            set_generators(saved[1])
    return seen


@pytest.mark.parametrize("kind", LOADERS)
@settings(max_examples=10, deadline=None)
@given(
    stops=st.sets(st.integers(1, 19), max_size=4),
    firsts=st.sets(st.integers(1, 24), max_size=4),
    length=st.integers(1, 4),
)
def test_an_interrupted_training_gets_what_another_one_gets_without_what_is_left_out(
    kind, stops, firsts, length
):
    make = LOADERS[kind]
    skips = [(first, first + length - 1) for first in firsts]
    whole = trained(make, 20, left_out=skips)
    assert trained(make, 20, stops=stops, left_out=skips) == whole
    left_out = LeftOut.of(skips)
    everything = trained(make, 20 + 16)
    numbers = [number for number, *_ in everything if number not in left_out]
    assert [number for number, *_ in whole] == numbers[: len(whole)]
    # Random draws of a step change later epochs, and samples that are drawn while others are used.
    if kind != "with replacement":
        first = {number: batch for number, epoch, batch, *_ in everything if epoch == 0}
        assert all(batch == first[number] for number, epoch, batch, *_ in whole if epoch == 0)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_batches_are_those_of_the_loader(kind):
    make = LOADERS[kind]
    seed()
    loader = make()
    plain = [as_list(batch) for _ in range(2) for batch in loader]
    seed()
    batches = Batches(make())
    assert [as_list(batch) for _ in range(2) for batch in batches] == plain


WORKERS = """
import json, logging, sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = json.loads(sys.argv[1])
import test_batches
from test_batches import Numbers, RandomSampler, StatefulDataLoader, DataLoader, generator, trained

KINDS = [
    lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2, prefetch_factor=3),
    lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, generator=generator()
    ),
    lambda: StatefulDataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=2, generator=generator()
    ),
]
for make in KINDS:
    without = trained(make, 12, left_out=[(3, 4), (7, 9)])
    stops = [8] if make().persistent_workers else [2, 4, 8]  # an epoch ends with 4
    again = trained(make, 12, stops=stops, left_out=[(3, 4), (7, 9)])
    print(json.dumps([again == without, [one[0] for one in without] == [1, 2, 5, 6, *range(10, 18)]]))
"""


def test_what_workers_have_loaded_ahead_is_not_delivered():
    done = run_program(WORKERS, json.dumps(sys.path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[true, true]"] * 3


def test_what_is_left_out_is_not_loaded():
    loader = DataLoader(Numbers(), batch_size=1)
    batches = Batches(loader, left_out=LeftOut.of([(3, 5)]))
    assert [int(batch) for batch in batches] == [0, 1, *range(5, SAMPLES)]
    assert loader.dataset.loaded == [0, 1, *range(5, SAMPLES)]
    again = Batches(DataLoader(Numbers(), batch_size=1), left_out=LeftOut())
    again.load_state_dict(batches.state_dict())
    assert (again.epoch, again.number, len(again)) == (1, SAMPLES, SAMPLES)


def test_a_resumed_epoch_loads_only_its_rest():
    first = Batches(DataLoader(Numbers(), batch_size=1, shuffle=True), left_out=LeftOut())
    iterator = iter(first)
    for _ in range(20):
        next(iterator)
    loader = DataLoader(Numbers(), batch_size=1, shuffle=True)
    batches = Batches(loader, left_out=LeftOut())
    batches.load_state_dict(first.state_dict())
    assert len(list(batches)) == len(loader.dataset.loaded) == SAMPLES - 20


def epochs_of_four(loop, state=None, *, saves_after=None):
    """Return three epochs of four steps each, of longer epochs, and the state after one of them."""
    batches = Batches(DataLoader(Numbers(), batch_size=1), left_out=LeftOut())
    if state is not None:
        batches.load_state_dict(state)
    seen = []
    for epoch in range(batches.epoch, 3):
        seen += [(epoch, batches.number, int(batch)) for batch in loop(batches)]
        if epoch == saves_after:
            state = batches.state_dict()
    return seen, state


def with_break(batches):
    for count, batch in enumerate(batches, 1):
        yield batch
        if count == 4:
            break


@pytest.mark.parametrize(
    "loop",
    [
        with_break,
        lambda batches: itertools.islice(batches, 4),
        lambda batches: (batch for _, batch in zip(range(4), batches, strict=False)),
    ],
    ids=["break", "islice", "zip"],
)
def test_an_epoch_of_a_fixed_number_of_steps_is_over_after_a_restart_too(loop):
    whole, state = epochs_of_four(loop, saves_after=0)
    assert [sample for _, _, sample in whole] == [0, 1, 2, 3] * 3
    assert state["epoch"] == 1
    assert epochs_of_four(loop, state)[0] == whole[4:]


def test_a_loop_that_another_one_has_replaced_changes_nothing():
    batches = Batches(range(9), left_out=LeftOut())
    old = iter(batches)
    next(old)
    new = iter(batches)
    assert [next(new), next(new)] == [0, 1]
    old.close()
    assert (batches.epoch, batches.number) == (1, 3)
    state = batches.state_dict()
    batches.load_state_dict(state)
    new.close()
    assert (batches.epoch, batches.number) == (1, 3)


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("seedable", [False, True])
def test_a_loader_of_accelerate_goes_on_where_it_was(seedable, epoch):
    import accelerate

    def prepared():
        seed()
        config = accelerate.DataLoaderConfiguration(use_seedable_sampler=seedable, data_seed=5)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
        loader = DataLoader(Numbers(), batch_size=SIZE, shuffle=True)
        return Batches(accelerator.prepare(loader), left_out=LeftOut())

    batches = prepared()
    for _ in range(epoch):
        list(batches)
    iterator = iter(batches)
    first = [next(iterator).tolist() for _ in range(2)]
    saved = batches.state_dict(), generators()
    rest = [batch.tolist() for batch in iterator]
    at_the_end = batches.state_dict(), generators()
    next_epoch = [batch.tolist() for batch in batches]
    assert sorted(itertools.chain(*first, *rest)) == list(range(SAMPLES))
    again = prepared()
    torch.rand(3)
    again.load_state_dict(saved[0])
    set_generators(saved[1])
    assert [batch.tolist() for batch in again] == rest
    assert [batch.tolist() for batch in again] == next_epoch
    begun = prepared()
    begun.load_state_dict(at_the_end[0])
    set_generators(at_the_end[1])
    assert [batch.tolist() for batch in begun] == next_epoch


@pytest.mark.parametrize(
    ("loader", "what"),
    [
        (lambda: DataLoader(Numbers(), batch_size=2), "batch size was 4 .* and is 2"),
        (lambda: DataLoader(range(40), batch_size=SIZE), "length of the data was 23 .* and is 40"),
        (lambda: StatefulDataLoader(Numbers(), batch_size=SIZE), "kind of loader was ordered"),
    ],
)
def test_a_position_in_other_data_is_refused(loader, what):
    first = Batches(DataLoader(Numbers(), batch_size=SIZE), left_out=LeftOut())
    next(iterator := iter(first))
    state = first.state_dict()
    with pytest.raises(BadUse, match=what):
        Batches(loader(), left_out=LeftOut()).load_state_dict(state)
    iterator.close()
    state = first.state_dict()
    Batches(loader(), left_out=LeftOut()).load_state_dict(state)  # a new epoch is always whole
    with pytest.raises(BadUse, match=what):
        Batches(loader(), left_out=LeftOut.of([(7, 8)])).load_state_dict(state)


@pytest.mark.parametrize(
    "broken",
    [
        {"taken": -5},
        {"before": -1},
        {"epoch": 1.5},
        {"taken": "2"},
        {"kind": "stateful"},
        {"order": {"process": {}, "own": {}, "epochs": {}}},
        {"order": {"process": {"others": b"{}"}, "own": {}, "epochs": {}}},
        {"order": {"process": {"others": b"\xff"}, "own": {}, "epochs": {}}},
        {"order": {"process": 7, "own": {}, "epochs": {}}},
        {"order": None},
    ],
)
def test_a_malformed_position_is_refused_and_changes_nothing(broken):
    first = Batches(range(9), left_out=LeftOut())
    iterator = iter(first)
    assert [next(iterator), next(iterator)] == [0, 1]
    state = first.state_dict()
    batches = Batches(range(9), left_out=LeftOut())
    with pytest.raises(BadUse, match="not a position in the data"):
        batches.load_state_dict({**state, **broken})
    with pytest.raises(BadUse, match="not a position in the data"):
        batches.load_state_dict({name: one for name, one in state.items() if name not in broken})
    batches.load_state_dict(state)
    assert list(batches) == list(range(2, 9))


def test_what_is_left_out_without_a_restored_position_is_said_once(caplog):
    batches = Batches(range(9), left_out=LeftOut.of([(2, 3)]))
    assert [list(batches), len(list(batches))] == [[0, 3, 4, 5, 6, 7, 8], 9]
    assert caplog.text.count("no position was restored") == 1
    caplog.clear()
    again = Batches(range(9), left_out=LeftOut.of([(20, 21)]))
    again.load_state_dict(batches.state_dict())
    assert list(again) == [0, 3, 4, 5, 6, 7, 8]
    assert not caplog.text


def test_a_script_that_tells_its_sampler_the_wrong_epoch_goes_on_in_the_right_order():
    def epochs(state=None, *, begin):
        loader = distributed(DataLoader)
        batches = Batches(loader, left_out=LeftOut())
        if state is not None:
            batches.load_state_dict(state)
        seen = []
        for epoch in range(begin, 3):
            loader.sampler.set_epoch(epoch)
            for batch in batches:
                seen.append(batch.tolist())
                if state is None and len(seen) == 9:
                    state = batches.state_dict()
        return seen, state

    whole, state = epochs(begin=0)
    assert epochs(state, begin=0)[0][: len(whole) - 9 - 6] == whole[9:12]


def test_the_position_is_saved_and_restored_with_the_rest(tmp_path):
    def rest(batches):
        return [batch.tolist() for batch in batches]

    for name in ("shuffled", "stateful with a generator"):
        batches = Batches(LOADERS[name](), left_out=LeftOut())
        iterator = iter(batches)
        with Checkpointer(tmp_path / name, every=1, keep=None) as ckpt:
            for step in range(1, 4):
                next(iterator)
                ckpt.save(step, {"model": torch.nn.Linear(1, 1), "batches": batches})
        left = [batch.tolist() for batch in iterator]
        again = Batches(LOADERS[name](), left_out=LeftOut())
        with Checkpointer(tmp_path / name) as ckpt:
            assert ckpt.restore({"model": torch.nn.Linear(1, 1), "batches": again}) == 3
        assert again.number == 3
        assert rest(again) == left


def test_a_checkpoint_from_before_the_batches_were_saved_is_restored_without_them(tmp_path):
    model = torch.nn.Linear(1, 1)
    with Checkpointer(tmp_path, every=1) as ckpt:
        ckpt.save(7, {"model": model})
    other, batches = torch.nn.Linear(1, 1), Batches(range(3), left_out=LeftOut())
    with Checkpointer(tmp_path, every=1) as ckpt:
        state, position = {"model": other}, {"batches": batches}
        with pytest.raises(
            StateMismatch, match=r"no 'batches'\. Restore it once with strict=False"
        ):
            ckpt.restore(state, per_rank=position)
        assert ckpt.restore(state, per_rank=position, strict=False) == 7
        assert torch.equal(other.weight, model.weight)
        assert list(batches) == [0, 1, 2]
        ckpt.save(8, state, per_rank=position)
    again = Batches(range(3), left_out=LeftOut())
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.restore(state, per_rank={"batches": again}) == 8
    assert again.epoch == 1


def test_each_stretch_that_is_left_out_is_reported_once(link):
    batches = Batches(range(10), left_out=LeftOut.of([(1, 2), (5, 5), (9, 12)]))
    assert [list(batches), list(batches)] == [[2, 3, 5, 6, 7], list(range(2, 10))]
    assert link.of("batches_skipped") == [
        {"first": 1, "last": 2, "epoch": 0},
        {"first": 5, "last": 5, "epoch": 0},
        {"first": 9, "last": 10, "epoch": 0},
        {"first": 11, "last": 12, "epoch": 1},
    ]


def test_the_supervisor_names_what_is_left_out_in_the_environment(monkeypatch):
    monkeypatch.setenv(ENV_LEAVE_OUT, "2-3,5-5")
    assert list(Batches("abcdef")) == ["a", "d", "f"]
    monkeypatch.setenv(ENV_LEAVE_OUT, "3-2")
    with pytest.raises(BadUse, match="ranges of batch numbers from 1 on"):
        Batches("abc")


def test_a_report_has_the_batches_since_the_one_before():
    take_batches()
    batches = Batches(range(10), left_out=LeftOut.of([(3, 4)]))
    batches.state_dict()
    iterator = iter(batches)
    reported = []
    for count in (1, 2, 0, 3):
        for _ in range(count):
            next(iterator)
        reported.append(take_batches())
    assert reported == [(1, 1), (2, 5), None, (6, 8)]


def test_what_cannot_work_is_refused():
    with pytest.raises(BadUse, match="give what your loop iterates over"):
        Batches(7)
    with pytest.raises(BadUse, match="in_order"):
        Batches(DataLoader(Numbers(), num_workers=1, in_order=False))
    batches = Batches([1, 2], left_out=LeftOut())
    with pytest.raises(BadUse, match="not a position in the data"):
        batches.load_state_dict({"sampler": 1})
    Batches([3], left_out=LeftOut())
    with pytest.raises(BadUse, match="only the training's loader"):
        next(iter(batches))


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=8))
def test_ranges_are_the_set_of_their_numbers(drawn):
    ranges = [(first, first + more) for first, more in drawn]
    numbers = {number for first, last in ranges for number in range(first, last + 1)}
    left_out = LeftOut.of(ranges)
    assert {number for number in range(80) if number in left_out} == numbers
    assert LeftOut.of_text(left_out.as_text()) == left_out
    between = [range(first, last + 1) for first, last in left_out.between(10, 40)]
    assert {number for one in between for number in one} == numbers & set(range(11, 40))


@pytest.mark.parametrize("text", ["1", "0-3", "4-3", "1-2,", "x", "1-99999999999999999", "1-2 "])
def test_a_text_that_is_no_list_of_ranges_is_refused(text):
    with pytest.raises(BadUse):
        LeftOut.of_text(text)
