"""Test `dcp.save`, `dcp.load` and `dcp.async_save` with Holdfast's writer, reader and stager."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_training import Training, assert_same
from started_ranks import run
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from holdfast.checkpoint import Checkpointer, scan, verify
from holdfast.checkpoint.catalog import staging_dir
from holdfast.checkpoint.integrations import dcp_storage
from holdfast.checkpoint.integrations.dcp_staging import SharedStager
from holdfast.checkpoint.integrations.dcp_storage import HoldfastReader, HoldfastWriter, step_path
from holdfast.core.errors import BadUse, DamagedCheckpoint, SaveFailed

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]
SCRIPT = Path(__file__).parent / "dcp_ranks.py"


def a_state(fill=0.0):
    """Return a state of many shapes, types, strides, plain values and nesting."""
    return {
        "large": torch.arange(300_000.0).reshape(300, 1000) + fill,
        "columns": (torch.arange(60.0).reshape(6, 10) + fill)[:, ::2],
        "half": torch.full((7,), 1.5 + fill).bfloat16(),
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(3 + int(fill)),
        "nested": {
            "a": [torch.ones(2) + fill, {"b": torch.zeros(1) + fill}],
            "text": f"t{fill}",
            "pair": (1, fill),
        },
    }


def save(state, path, **options):
    dcp.save(state, checkpoint_id=path, storage_writer=HoldfastWriter(**options))


def load(state, path):
    dcp.load(state, checkpoint_id=path, storage_reader=HoldfastReader())
    return state


def test_what_it_writes_verifies_and_everybody_reads_it(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_storage, "_SHARD_BYTES", 4096)  # several files
    path = step_path(tmp_path, 20)
    save(a_state(), path)
    (info,) = scan(tmp_path)
    assert (info.step, verify(info).state) == (20, "verified")
    assert len(list(path.glob("*.distcp"))) > 1
    assert_same(load(a_state(9.0), path), a_state())

    stock = a_state(9.0)
    dcp.load(stock, checkpoint_id=path)
    assert_same(stock, a_state())
    with Checkpointer(tmp_path) as ckpt:
        ours = a_state(9.0)
        assert ckpt.restore(ours) == 20
    assert_same(ours, a_state())


def test_the_reader_reads_what_a_checkpointer_saved(tmp_path):
    training = Training().run(2)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(2, training.objects)
    fresh = {"model": Training(seed=4).model.state_dict()}
    assert_same(load(fresh, step_path(tmp_path, 2))["model"], training.model.state_dict())


def test_a_step_that_is_not_there_is_said(tmp_path):
    with pytest.raises(
        dcp.api.CheckpointException, match=r"There is no checkpoint .*checkpoint ls"
    ):
        load(a_state(), step_path(tmp_path, 9))


def test_a_flipped_bit_anywhere_is_found(tmp_path):
    path = step_path(tmp_path, 1)
    save(a_state(), path)
    for file in ("__0_0.distcp", ".metadata", "holdfast.json"):
        whole = (path / file).read_bytes()
        for at in (len(whole) // 3, len(whole) // 2):
            damaged = bytearray(whole)
            damaged[at] ^= 16
            (path / file).write_bytes(damaged)
            with pytest.raises(dcp.api.CheckpointException, match="cannot be restored"):
                load(a_state(), path)
        (path / file).write_bytes(whole)
    assert_same(load(a_state(9.0), path), a_state())


class RunsWhenUnpickled:
    def __reduce__(self):
        return (os.mkdir, ("was-run",))


def test_what_would_run_code_is_neither_saved_nor_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match="is not a plain value"):
        save({"a": torch.ones(2), "evil": RunsWhenUnpickled()}, step_path(tmp_path, 1))
    assert scan(tmp_path) == []

    monkeypatch.setattr(dcp_storage, "load_plain", lambda *_: None)  # a malicious writer
    save({"evil": RunsWhenUnpickled()}, step_path(tmp_path, 1))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dcp.api.CheckpointException, match="was not read"):
        load({"evil": 0}, step_path(tmp_path, 1))
    assert not (tmp_path / "was-run").exists()


def test_a_save_that_fails_leaves_the_former_and_the_next_succeeds(tmp_path, monkeypatch):
    path = step_path(tmp_path, 1)
    save(a_state(), path)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.checkpoint.writer.persist.write_file", full)
        writer = HoldfastWriter()
        with pytest.raises(dcp.api.CheckpointException, match="No space left"):
            dcp.save(a_state(1.0), checkpoint_id=path, storage_writer=writer)
    assert_same(load(a_state(9.0), path), a_state())
    dcp.save(a_state(2.0), checkpoint_id=path, storage_writer=writer)
    assert_same(load(a_state(9.0), path), a_state(2.0))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_what_a_dead_save_left_where_folders_cannot_be_locked_is_in_nobodys_way(
    tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError(errno.EBADF, "Bad file descriptor")

    (tmp_path / ".step-0000000001.dcp.tmp").mkdir()
    monkeypatch.setattr(staging_dir.fcntl, "flock", refuse)
    save(a_state(), step_path(tmp_path, 1))
    assert [info.step for info in scan(tmp_path)] == [1]


def test_two_saves_of_one_step_at_a_time_are_refused(tmp_path):
    path = step_path(tmp_path, 1)
    first = HoldfastWriter(path)
    first.set_up_storage_writer(True)
    with pytest.raises(dcp.api.CheckpointException, match="is being saved"):
        save(a_state(), path)
    del first
    save(a_state(), path)
    assert verify(scan(tmp_path)[0]).state == "verified"


def test_ranks_that_opened_different_saves_of_a_step_load_nothing(tmp_path):
    plans = []
    for value in (1.0, 2.0):
        save(a_state(value), step_path(tmp_path, 1))
        reader = HoldfastReader(step_path(tmp_path, 1))
        plans.append(reader.prepare_local_plan(LoadPlan([])))
    assert reader.prepare_global_plan(plans[1:]) == plans[1:]
    with pytest.raises(DamagedCheckpoint, match="saved again meanwhile; load it again"):
        reader.prepare_global_plan(plans)


@pytest.mark.parametrize("name", ["step-20", "checkpoint-20", "step-0000000020.replaced"])
def test_a_name_that_is_no_step_is_refused(tmp_path, name):
    with pytest.raises(BadUse, match="step_path"):
        HoldfastWriter(tmp_path / name)
    with pytest.raises(BadUse, match="step_path"):
        HoldfastReader(tmp_path / name)


def test_the_stager_copies_everything_and_reuses_its_memory(tmp_path):
    stager, where = SharedStager(snapshots=1), set()
    for step in range(3):
        state = a_state(step)
        staged = stager.stage(state)
        state["large"].fill_(-1)
        state["nested"]["a"][0].fill_(-1)
        assert_same(dict(staged), {**a_state(step), "columns": staged["columns"]})
        assert torch.equal(staged["columns"], a_state(step)["columns"])
        assert staged["large"].is_shared()
        where.add(staged["large"].untyped_storage().data_ptr())
        del staged
    stager.close()
    assert len(where) == 1


def test_memory_that_is_still_read_is_not_used_again():
    stager = SharedStager(snapshots=1, timeout_s=0.05)
    staged = stager.stage(a_state())
    with pytest.raises(SaveFailed, match="No earlier save has ended"):
        stager.stage(a_state(1.0))
    assert torch.equal(staged["large"], a_state()["large"])
    waiting = SharedStager(snapshots=1)
    held = [waiting.stage(a_state())]
    threading.Timer(0.05, held.clear).start()
    assert torch.equal(waiting.stage(a_state(1.0))["large"], a_state(1.0)["large"])


def test_asynchronous_saves_hold_what_was_staged(tmp_path):
    stager, state, saves = SharedStager(), a_state(), []
    for step in range(1, 5):
        state["large"].fill_(step)
        saves.append(
            dcp.async_save(
                state,
                checkpoint_id=step_path(tmp_path, step),
                storage_writer=HoldfastWriter(),
                async_stager=stager,
            )
        )
        state["large"].fill_(-step)
    for saved in saves:
        saved.result()
    stager.close()
    for step in range(1, 5):
        assert load(a_state(), step_path(tmp_path, step))["large"].unique().tolist() == [step]


def test_ranks_save_together_and_any_number_of_them_loads(tmp_path):
    """Two gloo ranks save DTensors, later from PyTorch's thread and process; then one rank loads."""
    run(SCRIPT, tmp_path, 2)
    for step in (1, 2, 3):
        whole = load(
            {"sharded": torch.zeros(5, 3), "alike": torch.zeros(2)}, step_path(tmp_path, step)
        )
        assert torch.equal(whole["sharded"], torch.arange(15.0).reshape(5, 3) + step)
        assert torch.equal(whole["alike"], torch.full((2,), float(step)))
    assert [verify(info).state for info in scan(tmp_path)] == ["verified"] * 3


def test_a_sharded_tensor_is_staged_on_the_host_wherever_its_mesh_is(tmp_path):
    """A GPU mesh's tensor is copied to the host, because nothing copies into a GPU tensor."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        mesh = DeviceMesh("meta", [0])  # stands for GPUs: its tensors have no bytes
        on_host = distribute_tensor(torch.arange(8.0), DeviceMesh("cpu", [0]), [Shard(0)])
        spec = DTensorSpec(mesh, (Shard(0),), on_host._spec.tensor_meta)
        sharded = DTensor(on_host.to_local(), spec, requires_grad=False)
        staged = SharedStager().stage({"sharded": sharded})["sharded"]
        assert staged.to_local().equal(torch.arange(8.0))
        assert staged.to_local().is_shared()
        assert staged.placements == sharded.placements
        assert staged.shape == sharded.shape
    finally:
        dist.destroy_process_group()
