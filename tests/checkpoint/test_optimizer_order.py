"""Test that an optimizer's state returns to its parameters in any order, or is refused by name."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from holdfast.checkpoint import Checkpointer
from holdfast.checkpoint.state import capture as contents
from holdfast.core.errors import StateMismatch

NAMES = ("q", "k", "v")


class Model(nn.Module):
    """Layers of one shape, in an order that may change."""

    def __init__(self, order=NAMES, *, shapes=None, frozen=()):
        super().__init__()
        for name in order:
            layer = nn.Linear(*(shapes or {}).get(name, (4, 4)), bias=False)
            layer.weight.requires_grad = name not in frozen
            setattr(self, name, layer)


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), **options)


def adam_by_name(model, **options):
    return torch.optim.AdamW(model.named_parameters(), **options)


def trained(model, optimizer):
    """Return the model and optimizer after a step with another gradient for each parameter.

    Parameters without gradients have no state.
    """
    for path, parameter in model.named_parameters():
        number = next(place for place, name in enumerate(NAMES) if f"{name}." in path)
        parameter.grad = (
            torch.full_like(parameter, 1.0 + number) if parameter.requires_grad else None
        )
    optimizer.step()
    return model, optimizer


def moments(model, optimizer, key="exp_avg"):
    return {
        name: optimizer.state[getattr(model, name).weight][key]
        for name in NAMES
        if hasattr(model, name)
    }


def are_equal(one, other):
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def save(folder, state, **options):
    with Checkpointer(folder) as ckpt:
        ckpt.save(1, state, **options).result()


def restore(folder, state, **options):
    return Checkpointer(folder).restore(state, **options)


@pytest.fixture
def as_before_names(monkeypatch):
    """Save as versions without parameter names did."""
    monkeypatch.setattr(
        contents.ParameterNames, "of", lambda _self, *parts: tuple({} for _ in parts)
    )


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("make", [adam, adam_by_name])
@pytest.mark.parametrize("make_here", [adam, adam_by_name])
def test_another_order_is_mapped_by_name(tmp_path, make, make_here):
    model, optimizer = trained(*(made := Model(), make(made)))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Model(("k", "v", "q"))
    other = make_here(fresh)
    assert restore(tmp_path, {"model": fresh, "optimizer": other}) == 1
    assert are_equal(moments(fresh, other), moments(model, optimizer))
    names = other.state_dict()["param_groups"][0].get("param_names")
    assert names in (None, [f"{name}.weight" for name in ("k", "v", "q")])
    for each in (model, fresh):
        trained(each, optimizer if each is model else other)
    assert are_equal(dict(fresh.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("of", ["model", "own", "state dict"])
def test_names_come_from_wherever_they_are(tmp_path, of):
    make = adam_by_name if of == "own" else adam
    state_of = {
        "model": lambda m: {"model": m},
        "own": lambda _: {},
        "state dict": lambda m: {"m": m.state_dict()},
    }[of]
    model, optimizer = trained(*(made := Model(), make(made)))
    save(tmp_path, {**state_of(model), "optimizer": optimizer})
    fresh = Model(("v", "q", "k"))
    trained(fresh, other := make(fresh))  # already has a state, of other values
    restore(tmp_path, {**state_of(fresh), "optimizer": other})
    assert are_equal(moments(fresh, other), moments(model, optimizer))


def test_a_plain_state_dict_with_names_likewise(tmp_path):
    model, optimizer = trained(*(made := Model(), adam_by_name(made)))
    save(tmp_path, {"optimizer": optimizer.state_dict()})
    fresh = Model(("v", "q", "k"))
    other = adam_by_name(fresh)
    state = {"optimizer": other.state_dict()}
    restore(tmp_path, state)
    other.load_state_dict(state["optimizer"])
    assert are_equal(moments(fresh, other), moments(model, optimizer))
    assert other.param_groups[0]["param_names"] == ["v.weight", "q.weight", "k.weight"]


def test_wrappers_add_nothing_to_the_names(tmp_path, one_rank):
    model, optimizer = trained(*(made := Model(), adam_by_name(made)))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Model(("k", "v", "q"))
    other = adam_by_name(nn.parallel.DistributedDataParallel(fresh))
    assert other.param_groups[0]["param_names"][0].startswith("module.")
    restore(tmp_path, {"model": fresh, "optimizer": other})
    assert are_equal(moments(fresh, other), moments(model, optimizer))


def test_tied_weights_have_one_name(tmp_path):
    def tied(order):
        model = Model(order)
        model.head = nn.Linear(4, 4, bias=False)
        model.head.weight = model.q.weight
        return model

    model, optimizer = trained(*(made := tied(NAMES), adam(made)))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = tied(("v", "k", "q"))
    other = adam(fresh)
    restore(tmp_path, {"model": fresh, "optimizer": other})
    assert are_equal(moments(fresh, other), moments(model, optimizer))


def test_two_models_with_an_optimizer_each_and_per_rank(tmp_path):
    pairs = {name: trained(*(made := Model(), adam(made))) for name in ("a", "b")}
    mine = trained(*(made := Model(), adam(made)))
    state = {
        f"{kind}_{name}": pair[place]
        for name, pair in pairs.items()
        for place, kind in enumerate(("model", "opt"))
    }
    save(tmp_path, state, per_rank={"model": mine[0], "opt": mine[1]})
    order = ("k", "q", "v")
    fresh = {name: (made := Model(order), adam(made)) for name in ("a", "b")}
    fresh_mine = (made := Model(order), adam(made))
    restored = {
        f"{kind}_{name}": pair[place]
        for name, pair in fresh.items()
        for place, kind in enumerate(("model", "opt"))
    }
    restore(tmp_path, restored, per_rank={"model": fresh_mine[0], "opt": fresh_mine[1]})
    for one, other in ((pairs["a"], fresh["a"]), (pairs["b"], fresh["b"]), (mine, fresh_mine)):
        assert are_equal(moments(*other), moments(*one))


def in_groups(model, groups):
    return torch.optim.AdamW(
        [
            {"params": [getattr(model, name).weight for name in group], "lr": lr}
            for group, lr in groups
        ]
    )


def test_groups_in_another_order_are_mapped_with_their_options(tmp_path):
    model, optimizer = trained(*(made := Model(), in_groups(made, [("qk", 0.5), ("v", 0.25)])))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Model()
    other = in_groups(fresh, [("v", 1.0), ("kq", 1.0)])
    restore(tmp_path, {"model": fresh, "optimizer": other})
    assert are_equal(moments(fresh, other), moments(model, optimizer))
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.5]
    assert other.param_groups[1]["params"][0] is fresh.k.weight


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        (
            [("q", 1.0), ("kv", 1.0)],
            r"'optimizer' has the checkpoint's parameters in other groups \(\[1, 2\]",
        ),
        ([("qkv", 1.0)], "'optimizer' has 1 groups of parameters, the checkpoint has 2"),
        (
            [("qk", 1.0), ("", 1.0)],
            r"'optimizer' has other parameters: it has no 'model\.v\.weight', which",
        ),
    ],
)
def test_other_groups_are_refused_before_anything_changes(tmp_path, groups, named):
    model, optimizer = trained(*(made := Model(), in_groups(made, [("qk", 0.5), ("v", 0.25)])))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Model()
    before = fresh.q.weight.clone()
    with pytest.raises(StateMismatch, match=named):
        restore(tmp_path, {"model": fresh, "optimizer": in_groups(fresh, groups)})
    assert fresh.q.weight.equal(before)


def test_sizes_of_groups_are_compared_where_there_are_no_names(tmp_path):
    _, optimizer = trained(*(made := Model(), in_groups(made, [("qk", 0.5), ("v", 0.25)])))
    save(tmp_path, {"n": torch.ones(1), "optimizer": optimizer})
    number = torch.zeros(1)
    with pytest.raises(
        StateMismatch,
        match=r"'optimizer' has groups of \[1, 2\] parameters, the checkpoint of \[2, 1\]",
    ):
        restore(tmp_path, {"n": number, "optimizer": in_groups(Model(), [("q", 1.0), ("kv", 1.0)])})
    assert number.item() == 0


@pytest.mark.parametrize("make", [adam, adam_by_name])
def test_other_parameters_are_refused_by_name(tmp_path, make):
    model, optimizer = trained(*(made := Model(), make(made)))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Model()
    before = fresh.q.weight.clone()
    named = [
        (name, parameter) for name, parameter in fresh.named_parameters() if name != "k.weight"
    ]
    other = torch.optim.AdamW(
        named if make is adam_by_name else [parameter for _, parameter in named]
    )
    with pytest.raises(
        StateMismatch,
        match=r"other parameters: it has no '(model\.)?k\.weight', which the checkpoint has",
    ):
        restore(tmp_path, {"model": fresh, "optimizer": other})
    assert fresh.q.weight.equal(before)


def test_a_parameter_without_state_stays_without(tmp_path):
    model, optimizer = trained(*(made := Model(frozen=("k",)), adam(made)))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Model(("v", "k", "q"), frozen=("k",))
    other = adam(fresh)
    restore(tmp_path, {"model": fresh, "optimizer": other})
    assert fresh.k.weight not in other.state
    assert other.state[fresh.v.weight]["exp_avg"].equal(optimizer.state[model.v.weight]["exp_avg"])


SHAPES = {"q": (4, 8), "k": (8, 4), "v": (4, 4)}


@pytest.mark.usefixtures("as_before_names")
@pytest.mark.parametrize("kind", ["torch's", "a stranger's"])
def test_moments_that_cannot_be_a_parameters_are_refused_where_names_are_unknown(tmp_path, kind):
    class Stranger(torch.optim.AdamW):
        pass

    make = torch.optim.AdamW if kind == "torch's" else Stranger
    model, optimizer = trained(*(made := Model(shapes=SHAPES), make(made.parameters())))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Model(("k", "q", "v"), shapes=SHAPES)
    before = fresh.q.weight.clone()
    with pytest.raises(
        StateMismatch,
        match=r"'exp_avg' of parameter 0 of 'optimizer' is \[8, 4\] in the checkpoint",
    ):
        restore(tmp_path, {"model": fresh, "optimizer": make(fresh.parameters())})
    assert fresh.q.weight.equal(before)
    same = Model(shapes=SHAPES)
    restore(tmp_path, {"model": same, "optimizer": (other := make(same.parameters()))})
    assert are_equal(moments(same, other), moments(model, optimizer))


def test_moments_are_compared_with_the_parameters_that_were_saved_beside_them(tmp_path):
    class Stranger(torch.optim.AdamW):
        pass

    model, optimizer = trained(*(made := Model(), Stranger(made.parameters())))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    wider = Model(shapes=dict.fromkeys(NAMES, (8, 8)))
    with pytest.raises(
        StateMismatch,
        match=r"'exp_avg' of parameter 0 .* is \[4, 4\] in the .* parameter is \[8, 8\]",
    ):
        restore(tmp_path, {"optimizer": Stranger(wider.parameters())})


class Factored(torch.optim.Optimizer):
    """An optimizer whose state has a parameter's shape only by chance."""

    def __init__(self, params, rank=2):
        super().__init__(params, {"rank": rank})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                rows, columns = parameter.shape
                factors = {
                    "exp_avg": torch.ones(group["rank"], columns),
                    "row": torch.ones(rows),
                    "blocks": [None],
                }
                self.state[parameter].update(
                    factors, codes=torch.ones(rows * columns, dtype=torch.uint8)
                )


