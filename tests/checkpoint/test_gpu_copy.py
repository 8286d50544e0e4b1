"""Test snapshots of a GPU's tensors; without a GPU, the CPU stands in, with immediate copies."""

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from waiting import ENDS_S

import holdfast
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.ipc.shared_buffer import Arena, ArenaError
from holdfast.checkpoint.save import engine
from holdfast.checkpoint.save.plan_cache import PlanCache
from holdfast.checkpoint.snapshot import buffer_pool, plan
from holdfast.checkpoint.snapshot.gpu import xxh3_kernel
from holdfast.checkpoint.snapshot.gpu.copy import DeviceCopy, Taken
from holdfast.checkpoint.snapshot.gpu.memory import DeviceStaging
from holdfast.core.errors import SaveFailed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")
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


@pytest.fixture(autouse=True)
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
                0, 256, (17 * MIB + 77,), dtype=torch.uint8, device=DEVICE
            ),
            "transposed": torch.randn(500, 300, device=DEVICE).t(),
            "every other": whole[::2],
            "a view at an odd address": whole.view(torch.uint8)[3 : LARGE + 3],
            "conjugated": torch.randn(LARGE, dtype=torch.complex64, device=DEVICE).conj(),
            "small": [
                torch.full((number % 9,), float(number), device=DEVICE) for number in range(500)
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


@pytest.mark.parametrize("attest", [True, False], ids=["attested", "not attested"])
@pytest.mark.parametrize(
    "room_gib", [None, 0, 0.02], ids=["room to stage", "no room", "little room"]
)
def test_every_step_is_saved_as_it_was_while_training_goes_on(tmp_path, attest, room_gib):
    trained, expected = Everything(), {}
    with holdfast.Checkpointer(
        tmp_path / "c", keep=None, attest=attest, max_device_memory_gib=room_gib, every=1
    ) as ckpt:
        for step in range(1, 9):
            trained.forward_backward()
            trained.optimizer.step()
            ckpt.before_update()
            trained.update()
            expected[step] = trained.clone()
            ckpt.save(step, trained.state)
    for step in (2, 8):
        assert_saved(tmp_path / "c", step, expected[step])


def test_on_a_stream_of_the_users_own(tmp_path):
    trained, expected = Everything(), {}
    with (
        holdfast.Checkpointer(tmp_path / "c", keep=None, every=1) as ckpt,
        torch.cuda.stream(torch.cuda.Stream(DEVICE)),
    ):
        for step in range(1, 5):
            trained.forward_backward()
            ckpt.before_update()
            trained.update()
            expected[step] = trained.clone()
            ckpt.save(step, trained.state)
    for step in (1, 4):
        assert_saved(tmp_path / "c", step, expected[step])


def test_without_triton_the_cpu_digests(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(xxh3_kernel, "available", lambda: False)
    trained = Everything()
    with holdfast.Checkpointer(tmp_path / "c", every=1) as ckpt:
        for step in range(1, 4):
            ckpt.before_update()
            trained.update()
            expected = trained.clone()
            ckpt.save(step, trained.state)
    assert "through the CPU to digest it" in caplog.text
    assert_saved(tmp_path / "c", 3, expected)


@pytest.fixture
def gate(monkeypatch):
    """Hold back the copies of later saves until the gate is set."""
    opened, order = threading.Event(), DeviceCopy.order
    opened.set()

    def later(self, *arguments):
        opened.wait()
        return order(self, *arguments)

    monkeypatch.setattr(DeviceCopy, "order", later)
    return opened


def test_weights_that_change_before_they_are_copied_are_found_and_named(tmp_path, gate):
    weights = {name: torch.randn(LARGE, device=DEVICE) for name in "abc"}
    with holdfast.Checkpointer(
        tmp_path, every=1, max_device_memory_gib=0, on_failure="warn"
    ) as ckpt:
        ckpt.save(1, {"weights": weights}).result()
        ckpt.before_update()
        gate.clear()
        handle = ckpt.save(2, {"weights": weights})
        weights["b"].data.view(torch.int32)[5] ^= 1  # changes no version
        torch.cuda.synchronize()
        gate.set()
        with pytest.raises(SaveFailed, match=r"'weights\.b'"):
            handle.result()
        assert ckpt.save(3, {"weights": weights}).result() == step_path(tmp_path, 3)


def test_a_change_that_pytorch_knows_of_is_found_without_attestation(tmp_path, gate):
    weights = {name: torch.randn(LARGE, device=DEVICE, requires_grad=True) for name in "abc"}
    optimizer = torch.optim.SGD(weights.values())  # all other tensors are copied in the call
    with holdfast.Checkpointer(
        tmp_path, every=1, max_device_memory_gib=0, on_failure="warn", attest=False
    ) as ckpt:
        optimizer.step()
        ckpt.save(1, {"weights": weights}).result()
        ckpt.before_update()
        gate.clear()
        handle = ckpt.save(2, {"weights": weights})
        with torch.no_grad():
            weights["c"].add_(1)
        gate.set()
        with pytest.raises(SaveFailed, match=r"'weights\.c' changed"):
            handle.result()


def test_an_update_after_the_fence_is_no_change_while_the_copy_is_still_under_way(
    tmp_path, monkeypatch
):
    opened, order = threading.Event(), DeviceCopy.order
    opened.set()

    def end_later(self, *arguments):
        copies = order(self, *arguments)
        yield next(copies)
        opened.wait()
        yield from copies

    monkeypatch.setattr(DeviceCopy, "order", end_later)
    weights = {name: torch.randn(LARGE, device=DEVICE) for name in "abc"}
    expected = {name: value.cpu().clone() for name, value in weights.items()}
    with holdfast.Checkpointer(tmp_path, every=1, max_device_memory_gib=0) as ckpt:
        ckpt.save(1, {"weights": weights}).result()
        ckpt.before_update()
        opened.clear()
        handle = ckpt.save(2, {"weights": weights})
        ckpt.before_update()
        for value in weights.values():
            value.add_(1)
        opened.set()
        assert handle.result() == step_path(tmp_path, 2)
        ckpt.restore(
            into := {"weights": {name: torch.empty_like(value) for name, value in weights.items()}}
        )
    assert_equal(into, {"weights": expected})


def test_what_is_staged_may_change_at_once(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(Taken, "window_s", 0.0)  # no time for a copy to the host: all is staged
    weights = {name: torch.randn(LARGE, device=DEVICE) for name in "abc"}
    expected = {name: value.cpu().clone() for name, value in weights.items()}
    with holdfast.Checkpointer(tmp_path, every=1) as ckpt:
        handle = ckpt.save(1, {"weights": weights})
        ckpt.before_update()
        handle.result()
        gate.clear()
        handle = ckpt.save(2, {"weights": weights})
        for value in weights.values():
            value.fill_(-1)
        torch.cuda.synchronize()
        gate.set()
        handle.result()
        ckpt.restore(
            into := {"weights": {name: torch.empty_like(value) for name, value in weights.items()}}
        )
    assert_equal(into, {"weights": expected})


@needs_gpu
def test_the_cpu_does_not_wait_at_the_fence_and_the_gpu_does(tmp_path):
    weights = nn.Parameter(torch.zeros(250_000_000, device=DEVICE))  # 1 GB takes 20 ms
    weights.grad = torch.randn_like(weights)
    optimizer = torch.optim.SGD([weights])
    with holdfast.Checkpointer(tmp_path, every=1, max_device_memory_gib=0, attest=False) as ckpt:
        ckpt.save(1, {"weights": weights}).result()
        optimizer.step()  # else a save returns only after the copy
        expected = weights.detach().cpu()
        ckpt.save(2, {"weights": weights})
        job = ckpt._engine.fence._staging
        ckpt.before_update()
        assert not job.taken[0].unstaged.query(), "it is being copied"
        optimizer.step()
        ckpt.wait()
        ckpt.restore(into := {"weights": torch.empty_like(weights)})
    assert torch.equal(into["weights"].cpu(), expected)


@pytest.mark.parametrize("attest", [True, False], ids=["attested", "not attested"])
def test_a_state_that_has_gained_tensors_is_seen_in_the_call_where_all_is_digested(
    tmp_path, attest
):
    """An optimizer's state grows so in its first step."""
    model = nn.Linear(40, 50).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    with holdfast.Checkpointer(tmp_path / "c", keep=None, attest=attest) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}).result()
        ckpt._engine._shape._devices._digests = attest  # as with Triton
        model(torch.randn(3, 40, device=DEVICE)).sum().backward()
        optimizer.step()
        saved = ckpt.save(2, {"model": model, "optimizer": optimizer})
        assert bool(saved.result()) is attest


def test_a_thread_that_asks_a_gpu_is_on_it(tmp_path, monkeypatch):
    """A query on the default GPU would create a context there: half a GB of another rank's memory."""
    trained, on, asked = Everything(), {}, []
    query, set_device = torch.cuda.Event.query, torch.cuda.set_device

    def set_device_and_note(device):
        set_device(device)
        on[threading.get_ident()] = device

    def query_and_note(event):
        asked.append((threading.current_thread(), on.get(threading.get_ident())))
        return query(event)

    monkeypatch.setattr(torch.cuda, "set_device", set_device_and_note)
    monkeypatch.setattr(torch.cuda.Event, "query", query_and_note)
    with holdfast.Checkpointer(tmp_path / "c", keep=None, every=1) as ckpt:
        ckpt.save(1, trained.state).result()
        ckpt.before_update()
        os.kill(
            ckpt._engine._writer.pid, signal.SIGSTOP
        )  # the fence is passed before the save is durable
        saved = ckpt.save(2, trained.state)
        ckpt.before_update()
        os.kill(ckpt._engine._writer.pid, signal.SIGCONT)
        saved.result()
    beside = [device for thread, device in asked if thread is not threading.main_thread()]
    assert beside
    assert None not in beside


def test_a_copy_that_breaks_off_is_over_before_what_it_reads_is_let_go(tmp_path, monkeypatch):
    trained, told = Everything(), []
    close, release, advance = DeviceCopy.close, Taken.release, Arena.advance

    def fail(*_):
        raise ArenaError("its writing has failed")

    def note(what, work):
        return lambda one: (told.append(what), work(one))[1]

    with holdfast.Checkpointer(tmp_path / "c", keep=None, on_failure="warn") as ckpt:
        ckpt.save(1, trained.state).result()
        with monkeypatch.context() as patch:
            patch.setattr(DeviceCopy, "close", note("over", close))
            patch.setattr(Taken, "release", note("let go", release))
            patch.setattr(Arena, "advance", fail)
            with pytest.raises(SaveFailed):
                ckpt.save(2, trained.state).result()
        assert told[:2] == ["over", "let go"]
        assert Arena.advance is advance
        assert ckpt.save(3, trained.state).result()


def train_a_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).to(DEVICE)
    with holdfast.Checkpointer(folder / "saves", keep=None) as ckpt:
        for step in (1, 2, 3):
            saved = ckpt.save(step, {"model": model})
            ckpt._engine.fence.was_passed = True
            model(torch.randn(16, 4, device=DEVICE))
            assert saved.result(), "rank"
    dist.destroy_process_group()


