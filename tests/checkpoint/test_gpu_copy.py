"""Show that a GPU's tensors are saved as they were in the call; without a GPU, the CPU stands in."""

import multiprocessing
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from gpu_stand_in import DEVICE, LARGE, Everything, assert_equal, assert_saved, stand_in
from torch import nn
from waiting import ENDS_S

import holdfast
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.ipc.shared_buffer import Arena, ArenaError
from holdfast.checkpoint.save.plan_cache import PlanCache
from holdfast.checkpoint.snapshot.gpu import xxh3_kernel
from holdfast.checkpoint.snapshot.gpu.copy import DeviceCopy, Taken
from holdfast.checkpoint.snapshot.gpu.memory import DeviceStaging
from holdfast.core.errors import SaveFailed

needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")


@pytest.fixture(autouse=True)
def _gpu_or_stand_in(monkeypatch):
    stand_in(monkeypatch)


@pytest.mark.parametrize("attest", [True, False], ids=["attested", "not attested"])
@pytest.mark.parametrize(
    "room_gib", [None, 0, 0.02], ids=["room to stage", "no room", "little room"]
)
def test_every_step_is_saved_as_it_was_while_training_goes_on(tmp_path, attest, room_gib):
    trained, expected = Everything(), {}
    with holdfast.Checkpointer(
        tmp_path / "c", keep=None, attest=attest, max_device_memory_gib=room_gib, every=1
    ) as ckpt:
        for step in range(1, 5):
            trained.forward_backward()
            trained.optimizer.step()
            ckpt.before_update()
            trained.update()
            expected[step] = trained.clone()
            ckpt.save(step, trained.state)
    for step in (2, 4):
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


@needs_gpu  # on the CPU, CUDA reports 0 bytes
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