@pytest.mark.parametrize("knows_names", [True, False])
def test_state_of_other_shapes_than_its_parameters_is_not_refused(tmp_path, request, knows_names):
    if not knows_names:
        request.getfixturevalue("as_before_names")
    shapes = {"q": (2, 2), "k": (4, 2), "v": (4, 4)}
    model = Model(shapes=shapes)
    optimizer = Factored(model.parameters())
    optimizer.step()
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Model(shapes=shapes)
    other = Factored(fresh.parameters())
    restore(tmp_path, {"model": fresh, "optimizer": other})
    assert are_equal(moments(fresh, other, "codes"), moments(model, optimizer, "codes"))


def test_without_names_the_order_is_that_of_the_positions(tmp_path):
    model, optimizer = trained(*(made := Model(), adam(made)))
    save(tmp_path, {"optimizer": optimizer})
    fresh = Model()
    other = adam(fresh)
    restore(tmp_path, {"optimizer": other})
    assert are_equal(moments(fresh, other), moments(model, optimizer))


class Own(torch.optim.AdamW):
    """An optimizer with its own loading, as wrappers of other optimizers have."""

    def load_state_dict(self, state):
        super().load_state_dict(state)


def test_an_optimizer_that_loads_by_itself_gets_the_order_and_no_refusal(tmp_path):
    model, optimizer = trained(*(made := Model(), Own(made.parameters())))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Model(("k", "v", "q"))
    other = Own(fresh.parameters())
    restore(tmp_path, {"model": fresh, "optimizer": other})
    assert are_equal(moments(fresh, other), moments(model, optimizer))