@pytest.mark.skipif(DEVICE == "cuda", reason="a process that is forked has no CUDA")
def test_what_a_forward_pass_changes_and_another_rank_writes_is_that_rank_s_to_look_after(tmp_path):
    """PyTorch divides the writing of shared tensors among the ranks."""
    ranks = [
        multiprocessing.get_context("fork").Process(target=train_a_rank, args=(rank, tmp_path))
        for rank in (0, 1)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(ENDS_S)
        each.kill()
    assert [each.exitcode for each in ranks] == [0, 0]
    assert [info.step for info in holdfast.checkpoint.scan(tmp_path / "saves")] == [3, 2, 1]


@pytest.mark.parametrize("attest", [True, False], ids=["attested", "not attested"])
def test_who_breaks_off_a_call_by_ctrl_c_may_save_again(tmp_path, monkeypatch, attest):
    trained = Everything()
    with holdfast.Checkpointer(tmp_path / "c", keep=None, attest=attest) as ckpt:
        ckpt.save(1, trained.state).result()
        ckpt.before_update()
        take = PlanCache.take

        def interrupted(*arguments, **named):
            take(*arguments, **named)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(PlanCache, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(2, trained.state)
        saving = threading.Thread(target=lambda: ckpt.save(3, trained.state).result(), daemon=True)
        saving.start()
        saving.join(ENDS_S)
        assert not saving.is_alive()
    assert_saved(tmp_path / "c", 3, trained.clone())


def test_where_the_gpu_has_no_memory_left_the_update_waits_instead(tmp_path, monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(DeviceStaging, "__init__", full)
    trained = Everything()
    with holdfast.Checkpointer(tmp_path / "c", every=1) as ckpt:
        for step in range(1, 4):
            ckpt.before_update()
            trained.update()
            expected = trained.clone()
            ckpt.save(step, trained.state)
    assert_saved(tmp_path / "c", 3, expected)


def test_a_state_that_moves_to_the_cpu_is_planned_anew(tmp_path):
    weights = {name: torch.randn(LARGE, device=DEVICE) for name in "abc"}
    with holdfast.Checkpointer(tmp_path, every=1) as ckpt:
        for step, place in enumerate((DEVICE, "cpu", DEVICE, DEVICE), 1):
            moved = {name: value.to(place) for name, value in weights.items()}
            ckpt.save(step, {"weights": moved}).result()
            ckpt.restore(
                into := {
                    "weights": {name: torch.empty_like(value) for name, value in moved.items()}
                }
            )
            assert_equal(into, {"weights": weights})


@pytest.mark.parametrize("attest", [True, False], ids=["attested", "not attested"])
def test_the_same_tensors_in_another_order_keep_their_names(tmp_path, attest):
    weights = {
        name: torch.full((LARGE,), float(number), device=DEVICE)
        for number, name in enumerate("abcd")
    }
    small = {
        name: torch.full((3,), float(number), device=DEVICE) for number, name in enumerate("abcd")
    }
    with holdfast.Checkpointer(tmp_path, every=1, attest=attest) as ckpt:
        ckpt.save(1, {"weights": weights, "small": small}).result()
        turned = {
            name: dict(reversed(tensors.items()))
            for name, tensors in (("small", small), ("weights", weights))
        }
        for step in (2, 3):
            ckpt.save(step, turned).result()
            into = {
                name: {each: torch.empty_like(value) for each, value in tensors.items()}
                for name, tensors in turned.items()
            }
            assert ckpt.restore(into) == step
            assert_equal(into, turned)


@pytest.mark.parametrize("change", ["the order", "what was one tensor is two"])
def test_a_shape_that_differs_while_the_training_goes_on_is_left_out_and_planned_by_the_next_save(
    tmp_path, change, caplog
):
    weights = {
        name: torch.full((LARGE,), float(number), device=DEVICE)
        for number, name in enumerate("abcd")
    }
    if change == "what was one tensor is two":
        weights["b"] = weights["a"]
    state = {"weights": weights, "log": "x"}
    with holdfast.Checkpointer(tmp_path, every=1, attest=False) as ckpt:
        ckpt.save(1, state).result()
        ckpt.before_update()
        if change == "the order":
            state = {"weights": dict(reversed(weights.items())), "log": "x"}
        else:
            weights["b"] = weights["b"].clone() + 1
        assert ckpt.save(2, state).result() is None
        assert "Step 2 is not saved: the state has another shape" in caplog.text
        ckpt.save(3, state).result()
        into = {
            "weights": {name: torch.empty_like(value) for name, value in weights.items()},
            "log": "",
        }
        assert ckpt.restore(into) == 3
    assert_equal(into, {"weights": dict(weights), "log": state["log"]})


GROWN = {
    "a text": {"log": "x" * 5000},
    "a list": {"losses": [1.0] * 500},
    "by an entry": {"best": 0.5},
}


@pytest.mark.parametrize("attest", [True, False], ids=["attested", "not attested"])
@pytest.mark.parametrize("grown", GROWN)
def test_a_save_whose_plain_values_have_grown_is_made_though_the_training_goes_on(
    tmp_path, attest, grown
):
    """A log grows with each save, and no save may be skipped for that."""
    weights = {
        name: torch.full((LARGE,), float(number), device=DEVICE)
        for number, name in enumerate("abcd")
    }
    plain = {"log": "x", "losses": [1.0], "step": 1}
    with holdfast.Checkpointer(tmp_path, every=1, attest=attest) as ckpt:
        ckpt.save(1, {"weights": weights, "plain": plain}).result()
        ckpt.before_update()
        plain = {**plain, "step": 2, **GROWN[grown]}
        assert ckpt.save(2, {"weights": weights, "plain": plain}).result() == step_path(tmp_path, 2)
        into = {
            "weights": {name: torch.empty_like(value) for name, value in weights.items()},
            "plain": {},
        }
        assert ckpt.restore(into) == 2
    assert_equal(into, {"weights": weights, "plain": plain})


@pytest.mark.parametrize("value", ["step 2", [2.0]], ids=["a text", "a list"])
def test_a_value_that_was_none_at_the_plan_makes_no_later_call_wait_for_good(
    tmp_path, monkeypatch, value
):
    weights = {
        name: torch.full((LARGE,), float(number), device=DEVICE) for number, name in enumerate("ab")
    }
    fits, take = [], PlanCache.take

    def record(*arguments, **named):
        fits.append(take(*arguments, **named))
        return fits[-1]

    with holdfast.Checkpointer(tmp_path, every=1, attest=False) as ckpt:
        ckpt.save(1, {"weights": weights, "best": None}).result()
        ckpt.before_update()
        monkeypatch.setattr(PlanCache, "take", record)
        for step in (2, 3):
            assert ckpt.save(step, {"weights": weights, "best": value}).result() == step_path(
                tmp_path, step
            )
    assert fits[-1]


@needs_gpu
def test_twenty_thousand_tensors_reach_the_host_as_one(tmp_path):
    experts = {
        f"expert{number}": torch.full((2500,), float(number), device=DEVICE)
        for number in range(20_000)
    }
    expected = {name: value.cpu() for name, value in experts.items()}
    with holdfast.Checkpointer(tmp_path, every=1) as ckpt:
        ckpt.save(1, {"experts": experts}).result()
        ckpt.save(2, {"experts": experts})
        for value in experts.values():
            value.zero_()  # packed in the call
        ckpt.wait()
        ckpt.restore(
            into := {"experts": {name: torch.empty_like(value) for name, value in experts.items()}}
        )
    assert_equal(into, {"experts": expected})


def test_snapshots_take_no_more_of_the_gpu_with_each_save(tmp_path):
    trained = Everything()
    taken = []
    with holdfast.Checkpointer(tmp_path / "c", every=1) as ckpt:
        for step in range(1, 25):
            trained.forward_backward()
            ckpt.before_update()
            trained.update()
            ckpt.save(step, trained.state).result()
            taken.append(torch.cuda.memory_allocated())
    assert max(taken[12:]) <= max(taken[:12])
