"""Show that a state on a GPU is planned again as its shape changes; without a GPU, the CPU stands in."""

import pytest
import torch
from gpu_stand_in import DEVICE, LARGE, assert_equal, stand_in

import holdfast
from holdfast.checkpoint.format.paths import step_path
from holdfast.checkpoint.save.plan_cache import PlanCache


@pytest.fixture(autouse=True)
def _gpu_or_stand_in(monkeypatch):
    stand_in(monkeypatch)


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
