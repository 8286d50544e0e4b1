"""Test the mapping of tensors: found automatically, given by a map, with every misfit named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.state.name_map import NameMap, read_name_map, settle
from holdfast.core.errors import BadUse

MODEL = {
    "model.embed.weight": (10, 4),
    "model.layers.0.up.weight": (8, 4),
    "model.layers.1.up.weight": (8, 4),
    "model.norm.weight": (4,),
}


def plan_of(saved, text="", model=MODEL, ties=()):
    return {each.saved: each.name for each in settle(saved, model, ties, NameMap(text))}


def renamed(rename, model=MODEL):
    return {rename(name): shape for name, shape in model.items()}


def test_the_same_names_need_nothing():
    assert plan_of(MODEL) == {name: name for name in MODEL}


@pytest.mark.parametrize(
    "prefix",
    ["model.", "module.", "model._orig_mod.", "model.module.", "_orig_mod.module.", "trainer.net."],
)
def test_a_prefix_is_found(prefix):
    saved = renamed(lambda name: prefix + name)
    others = {
        "optimizer.state.model.norm.weight.exp_avg": (4,),
        "holdfast.rank-0.rng.torch": (5,),
        "optim.x": (1,),
    }
    assert plan_of({**others, **saved}) == {prefix + name: name for name in MODEL}


@given(st.permutations(sorted(MODEL)), st.sampled_from(["", "model.", "a.b.c.", "module."]))
def test_the_plan_is_in_the_models_order_whatever_the_checkpoints(order, prefix):
    saved = {prefix + name: MODEL[name] for name in order}
    assert [each.name for each in settle(saved, MODEL)] == list(MODEL)


def test_an_optimizer_beside_a_model_without_prefix_is_not_taken_for_part_of_it():
    beside = {"optimizer.state.model.norm.weight.exp_avg": (4,), "holdfast.rank-0.rng.torch": (5,)}
    assert plan_of({**MODEL, **beside}) == {name: name for name in MODEL}


def test_what_wrappers_put_between_is_passed_over():
    saved = renamed(
        lambda name: "model." + name.replace("layers.0.", "layers.0._checkpoint_wrapped_module.")
    )
    saved = {
        name.replace("model.model.", "model._fsdp_wrapped_module.model._orig_mod."): s
        for name, s in saved.items()
    }
    assert sorted(plan_of(saved).values()) == sorted(MODEL)


def test_several_models_are_told_apart_by_the_map():
    saved = {**renamed(lambda name: "student." + name), **renamed(lambda name: "teacher." + name)}
    with pytest.raises(BadUse, match=r"several models: after 'student.' and after 'teacher.'"):
        plan_of(saved)
    assert set(plan_of(saved, 'prefix = "teacher."')) == {"teacher." + name for name in MODEL}
    # An average of the weights beside the usual name is not mistaken for the model.
    saved = {**renamed(lambda name: "ema." + name), **renamed(lambda name: "model." + name)}
    assert set(plan_of(saved)) == {"model." + name for name in MODEL}


def test_exact_names_placeholders_patterns_and_the_rest():
    saved = {
        "net.tok.weight": (10, 4),
        "net.h.0.fc": (8, 4),
        "net.h.1.fc": (8, 4),
        "net.model.norm.weight": (4,),
        "net.rope": (3,),
    }
    text = """
        drop = ["rope"]
        [names]
        "tok.weight" = "model.embed.weight"
        "h.{n}.fc" = "model.layers.{n}.up.weight"
    """
    expected = {
        "net.tok.weight": "model.embed.weight",
        "net.h.0.fc": "model.layers.0.up.weight",
        "net.h.1.fc": "model.layers.1.up.weight",
        "net.model.norm.weight": "model.norm.weight",
    }
    assert plan_of(saved, text) == expected
    pattern = r"""
        drop = ["rope"]
        [names]
        "tok.weight" = "model.embed.weight"
        [patterns]
        'h\.(\d+)\.fc' = 'model.layers.\1.up.weight'
    """
    assert plan_of(saved, pattern) == expected


def test_an_exact_name_goes_before_a_placeholder_and_that_before_a_pattern():
    names = NameMap(r"""
        [names]
        "a.0" = "exact"
        "a.{n}" = "placeholder.{n}"
        [patterns]
        '(a|b)\.(.*)' = 'pattern.\2.\1'
    """)
    assert [names.new_name(name) for name in ("a.0", "a.1", "b.1", "c")] == [
        "exact",
        "placeholder.1",
        "pattern.1.b",
        "c",
    ]


@given(st.text(st.characters(blacklist_categories=("Cs",)), min_size=1), st.text(min_size=1))
def test_names_are_text_and_not_patterns(name, other):
    names = NameMap()
    names._exact, names._rules = {}, []
    pattern, _ = names._placeholders(name.replace("{", "").replace("}", ""), "")
    assert bool(pattern.fullmatch(other)) == (other == name.replace("{", "").replace("}", ""))


def test_transposed_tensors_fit_the_other_way_round():
    saved = {**MODEL, "model.layers.0.up.weight": (4, 8), "model.layers.1.up.weight": (4, 8)}
    with pytest.raises(BadUse, match="fits when transposed: name it under `transposed`"):
        settle(saved, MODEL)
    plan = settle(
        saved,
        MODEL,
        (),
        NameMap(
            'transposed = ["layers.{n}.up.weight"]\nprefix = "model."\n[names]\n'
            '"layers.{n}.up.weight" = "model.layers.{n}.up.weight"\n"embed.weight" = "model.embed.weight"\n'
            '"norm.weight" = "model.norm.weight"'
        ),
    )
    assert [each.name for each in plan if each.transposed] == [
        "model.layers.0.up.weight",
        "model.layers.1.up.weight",
    ]
    with pytest.raises(BadUse, match="has 1 dimensions and cannot be transposed"):
        settle(MODEL, MODEL, (), NameMap('transposed = ["model.norm.weight"]'))


def test_tied_tensors_are_written_once():
    model = {**MODEL, "head.weight": (10, 4)}
    ties = [["model.embed.weight", "head.weight"]]
    both = settle(model, model, ties)
    assert [
        (each.saved, each.name, each.tied) for each in both if each.name == "model.embed.weight"
    ] == [
        ("model.embed.weight", "model.embed.weight", False),
        ("head.weight", "model.embed.weight", True),
    ]
    only_head = {name: shape for name, shape in model.items() if name != "model.embed.weight"}
    assert ("head.weight", "model.embed.weight", False) in [
        (each.saved, each.name, each.tied) for each in settle(only_head, model, ties)
    ]
    assert len(settle(MODEL, model, ties)) == len(MODEL)
    with pytest.raises(BadUse, match="lacks 1 of the model's 5 tensors"):
        settle(MODEL, model)


def test_everything_that_does_not_fit_is_named_with_the_nearest():
    saved = {**MODEL, "model.layers.0.up_weight": (8, 4)}
    del saved["model.layers.0.up.weight"]
    with pytest.raises(
        BadUse,
        match=r"lacks 1 .*'model.layers.0.up.weight' \(nearest: 'model.layers.0.up_weight'\)",
    ):
        settle(saved, MODEL)
    with pytest.raises(
        BadUse,
        match=r"1 tensors that the model does not have: 'model.layers.2.up.weight' \(nearest",
    ):
        settle({**MODEL, "model.layers.2.up.weight": (8, 4)}, MODEL)
    with pytest.raises(
        BadUse, match=r"'model.norm.weight' has the shape 5, the model's 'model.norm.weight' 4"
    ):
        settle({**MODEL, "model.norm.weight": (5,)}, MODEL)
    with pytest.raises(
        BadUse, match=r"None of the 2 tensors .* \('x', 'y' against 'model.embed.weight'"
    ):
        settle({"x": (1,), "y": (1,)}, MODEL)
    with pytest.raises(
        BadUse, match=r"names tensors that are not in the checkpoint: 'model.nrm.weight' \(nearest"
    ):
        plan_of(MODEL, 'drop = ["model.nrm.weight"]')
    with pytest.raises(
        BadUse, match=r"Both 'model.norm.weight' and 'model.other' of the checkpoint become"
    ):
        plan_of({**MODEL, "model.other": (4,)}, '[names]\n"model.other" = "model.norm.weight"')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("names = [", "is not a TOML file"),
        ("rename = {}", "has an entry 'rename'. It may have: prefix, drop"),
        ("prefix = 3", "prefix of the name map is 3. It must be a text"),
        ("drop = 'x'", "It must be a list of names"),
        ("drop = [1]", "It must be a list of names"),
        ("[names]\na = 1", "It must be a table of names"),
        ("[patterns]\n'(a' = 'b'", "is not an RE2 pattern"),
        ("[patterns]\n'a' = '\\1'", "refers to a group"),
        ('[names]\n"a.{n}" = "b.{m}"', "has {m}, which 'a.{n}' does not have"),
        ('[names]\n"a.{n}.{n}" = "b"', "has {n} twice"),
    ],
)
def test_a_map_that_is_none_is_a_sentence(text, said):
    with pytest.raises(BadUse) as error:
        NameMap(text)
    assert said in str(error.value)
    assert str(error.value).endswith(".")


def test_two_rules_that_disagree():
    with pytest.raises(BadUse, match=r"Two entries of the name map fit 'a.b'"):
        NameMap('[names]\n"a.{n}" = "x.{n}"\n"{m}.b" = "y.{m}"').new_name("a.b")


def test_a_map_in_a_file(tmp_path):
    assert read_name_map(None).new_name("a") == "a"
    (tmp_path / "map.toml").write_text('[names]\n"a" = "b"')
    assert read_name_map(tmp_path / "map.toml").new_name("a") == "b"
    with pytest.raises(BadUse, match="cannot be read"):
        read_name_map(tmp_path / "no.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadUse, match="cannot be read"):
        read_name_map(tmp_path / "bytes.toml")


def test_a_model_without_one_of_its_tied_names_is_as_good_as_one_with_both():
    model, ties = {**MODEL, "head.weight": (10, 4)}, [["model.embed.weight", "head.weight"]]
    saved = {
        **{"model." + name: MODEL[name] for name in MODEL},
        **{"teacher." + name: model[name] for name in model},
    }
    plan = settle(saved, model, ties)
    assert all(each.saved.startswith("model.") for each in plan)


def test_a_digit_after_a_placeholder_is_a_digit():
    model = {"model.h10.weight": (2,), "modèle.weight": (3,)}
    saved = {"blocks.1.w": (2,), "other.w": (3,)}
    text = """
    [names]
    "blocks.{n}.w" = "model.h{n}0.weight"
    [patterns]
    '(o)(t)(h)(e)(r)\\.w' = 'modèle.weight'
    """
    assert plan_of(saved, text, model=model) == {
        "blocks.1.w": "model.h10.weight",
        "other.w": "modèle.weight",
    }


def test_names_in_a_map_may_have_what_wrappers_put_between():
    saved = {
        "net._orig_mod.embed.weight": (10, 4),
        **{f"net._orig_mod.{n}": MODEL[n] for n in list(MODEL)[1:]},
    }
    text = """
    prefix = "net._orig_mod."
    [names]
    "_orig_mod.embed.weight" = "model.embed.weight"
    """
    assert len(plan_of(saved, text)) == len(MODEL)
