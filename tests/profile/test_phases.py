"""The phases of real training loops on this machine's CPU, by hooks that training never feels."""

import copy
import gc
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast.core.phases import note_phase, phase
from holdfast.profile import Recording, Span, phases, trained_modules
from holdfast.profile.phases import (
    SPANS_A_STEP,
    end_step,
    recorder,
    start_phases,
    stop_phases,
    timed_data,
)
from holdfast.profile.trained_modules import MAX_SEARCHES


@pytest.fixture(autouse=True)
def nothing_recorded() -> Iterator[None]:
    yield
    stop_phases()


def spans_of(folder: Path) -> list[Span]:
    stop_phases()
    return list(Recording.read(folder).spans)


def start(folder: Path, **options: Any) -> None:
    start_phases(folder, rank=0, node="n1", attempt=1, **options)


def train(
    model: nn.Module, steps: int, *, loader: DataLoader[Any] | None = None, reports: bool = False
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = itertools.cycle([torch.ones(4, 8)]) if loader is None else iter(loader)
    for step, batch in enumerate(itertools.islice(batches, steps), 1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if reports:
            end_step(step)


def phases_by_step(spans: Sequence[Span]) -> dict[int | None, list[str]]:
    found: dict[int | None, list[str]] = {}
    for one in spans:
        found.setdefault(one.step, []).append(one.phase)
    return found


def test_an_unchanged_loop_gives_data_forward_backward_and_optimizer(tmp_path: Path) -> None:
    start(tmp_path)
    loader = DataLoader([torch.ones(8)] * 20, batch_size=4)

    train(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), 4, loader=loader)

    found = phases_by_step(spans_of(tmp_path))
    assert found[1] == [
        "data",
        "optimizer",
    ]  # the first step of the optimizer shows which model is trained
    assert found[2] == found[3] == found[4] == ["data", "forward", "backward", "optimizer"]


def test_the_spans_of_a_step_follow_each_other(tmp_path: Path) -> None:
    start(tmp_path)
    train(nn.Linear(8, 1), 3)

    spans = spans_of(tmp_path)
    assert len(spans) == 7
    assert all(one.start_ns <= one.end_ns for one in spans)
    assert all(sooner.end_ns <= later.start_ns for sooner, later in itertools.pairwise(spans))


def test_reported_steps_have_the_scripts_numbers(tmp_path: Path) -> None:
    start(tmp_path)
    end_step(99)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (100, 101):
        for _ in range(2):  # micro-batches
            model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        end_step(step)

    found = phases_by_step(spans_of(tmp_path))

    assert found == {
        100: ["optimizer"],
        101: ["forward", "backward", "forward", "backward", "optimizer"],
    }


def test_modules_that_are_given_are_recorded_from_the_first_step(tmp_path: Path) -> None:
    model = nn.Linear(8, 1)
    start(tmp_path, modules=[model])
    train(model, 1)

    assert phases_by_step(spans_of(tmp_path)) == {1: ["forward", "backward", "optimizer"]}


def test_a_forward_without_gradients_is_evaluation(tmp_path: Path) -> None:
    model = nn.Linear(8, 1)
    start(tmp_path, modules=[model])
    with torch.no_grad():
        model(torch.ones(4, 8))
    train(model, 1)

    assert next(one.phase for one in spans_of(tmp_path)) == "evaluation"


class Container(nn.Module):
    """A module that holds a model and is never called, as Lightning's is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 1)


def test_the_parts_of_a_silent_module_are_hooked_in_its_place(tmp_path: Path) -> None:
    start(tmp_path)
    container = Container()
    optimizer = torch.optim.SGD(container.parameters(), lr=0.1)
    for _ in range(6):
        container.model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    assert phases_by_step(spans_of(tmp_path))[6] == ["forward", "backward", "optimizer"]


def test_outputs_of_any_shape_show_the_backward(tmp_path: Path) -> None:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, batch: torch.Tensor) -> dict[str, Any]:
            return {"note": "x", "hidden": [torch.ones(1), (self.layer(batch),)]}

    model = Output()
    start(tmp_path, modules=[model])
    model(torch.ones(4, 8))["hidden"][1][0].sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert [one.phase for one in spans_of(tmp_path)] == ["forward", "backward", "optimizer"]


def test_a_forward_and_a_backward_that_raise_leave_no_wrong_spans(tmp_path: Path) -> None:
    class Fails(nn.Linear):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if batch.shape[0] == 1:
                raise ValueError("too small")
            return super().forward(batch)

    model = Fails(8, 1)
    start(tmp_path, modules=[model])
    with pytest.raises(ValueError, match="too small"):
        model(torch.ones(1, 8))
    output = model(torch.ones(4, 8)).sum()
    output.backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()
    train(model, 2)

    found = phases_by_step(spans_of(tmp_path))
    assert found[2] == ["forward", "backward", "optimizer"]


def test_a_checkpoints_stall_is_recorded_and_a_call_that_saves_nothing_is_not(
    tmp_path: Path,
) -> None:
    start(tmp_path)
    now_ns = time.monotonic_ns()
    note_phase("checkpoint_stall", now_ns - 50_000_000)
    note_phase("checkpoint_stall", time.monotonic_ns())
    end_step(1)

    (span,) = spans_of(tmp_path)
    assert (span.phase, span.step) == ("checkpoint_stall", 1)
    assert span.end_ns - span.start_ns >= 50_000_000


def test_a_hook_that_fails_stops_the_recorder_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(8, 1)
    start(tmp_path, modules=[model])
    one = recorder()
    assert one is not None

    def fails() -> None:
        raise RuntimeError("broken clock")

    monkeypatch.setattr(one, "mark", fails)
    with caplog.at_level(logging.WARNING, "holdfast"):
        train(model, 3, reports=True)

    assert caplog.text.count("records no more phases") == 1
    assert "broken clock" in caplog.text


def test_hooks_that_cannot_be_installed_stop_the_recorder_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_hooks: object) -> None:
        raise ImportError("another PyTorch")

    monkeypatch.setattr(phases._Hooks, "_time_data", fails)
    with caplog.at_level(logging.WARNING, "holdfast"):
        start(tmp_path)
        train(nn.Linear(8, 1), 3, reports=True)

    assert caplog.text.count("records no more phases") == 1


@pytest.mark.filterwarnings("default:Guards may run slower on Python 3.13.0")
def test_a_program_that_is_compiled_whole_holds_no_hook(tmp_path: Path) -> None:
    from torch._dynamo.testing import CompileCounter

    model = nn.Linear(8, 1)
    start(tmp_path, modules=[model])
    frames = CompileCounter()
    compiled = torch.compile(lambda batch: model(batch) + 1, fullgraph=True, backend=frames)

    compiled(torch.ones(4, 8)).sum().backward()

    assert frames.frame_count == 1
    one = recorder()
    assert one is not None
    assert not one.has_failed


def test_no_hook_acts_while_a_cuda_graph_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(8, 1)
    start(tmp_path, modules=[model])
    one = recorder()
    assert one is not None

    def refused(*_: object) -> None:
        pytest.fail("a query of an event makes the capture fail")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(one, "mark", refused)
    monkeypatch.setattr(one, "step", refused)
    train(model, 2, reports=True)


def test_an_optimizer_of_unknown_parameters_causes_few_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []
    monkeypatch.setattr(trained_modules, "outermost_modules", lambda: searches.append(1) or [])
    start(tmp_path)
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(20):
        weight.sum().backward()
        optimizer.step()

    assert len(searches) == MAX_SEARCHES


def test_a_disk_that_hangs_costs_spans_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "WAITING_STEPS", 10)
    monkeypatch.setattr(phases, "WRITE_EVERY_S", 600.0)  # the thread writes at the end alone
    model = nn.Linear(8, 1)
    start(tmp_path, modules=[model])
    train(model, 30)

    spans = spans_of(tmp_path)

    assert {one.step for one in spans} == set(range(1, 11))
    assert Recording.read(tmp_path).dropped_spans == 60


def test_a_step_of_very_many_phases_is_bounded(tmp_path: Path) -> None:
    start(tmp_path)
    for _ in range(SPANS_A_STEP + 7):
        with phase("evaluation"):
            pass
    end_step(1)

    assert len(spans_of(tmp_path)) == SPANS_A_STEP
    assert Recording.read(tmp_path).dropped_spans == 7


def test_a_copy_of_a_hooked_model_holds_no_recorder(tmp_path: Path) -> None:
    model = nn.Linear(8, 1)
    start(tmp_path, modules=[model])

    twin = copy.deepcopy(model)
    stop_phases()

    assert not model._forward_hooks
    twin(torch.ones(4, 8)).sum().backward()  # its hooks find nothing to record


LOAD = """
import sys
sys.modules["holdfast"] = None  # an import of it raises
import torch
for path in sys.argv[1:]:
    model = torch.load(path, weights_only=False)
    print(tuple(model(torch.ones(4, 8)).shape), len(model._forward_hooks))
"""


def test_a_hooked_model_that_is_saved_whole_loads_without_holdfast(tmp_path: Path) -> None:
    model, traced = nn.Linear(8, 1), torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 1)))
    start(tmp_path, modules=[model, traced])
    train(model, 1)
    torch.save(model, tmp_path / "model.pt")
    torch.save(traced, tmp_path / "traced.pt")

    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "model.pt", tmp_path / "traced.pt"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert loaded.stdout.splitlines() == ["(4, 1) 0", "(4, 1) 0"], loaded.stderr
    assert len(model._forward_hooks) == 1
    assert not copy.deepcopy(model)._forward_hooks


def test_a_hooked_model_can_be_scripted_and_stays_hooked(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 1))
    start(tmp_path, modules=[model])
    before = list(model._forward_pre_hooks.items())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript's own
        scripted = torch.jit.script(model)

    assert torch.equal(scripted(torch.ones(4, 8)), model(torch.ones(4, 8)))
    assert list(model._forward_pre_hooks.items()) == before
    assert [one.phase for one in spans_of(tmp_path)] == ["forward"]


def test_everything_is_as_before_once_the_recording_ends(tmp_path: Path) -> None:
    from torch.optim import optimizer
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    before = _BaseDataLoaderIter.__next__, dict(optimizer._global_optimizer_pre_hooks)
    ways_out = nn.Module.__reduce_ex__, torch.jit._recursive.create_script_module
    start(tmp_path)
    assert _BaseDataLoaderIter.__next__ is not before[0]

    stop_phases()

    assert (_BaseDataLoaderIter.__next__, dict(optimizer._global_optimizer_pre_hooks)) == before
    assert (nn.Module.__reduce_ex__, torch.jit._recursive.create_script_module) == ways_out


def test_batches_of_any_iterable_are_data(tmp_path: Path) -> None:
    start(tmp_path)

    assert list(timed_data(iter("ab"))) == ["a", "b"]

    assert [one.phase for one in spans_of(tmp_path)] == ["data", "data"]


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    start(tmp_path)
    one = recorder()
    assert one is not None
    one._pid = os.getpid() + 1  # as if this process were the child
    note_phase("evaluation", 0)
    assert one._spans == []
    one._pid = os.getpid()


def test_the_losses_are_bit_for_bit_those_without_a_recording(tmp_path: Path) -> None:
    def weights() -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        train(model, 5)
        return model[0].weight.detach().clone()  # type: ignore[union-attr]

    plain = weights()
    start(tmp_path)

    assert torch.equal(plain, weights())


def test_communication_is_what_follows_the_last_gradient(tmp_path: Path) -> None:
    delay_s = 0.05

    def slow(
        _state: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        timer = threading.Timer(delay_s, future.set_result, (bucket.buffer(),))
        # A callback that is queued now comes after the one that marks the last gradient.
        torch.autograd.Variable._execution_engine.queue_callback(timer.start)
        return future

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
        model.register_comm_hook(None, slow)
        start(tmp_path)
        train(model, 3)
        spans = spans_of(tmp_path)
    finally:
        torch.distributed.destroy_process_group()

    by_step = phases_by_step(spans)
    assert by_step[2] == by_step[3] == ["forward", "backward", "communication", "optimizer"]
    waits = [one.end_ns - one.start_ns for one in spans if one.phase == "communication"]
    assert min(waits) >= delay_s * 1e9


def test_a_model_that_the_script_drops_is_freed(tmp_path: Path) -> None:
    start(tmp_path)
    model = nn.Linear(8, 1)
    train(model, 3)
    assert model._forward_hooks
    dropped = weakref.ref(model)

    del model
    gc.collect()

    assert dropped() is None
