"""Test the filling of a state: every misfit is an error, and no byte goes to a wrong place."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.checkpoint import Checkpointer
from holdfast.core.errors import BadUse, StateMismatch


def save(folder, state):
    with Checkpointer(folder) as ckpt:
        ckpt.save(1, state).result()


def restore(folder, state):
    return Checkpointer(folder).restore(state)


def trained(*, layers=2, groups=2):
    model = nn.Sequential(*(nn.Linear(3, 3, device="cpu") for _ in range(layers)))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": parameters[number::groups]} for number in range(groups)]
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


class Awkward(nn.Module):
    """A module with a transposed and an empty buffer, which are not read straight into place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("transposed", torch.arange(12.0, device="cpu").view(3, 4).T)
        self.register_buffer("empty", torch.empty(0, 3, device="cpu"))


@pytest.fixture
def mesh():
    """Yield a mesh of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def elsewhere():
    """Make new tensors on another device than the CPU, as `torch.set_default_device("cuda")` does."""
    with torch.device("meta"):
        yield


def test_where_tensors_are_made_by_default_plays_no_part(tmp_path, elsewhere):
    (model, optimizer), awkward = trained(), Awkward()
    save(tmp_path, {"model": model, "optimizer": optimizer, "awkward": awkward, "n": 1})
    before = torch.get_rng_state()
    fresh, _ = trained()
    fresh_optimizer = torch.optim.AdamW(
        [{"params": list(fresh.parameters())[number::2]} for number in range(2)]
    )
    fresh_awkward = Awkward()
    fresh_awkward.transposed.zero_()
    assert (
        restore(
            tmp_path,
            {"model": fresh, "optimizer": fresh_optimizer, "awkward": fresh_awkward, "n": 0},
        )
        == 1
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert fresh_awkward.transposed.equal(awkward.transposed)
    assert all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))
    moments = fresh_optimizer.state_dict()["state"]
    assert all(tensor.is_cpu for state in moments.values() for tensor in state.values())


def test_a_module_without_what_the_checkpoint_has_is_left_as_it_was(tmp_path):
    model, _ = trained()
    save(tmp_path, {"model": model})
    smaller, _ = trained(layers=1)
    before = smaller.state_dict()["0.weight"].clone()
    with pytest.raises(
        StateMismatch,
        match=r"'model' has no '1\.weight', which the checkpoint has; .*Build it with",
    ):
        restore(tmp_path, {"model": smaller})
    assert smaller.state_dict()["0.weight"].equal(before)


class Lenient(nn.Sequential):
    def load_state_dict(self, state, **named):
        return super().load_state_dict(state, **named | {"strict": False})


@pytest.mark.parametrize("way", ["hook", "its own"])
def test_what_a_module_takes_away_by_itself_is_its_own_affair(tmp_path, way):
    model, _ = trained()
    save(tmp_path, {"model": model})
    smaller, _ = trained(layers=1)

    def without_the_second(_module, state, *_arguments):
        for name in [name for name in state if name.startswith("1.")]:
            del state[name]

    if way == "hook":
        smaller.register_load_state_dict_pre_hook(without_the_second)
    else:
        smaller = Lenient(*smaller)
    assert restore(tmp_path, {"model": smaller}) == 1
    assert smaller.state_dict()["0.weight"].equal(model.state_dict()["0.weight"])


def test_an_optimizer_of_other_groups_is_found_before_anything_changes(tmp_path):
    model, optimizer = trained()
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh, _ = trained()
    other = torch.optim.AdamW(fresh.parameters())
    before = fresh.state_dict()["0.weight"].clone()
    with pytest.raises(
        StateMismatch, match="'optimizer' has 1 groups of parameters, the checkpoint has 2"
    ):
        restore(tmp_path, {"model": fresh, "optimizer": other})
    assert fresh.state_dict()["0.weight"].equal(before)


def test_an_object_that_refuses_its_state_is_named(tmp_path):
    class Choosy:
        def state_dict(self):
            return {"n": 1}

        def load_state_dict(self, _state):
            raise KeyError("momentum")

    save(tmp_path, {"choosy": Choosy()})
    with pytest.raises(
        StateMismatch,
        match=r"load_state_dict of 'choosy' failed \(KeyError: 'momentum'\)\. Some tensors ",
    ):
        restore(tmp_path, {"choosy": Choosy()})


def test_a_fresh_optimizer_of_sharded_parameters_is_told_of_what_it_needs(tmp_path, mesh):
    def sharded():
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        return parameter, torch.optim.AdamW([parameter])

    parameter, optimizer = sharded()
    parameter.grad = parameter.detach().clone()
    optimizer.step()
    save(tmp_path, {"optimizer": optimizer})
    with pytest.raises(
        StateMismatch, match=r"has no state yet and sharded parameters: .* in a ShardedOptimizer"
    ):
        restore(tmp_path, {"optimizer": sharded()[1]})
    assert restore(tmp_path, {"optimizer": optimizer}) == 1


@pytest.mark.parametrize("kind", [dict, list])
def test_a_container_that_is_there_twice_is_two_afterwards(tmp_path, kind):
    first, second = ({"n": 1}, {"n": 2}) if kind is dict else ([1], [2])
    save(tmp_path, {"inner": {"a": first, "b": second}, "c": first, "d": second})
    inner = dict.fromkeys("ab", kind())
    state = {"inner": inner, **dict.fromkeys("cd", kind())}
    restore(tmp_path, state)
    assert state == {"inner": {"a": first, "b": second}, "c": first, "d": second}
    assert state["inner"] is inner


def test_one_tensor_takes_what_is_the_same_twice_and_not_what_differs(tmp_path):
    def tied(value):
        weight = torch.full((50_000,), value)
        return {"embedding": weight, "head": weight}

    save(tmp_path / "tied", tied(float("nan")))
    state = tied(0.0)
    restore(tmp_path / "tied", state)
    assert state["embedding"].isnan().all()
    assert state["head"] is state["embedding"]

    save(tmp_path / "untied", {"embedding": torch.ones(50_000), "head": torch.zeros(50_000)})
    with pytest.raises(
        StateMismatch,
        match="'embedding' and 'head' are one tensor in the state, and two that differ",
    ):
        restore(tmp_path / "untied", tied(0.0))


def test_a_sharded_tensor_likewise(tmp_path, mesh):
    def shards(*values):
        return [
            distribute_tensor(torch.full((500, 100), value), mesh, [Shard(0)]) for value in values
        ]

    def tied(value):
        (weight,) = shards(value)
        return {"embedding": weight, "head": weight.detach()}  # as a module's state_dict does

    save(tmp_path / "tied", tied(1.0))
    state = tied(0.0)
    restore(tmp_path / "tied", state)
    assert state["head"].to_local().eq(1).all()

    save(tmp_path / "local", {"embedding": tied(1.0)["embedding"], "head": torch.ones(500, 100)})
    (weight,) = shards(0.0)
    state = {"embedding": weight, "head": weight.to_local()}
    restore(tmp_path / "local", state)
    assert type(state["head"]) is torch.Tensor

    save(tmp_path / "untied", dict(zip(("embedding", "head"), shards(1.0, 0.0), strict=True)))
    with pytest.raises(
        StateMismatch,
        match="'embedding' and 'head' are one tensor in the state, and two that differ",
    ):
        restore(tmp_path / "untied", tied(0.0))


def test_a_tensor_with_one_value_in_several_places_is_left_as_it_was(tmp_path):
    save(tmp_path, {"a": torch.full((3,), 7.0), "b": torch.full((1,), 7.0).expand(5)})
    state = {"a": torch.zeros(3), "b": torch.zeros(1).expand(5)}
    with pytest.raises(
        StateMismatch,
        match=r"'b' has elements that share memory, as after expand: clone\(\) it first",
    ):
        restore(tmp_path, state)
    assert state["a"].eq(0).all()
    state["b"] = state["b"].clone()
    assert restore(tmp_path, state) == 1
    assert state["b"].eq(7).all()


@pytest.mark.parametrize(
    "state", [nn.Linear(2, 2), [1], None, {"a": 1, 2: 3}], ids=["module", "list", "none", "number"]
)
def test_what_is_no_state_is_found_though_there_is_nothing_to_restore(tmp_path, state):
    with pytest.raises(
        BadUse,
        match=r"must be a dict of named entries, not a \w+\. Give \{'model'|Names of entries are text",
    ):
        restore(tmp_path, state)


def test_a_module_that_is_given_as_the_state_is_not_called(tmp_path):
    with (
        pytest.raises(BadUse, match="must be a dict of named entries, not a Linear"),
        Checkpointer(tmp_path, on_failure="warn") as ckpt,
    ):
        ckpt.save(1, nn.Linear(2, 2))