def test_options_that_the_checkpoint_lacks_are_the_optimizers_own(tmp_path):
    model, optimizer = trained(*(made := Model(), adam(made)))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = Model()
    other = adam(fresh)
    other.param_groups[0]["initial_lr"] = 0.5  # as schedulers record it
    restore(tmp_path, {"model": fresh, "optimizer": other})
    assert other.param_groups[0]["initial_lr"] == 0.5


def test_another_optimizer_in_the_same_checkpointer_is_saved_by_its_own_names(tmp_path):
    model, optimizer = trained(*(made := Model(), adam(made)))
    flipped = torch.optim.AdamW(list(model.parameters())[::-1])
    trained(model, flipped)
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}).result()
        ckpt.save(2, {"model": model, "optimizer": flipped}).result()
    fresh = Model()
    other = adam(fresh)
    assert restore(tmp_path, {"model": fresh, "optimizer": other}) == 2
    assert are_equal(moments(fresh, other), moments(model, flipped))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stock_pytorch_reads_it_as_it_was(tmp_path):
    model, optimizer = trained(*(made := Model(), adam(made)))
    save(tmp_path, {"model": model, "optimizer": optimizer})
    state = {"model": Model().state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "step-0000000001")
    assert state["model"]["q.weight"].equal(model.q.weight)
    assert state["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_placeholder_whose_numbers_name_nothing_is_filled_by_its_keys(tmp_path):
    _, optimizer = trained(*(made := Model(), adam(made)))
    saved = optimizer.state_dict()
    save(tmp_path, {"optimizer": saved})
    blank = {
        "state": {
            number: {key: torch.zeros_like(value) for key, value in saved["state"][number].items()}
            for number in saved["state"]
        },
        "param_groups": [{**saved["param_groups"][0], "params": [0, 0, 0]}],
    }
    restore(tmp_path, {"optimizer": blank})
    assert blank["param_groups"] == saved["param_groups"]
    assert all(
        are_equal(blank["state"][number], saved["state"][number]) for number in saved["state"]
    )
