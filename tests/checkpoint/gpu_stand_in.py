"""Put the CPU in the place of a GPU where there is none, and make states on either one."""

import contextlib
import shutil
import time

import torch
from torch import nn

import holdfast
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.save import engine
from holdfast.checkpoint.snapshot import buffer_pool, plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGE = 3_000_000 if DEVICE == "cuda" else 70_000
"""The number of elements of a tensor that is copied on its own, for every type."""
MIB = 1 << 20


class Stream:
    """A stream whose work is complete at once."""

    def __init__(self, device=None):
        self.device = torch.device(device or DEVICE)

    def wait_event(self, _event):
        pass

    def synchronize(self):
        pass

    def record_event(self):
        return Event()


class Event:
    """An event on such a stream, which is complete at once."""

    def __init__(self, **_):
        self.at_s = time.monotonic()

    def record(self, _stream=None):
        self.at_s = time.monotonic()

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.at_s - self.at_s) * 1000


def stand_in(monkeypatch):
    """Without a GPU, treat tensors of the CPU as tensors of a GPU."""
    if DEVICE == "cuda":
        return
    stream, place = Stream(), plan._place
    monkeypatch.setattr(plan, "_GPU", "cpu")
    # The states of random generators are on the host, also the states of a GPU's generators.
    monkeypatch.setattr(
        plan,
        "_place",
        lambda item, leaf: plan._ON_HOST if ".rng." in item.index.fqn else place(item, leaf),
    )
    monkeypatch.setattr(engine, "current_streams", lambda _: {stream.device: stream})
    monkeypatch.setattr(buffer_pool, "pin", lambda _: False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    for name, stood_in in {
        "Stream": Stream,
        "Event": Event,
        "stream": contextlib.nullcontext,
        "current_stream": lambda _=None: stream,
        "set_device": lambda _: None,
        "synchronize": lambda: None,
        "mem_get_info": lambda _: (8 << 30, 16 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stood_in)


class Everything:
    """A state of all kinds, trained on the GPU."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(700, 900),
            nn.BatchNorm1d(900),
            nn.ReLU(),
            nn.Linear(900, 400),
            nn.Linear(400, 10),
        ).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        whole = torch.randn(2 * LARGE, device=DEVICE)
        self.more = {
            "bfloat16": torch.randn(LARGE, device=DEVICE).to(torch.bfloat16),
            "longer than a chunk": torch.randint(
                0, 256, (MIB + 77,), dtype=torch.uint8, device=DEVICE
            ).repeat(17),
            "transposed": torch.randn(500, 300, device=DEVICE).t(),
            "every other": whole[::2],
            "a view at an odd address": whole.view(torch.uint8)[3 : LARGE + 3],
            "conjugated": torch.randn(LARGE, dtype=torch.complex64, device=DEVICE).conj(),
            "small": [
                torch.full((number % 9,), float(number), device=DEVICE) for number in range(100)
            ],
            "0-d": torch.tensor(3, device=DEVICE),
            "bool": torch.rand(100, device=DEVICE) > 0.5,
            "float8": torch.randn(500, device=DEVICE).to(torch.float8_e4m3fn),
            "NaNs of all bits": {
                "small": torch.arange(0x7F81, 0x7FC0, dtype=torch.int16, device=DEVICE).view(
                    torch.bfloat16
                ),
                "large": torch.full((LARGE,), 0x7F81, dtype=torch.int16, device=DEVICE).view(
                    torch.bfloat16
                ),
                "uint16": torch.arange(100, dtype=torch.int16, device=DEVICE).view(torch.uint16),
                "complex128": torch.randn(50, dtype=torch.complex128, device=DEVICE),
                "complex64": torch.randn(50, dtype=torch.complex64, device=DEVICE),
            },
            "on the host": torch.randn(LARGE),
            "small on the host": torch.arange(5),
            "plain": {"text": "x" * 300, "number": 1.5},
        }
        self.steps = torch.zeros((), dtype=torch.int64)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "more": self.more,
            "steps": self.steps,
        }

    def forward_backward(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(64, 700, device=DEVICE)).square().sum().backward()

    def update(self):
        self.optimizer.step()
        for value in self.more.values():
            if (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.dtype.itemsize >= 2
            ):
                value.mul_(1.5)
        for value in self.more["small"]:
            value.add_(1)
        self.steps.add_(1)

    def clone(self):
        """Return a copy of the present state on the CPU."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "more": self.more,
            "steps": self.steps,
        }
        return torch.utils._pytree.tree_map(
            lambda leaf: leaf.cpu().clone() if torch.is_tensor(leaf) else leaf, state
        )


def leaves_of(tree):
    return torch.utils._pytree.tree_flatten_with_path(tree)[0]


def assert_equal(found, expected):
    found, expected = leaves_of(found), leaves_of(expected)
    assert [path for path, _ in found] == [path for path, _ in expected]
    for (path, one), (_, other) in zip(found, expected, strict=True):
        if torch.is_tensor(one):
            assert one.dtype == other.dtype, path
            assert torch.equal(bytes_of(one), bytes_of(other)), path
        else:
            assert one == other, path


def bytes_of(tensor):
    return tensor.cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def assert_saved(folder, step, expected):
    """Check that the checkpoint of `step`, restored to the GPU, equals `expected`."""
    into = Everything()
    for value in torch.utils._pytree.tree_leaves(into.more):
        if torch.is_tensor(value) and value.numel():
            value.zero_()
    path, copied = step_path(folder, step), folder.parent / f"only-{step}"
    shutil.copytree(path, copied / path.name)
    with holdfast.Checkpointer(copied) as ckpt:
        assert ckpt.restore(into.state) == step
    assert_equal(into.clone(), expected)
