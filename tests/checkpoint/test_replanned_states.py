"""Show that a state whose shape has changed since the last save is planned again and saved whole."""

import copy

import torch
from checkpoint_training import Wide, assert_same
from waiting import ENDS_S

from holdfast.checkpoint import Checkpointer

SHAPES = {
    "a new entry": ({"a": torch.ones(3)}, {"a": torch.ones(3), "b": torch.ones(4)}),
    "one less": ({"a": torch.ones(3), "b": torch.ones(4)}, {"a": torch.ones(3)}),
    "another shape": ({"a": torch.ones(3)}, {"a": torch.ones(1, 3)}),
    "another type": ({"a": torch.ones(3)}, {"a": torch.ones(3, dtype=torch.float64)}),
    "a tensor for a plain value": ({"a": 1}, {"a": torch.ones(3)}),
    "a plain value for a tensor": ({"a": torch.ones(3)}, {"a": 1}),
    "a longer text": ({"a": "x"}, {"a": "x" * 10_000}),
    "a growing list": ({"a": [1]}, {"a": list(range(1000))}),
    "a list of more tensors": ({"a": [torch.ones(1)]}, {"a": [torch.ones(1), torch.ones(1)]}),
    "a list for a dict": ({"a": {"0": torch.ones(1)}}, {"a": [torch.ones(1)]}),
    "numbers for texts as keys": ({"a": {"0": torch.ones(1)}}, {"a": {0: torch.ones(1)}}),
    "a new empty dict": ({"a": {"t": torch.ones(1)}}, {"a": {"t": torch.ones(1), "e": {}}}),
}


def test_a_state_of_another_shape_is_planned_anew(tmp_path):
    expected = {}
    with Checkpointer(tmp_path, keep=None) as ckpt:
        for before, after in copy.deepcopy(list(SHAPES.values())):
            for state in (before, before, after, after):
                expected[len(expected) + 1] = state
                ckpt.save(len(expected), {"s": state}).result(ENDS_S)
    for step in range(2, len(expected) + 1, 2):
        found = {"s": {}}
        assert Checkpointer(tmp_path, read_only=True).restore(found, step=step) == step
        assert_same(found, {"s": expected[step]}, f"{list(SHAPES)[(step - 1) // 4]}, step {step}")


def test_a_new_group_of_parameters_is_saved_from_the_next_call_on(tmp_path):
    training, ckpt = Wide().run(2), Checkpointer(tmp_path)
    ckpt.save(2, training.objects)
    head = torch.nn.Linear(2, 2)
    training.optimizer.add_param_group({"params": head.parameters()})
    training.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, T_max=50)
    training.model.append(torch.nn.Identity())
    head(torch.ones(2)).sum().backward()
    training.run(2)
    expected = copy.deepcopy(training.optimizer.state_dict())
    ckpt.save(4, training.objects).result(ENDS_S)
    state = {"optimizer": {}}
    assert Checkpointer(tmp_path).restore(state) == 4
    assert_same(state["optimizer"], expected)


def test_a_first_step_of_the_optimizer_is_a_new_shape(tmp_path):
    training, ckpt = Wide(), Checkpointer(tmp_path)
    for step in range(3):
        ckpt.save(step, training.objects).result(ENDS_S)
        expected = copy.deepcopy(training.optimizer.state_dict())
        training.run(1)
    state = {"optimizer": {}}
    assert Checkpointer(tmp_path).restore(state) == 2
    assert_same(state["optimizer"], expected)
